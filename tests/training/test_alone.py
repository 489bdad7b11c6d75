"""The command as users start it in one process, where it refuses; in ``tests/test_wheel.py`` one trains."""

import os

import pytest
from typer.testing import CliRunner

from commlib import REDUCERS
from tests.launching import DIGITS, run
from training.commands import train
from training.commands.main import app
from training.process import devices as gpus


def invoke(*words):
    """Run ``cloudtrain`` in this process."""
    return CliRunner().invoke(app, words)


def test_alone_and_through_launch_a_wrong_configuration_exits_with_status_2(tmp_path):
    alone = run("cloudtrain", "train", DIGITS, "reducer=hitopkk", cwd=tmp_path)
    launched = invoke("launch", "-np", "4", DIGITS, "reducer=hitopkk")
    assert (alone.returncode, alone.stdout) == (launched.exit_code, launched.stdout) == (2, "")
    for said in (alone.stderr, launched.stderr):
        (line,) = said.splitlines()
        assert (
            f'unknown reducer "hitopkk" (known: {", ".join(REDUCERS)}, auto), did you mean "hitopk"?' in line
        )


def test_ranks_that_do_not_see_each_other_are_refused(tmp_path):  # also tests/transport/test_ending.py
    result = run("env", "OMPI_COMM_WORLD_SIZE=4", "cloudtrain", "train", DIGITS, cwd=tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "OMPI_COMM_WORLD_SIZE says that 4 ranks were started and MPI sees 1" in line
    assert "cloudtrain launch -np 4 CONFIG" in line


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("localhost 2", "-H: expected host:slots,host:slots,…, got 'localhost 2'"),
        ("localhost:1", "-H: expected slots for 2 ranks, got 1 in localhost:1"),
    ],
)
def test_hosts_that_cannot_hold_the_ranks_are_refused(hosts, message):
    result = invoke("launch", "-np", "2", DIGITS, "-H", hosts)
    assert result.exit_code == 2
    assert result.stderr == f"cloudtrain: {message}\n"


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
