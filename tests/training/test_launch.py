"""``cloudtrain launch``: what it starts, and how what it has started ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from tests.launching import DIGITS, ENVIRONMENT, launch, tail
from training.commands.main import app
from training.process import start_rank
from training.process.hosts import Ranks
from training.process.launch import cloudtrain, command_line, environment_of, mpirun_of, words_of
from training.process.program import check_program
from training.process.start_rank import PRELOAD, PRELOADED

BOUND_SECONDS = 120
INTERRUPTIBLE = ("env", "--default-signal=INT")  # also where the tests run in the background of a shell

# words that a shell, horovodrun or mpirun might take for theirs
WORDS = [
    *("-np", "3", "--help", ":", "", "a b", "$HOME", "*", "--", "--mca", "btl", "it's", '"', "\n", "é", "-x")
]


def test_on_one_machine_there_may_be_more_ranks_than_cores_and_on_several_the_slots_count():
    assert "--binding-args=--bind-to none --map-by slot:OVERSUBSCRIBE" in command_line(Ranks(4), ["true"])
    command = command_line(Ranks(4, "a:2,b:2", "eth0"), cloudtrain("train", "x.yaml"))
    assert "--binding-args=--bind-to none --map-by slot" in command
    assert command[command.index("-H") + 1] == "a:2,b:2"
    assert json.loads(command[-1]) == [str(Path(sys.executable).parent / "cloudtrain"), "train", "x.yaml"]


def test_the_mpirun_command_is_that_of_the_process_that_horovodrun_has_become():
    mpirun = ["mpirun", "-np", "2", "-x", "A B", "python"]
    assert mpirun_of(["/bin/sh", "-c", "mpirun -np 2 -x 'A B' python '[\"train\"]'"]) == mpirun
    assert (
        mpirun_of(["/usr/bin/prterun", *mpirun[1:], '["train"]']) == mpirun
    )  # where the shell has become it
    assert mpirun_of([sys.executable, "/usr/bin/horovodrun", "-np", "2", '["train"]']) is None


def test_a_process_that_has_ended_has_no_mpirun_command():
    command = ["sh", "-c", "echo; read line"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"\n"  # Linux has no words of a program that it still loads
    assert words_of(process.pid) == command
    process.communicate()
    assert mpirun_of(words_of(process.pid)) is None


@pytest.mark.parametrize(
    ("program", "others", "message"),
    [
        ([], [], "--: expected a program behind it"),
        (
            ["python"],
            ["my.yaml", "reducer.density=1"],
            "expected nothing of a configuration .*, got my.yaml reducer.density=1",
        ),
    ],
)
def test_a_program_is_given_and_nothing_of_a_configuration_beside_it(program, others, message):
    with pytest.raises(ValueError, match=message):
        check_program(program, others)


def test_the_command_line_of_a_program_is_checked_in_one_line_and_help_names_it():
    def launch(*words):
        return CliRunner().invoke(app, ["launch", *words])

    for words, said in {
        ("--",): "cloudtrain: --: expected a program behind it, such as: -- python my.py\n",
        (
            DIGITS,
            "--",
            "x",
        ): f"cloudtrain: --: expected nothing of a configuration beside a program, got {DIGITS}\n",
    }.items():
        result = launch("-np", "2", *words)
        assert (result.exit_code, result.stdout, result.stderr) == (2, "", said)
    assert "-- python my.py" in launch("--help").stdout
    result = launch("-np", "2")
    assert result.exit_code == 2
    assert "expected a configuration, or a program: -- python my.py" in result.stderr


@pytest.mark.launch
def test_any_program_is_started_with_its_words_untouched_and_its_output_and_status_passed_on(tmp_path):
    (tmp_path / "my.py").write_text(
        "import json, os, sys\n"
        "import commlib\n"
        "comm = commlib.transport.mpi.world()\n"
        "everyone = comm.allgather_objects((comm.rank, os.getcwd()))\n"
        "if comm.rank == 0:\n"
        "    print(json.dumps([sys.argv[1:], sys.executable, everyone]))\n"
        "    print('to standard error', file=sys.stderr)\n"
        "    sys.stdout.flush()\n"
        "sys.exit(3)\n"
    )
    result = launch(2, "--", "python", "my.py", *WORDS, cwd=tmp_path)
    assert result.returncode == 3, tail(result)
    assert result.stderr == "to standard error\n"
    words, python, ranks = json.loads(result.stdout)
    assert words == WORDS
    assert Path(python).parent == Path(sys.executable).parent
    assert ranks == [[0, str(tmp_path)], [1, str(tmp_path)]]


@pytest.mark.launch
def test_a_program_that_is_not_there_is_one_line(tmp_path):
    result = launch(2, "--", "no-such-program", "x", cwd=tmp_path)
    assert result.returncode == 127
    (line,) = result.stderr.splitlines()
    assert line.startswith("cloudtrain: no-such-program: No such file or directory on ")
    assert line.endswith("; expected a command, such as: python my.py")


def test_without_a_compiler_the_launch_says_that_mpirun_listens_everywhere(monkeypatch, tmp_path, capsys):
    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert PRELOAD not in environment_of(Ranks(2))
    assert capsys.readouterr().err == (
        "cloudtrain: warning: mpirun listens on all interfaces of this machine: "
        "none of cc, gcc, g++ is installed\n"
    )
    assert environment_of(Ranks(2, "a:1,b:1")).get(PRELOAD) is None
    assert capsys.readouterr().err == ""


def test_an_environment_whose_path_cannot_be_preloaded_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "my environment"))
    assert PRELOAD not in environment_of(Ranks(2))
    (line,) = capsys.readouterr().err.splitlines()
    assert "listens on all interfaces of this machine: a path with a space or a colon" in line


def test_a_rank_keeps_what_its_user_preloads_and_not_what_the_launch_does(monkeypatch, tmp_path):
    monkeypatch.setenv(PRELOAD, "/lib/mine.so")
    mpirun = environment_of(Ranks(2))
    assert mpirun[PRELOAD].endswith(f"/{PRELOADED}:/lib/mine.so")
    monkeypatch.setattr(os, "environ", mpirun)
    monkeypatch.setattr(os, "execvp", lambda *words: None)
    monkeypatch.setattr(sys, "argv", ["start_rank.py", '["true"]'])
    monkeypatch.setattr(start_rank, "end_with_parent", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda *words: None)
    start_rank.main()
    assert mpirun[PRELOAD] == "/lib/mine.so"


WAITING = (
    "import os, time\n"
    "from mpi4py import MPI\n"
    "assert 'cloudtrain' not in os.environ.get('LD_PRELOAD', '')\n"
    "everyone = MPI.COMM_WORLD.allgather(os.getpid())\n"
    "if MPI.COMM_WORLD.rank == 0: print(*everyone, flush=True)\n"
    "time.sleep(600)"
)


@contextmanager
def started() -> Iterator[tuple["subprocess.Popen[str]", list[psutil.Process]]]:
    """Launch two ranks that wait; yield the launch and all processes below it, none of which is left."""
    with subprocess.Popen(
        [*INTERRUPTIBLE, "cloudtrain", "launch", "-np", "2", "--", "python", "-c", WAITING],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        below: list[psutil.Process] = []
        try:
            assert process.stdout is not None
            ranks = [int(word) for word in process.stdout.readline().split()]
            below = psutil.Process(process.pid).children(recursive=True)
            assert len(ranks) == 2
            assert set(ranks) <= {each.pid for each in below}
            yield process, below
        finally:
            process.kill()
            for each in below:
                if each.is_running():
                    each.kill()


def listening(process: psutil.Process) -> list[str]:
    """Return the addresses on which a process listens for TCP connections."""
    connections = process.net_connections("tcp")
    return [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN]


@pytest.mark.launch
def test_a_launch_on_one_machine_listens_on_loopback_only_and_when_killed_takes_its_ranks_with_it():
    with started() as (process, below):
        addresses = {address for each in below for address in listening(each)}
        assert addresses <= {"127.0.0.1", "::1"}
        assert addresses  # mpirun listens
        process.kill()
        assert process.wait(BOUND_SECONDS) == -signal.SIGKILL
        _, left = psutil.wait_procs(below, timeout=BOUND_SECONDS)
        assert left == []


@pytest.mark.launch
def test_ranks_end_with_the_mpirun_that_started_them():
    with started() as (_, below):
        (mpirun,) = [each for each in below if each.name() == "prterun"]
        mpirun.kill()
        _, left = psutil.wait_procs(below, timeout=BOUND_SECONDS)
        assert left == []


@pytest.mark.launch
@pytest.mark.parametrize(
    ("number", "status", "said"),
    [(signal.SIGINT, 130, "cloudtrain: interrupted\n"), (signal.SIGTERM, 128 + signal.SIGTERM, "")],
)
def test_a_launch_that_is_ended_says_no_more_than_that_and_takes_its_ranks_with_it(number, status, said):
    with started() as (process, below):
        process.send_signal(number)
        out, errors = process.communicate(timeout=BOUND_SECONDS)
        assert (process.returncode, out, errors) == (status, "", said)
        _, left = psutil.wait_procs(below, timeout=BOUND_SECONDS)
        assert left == []


@pytest.mark.large
@pytest.mark.launch
def test_an_interrupted_rank_of_training_is_one_line_that_names_it(tmp_path):
    with subprocess.Popen(
        [*INTERRUPTIBLE, "cloudtrain", "launch", "-np", "2", DIGITS, "phases.0.epochs=100000"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if "loss" in line:  # it is in the middle of steps
                    break
            (rank,) = [
                each
                for each in psutil.Process(process.pid).children(recursive=True)
                if each.name() == "cloudtrain" and each.environ()["OMPI_COMM_WORLD_RANK"] == "1"
            ]
            rank.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=BOUND_SECONDS)
        finally:
            process.terminate()
    assert errors == f"rank 1 of 2 on {os.uname().nodename} was interrupted\n"
    assert process.returncode == 130
