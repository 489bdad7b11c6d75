"""The command as users start it in one process, where it refuses; in ``tests/test_wheel.py`` one trains."""

import os

import pytest

from commlib import REDUCERS
from tests.launching import DIGITS, run
from tests.training.refusal import invoke, refusal
from training.commands import train
from training.process import devices as gpus


def test_alone_and_through_launch_a_wrong_configuration_exits_with_status_2(tmp_path):
    alone = run("cloudtrain", "train", DIGITS, "reducer=hitopkk", cwd=tmp_path)
    assert (alone.returncode, alone.stdout) == (2, "")
    launched = refusal("launch", "-np", "4", DIGITS, "reducer=hitopkk")
    assert alone.stderr == f"cloudtrain: {launched}\n"
    known = ", ".join(REDUCERS)
    assert f'unknown reducer "hitopkk" (known: {known}, auto), did you mean "hitopk"?' in launched


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("localhost 2", "-H: expected host:slots,host:slots,…, got 'localhost 2'"),
        ("localhost:1", "-H: expected slots for 2 ranks, got 1 in localhost:1"),
    ],
)
def test_hosts_that_cannot_hold_the_ranks_are_refused(hosts, message):
    assert refusal("launch", "-np", "2", DIGITS, "-H", hosts) == message


def test_the_command_names_its_version_and_refuses_what_it_does_not_know():
    assert run("cloudtrain", "--version").stdout == "cloudtrain 0.1.0\n"
    for words in (("trian", DIGITS), ("train",), ("launch", DIGITS), ("launch", "-np", "0", DIGITS)):
        result = invoke(*words)
        assert result.exit_code == 2
        assert "Traceback" not in result.stderr
        assert "Error" in result.stderr


def test_a_rank_has_its_gpu_before_tensorflow_looks_at_them(monkeypatch):
    """An import of TensorFlow asks CUDA for its GPUs, and CUDA asks for the variable only once."""
    seen = []

    def imported():
        seen.append(os.environ[gpus.VISIBLE])
        raise NotImplementedError

    monkeypatch.setenv(gpus.VISIBLE, "5,6")
    monkeypatch.setattr(train, "import_tensorflow", imported)
    with pytest.raises(NotImplementedError):
        train.train(str(DIGITS), ["cache={}"])
    assert seen == ["5"]
