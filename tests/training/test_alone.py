"""The command as users start it in one process: its help, what it refuses, and what TensorFlow is told.

In ``tests/test_wheel.py`` one trains.
"""

import os
import re
import sys

import pytest
import tensorflow as tf
from typer.main import get_command

from commlib import REDUCERS
from tests.launching import DIGITS, run
from tests.training.refusal import invoke, refusal
from training.commands import train
from training.commands.main import app
from training.process import devices
from training.process.job import LocalRank

THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


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
    assert invoke("--version").stdout == "cloudtrain 0.1.0\n"
    for words in (("trian", DIGITS), ("train",), ("launch", DIGITS), ("launch", "-np", "0", DIGITS)):
        result = invoke(*words)
        assert result.exit_code == 2
        assert "Traceback" not in result.stderr
        assert "Error" in result.stderr


def commands(command, words=()):
    """Yield the words of each command and of each group of commands."""
    yield words
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*words, name))


@pytest.mark.parametrize("columns", [60, 200])
@pytest.mark.parametrize("words", list(commands(get_command(app))), ids=" ".join)
def test_help_shows_no_types_of_python_and_cuts_no_sentence(monkeypatch, words, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = invoke(*words, "--help")
    assert result.exit_code == 0
    assert not re.search(r"<(list|int|str|float|bool)", result.stdout)
    assert "[[" not in result.stdout
    assert not re.search(r"\w\.\.\.(\s|$)|…$", result.stdout, re.MULTILINE), result.stdout


def test_a_rank_has_its_gpu_before_tensorflow_looks_at_them(monkeypatch):
    """An import of TensorFlow asks CUDA for its GPUs, and CUDA asks for the variable only once."""
    seen = []

    def imported():
        seen.append(os.environ[devices.VISIBLE])
        raise NotImplementedError

    monkeypatch.setenv(devices.VISIBLE, "5,6")
    monkeypatch.setattr(train, "import_tensorflow", imported)
    with pytest.raises(NotImplementedError):
        train.train(str(DIGITS), ["cache={}"])
    assert seen == ["5"]


@pytest.mark.parametrize(
    ("threads", "overlap", "given", "set_to"),
    [
        (3, False, (), {"intra": 3, "inter": 3}),
        (3, True, (), {"intra": 3, "inter": 3}),
        (1, False, (), {"intra": 1, "inter": 1}),
        (1, True, (), {"intra": 1, "inter": 2}),  # with one, buckets are submitted last
        (1, True, ("TF_NUM_INTEROP_THREADS",), {"intra": 1}),
        (3, True, THREADS, {}),
    ],
)
def test_cores_are_shared_where_the_environment_sets_no_threads(monkeypatch, threads, overlap, given, set_to):
    found = {}
    for kind in ("intra", "inter"):
        monkeypatch.setattr(
            tf.config.threading,
            f"set_{kind}_op_parallelism_threads",
            lambda threads, kind=kind: found.update({kind: threads}),
        )
    monkeypatch.setattr(LocalRank, "threads", threads)
    for name in THREADS:
        monkeypatch.setenv(name, "5")
        if name not in given:
            monkeypatch.delenv(name)
    devices._share_cores(LocalRank(0, 1), overlap=overlap)
    assert found == set_to


def test_the_import_leaves_out_packages_that_keras_would_take_along_and_they_can_be_imported_later():
    """That costs each rank more than a second, at each start."""
    program = (
        "import gc, sys\n"
        "from training.process.tf_logging import OPTIONAL, import_tensorflow\n"
        "import_tensorflow()\n"
        "assert {'keras', 'tensorflow'} <= sys.modules.keys()\n"
        "print([name for name in OPTIONAL if name in sys.modules], gc.isenabled())\n"
        "import pandas, scipy.sparse\n"
    )
    done = run(sys.executable, "-c", program)
    assert (done.returncode, done.stdout.strip()) == (0, "[] True"), done.stderr
