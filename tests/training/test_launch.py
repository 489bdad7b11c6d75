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

from tests.launching import DIGITS, ENVIRONMENT, launch, run, tail
from tests.training.refusal import invoke, refusal
from training.process import start_rank
from training.process.hosts import Ranks, common
from training.process.launch import TEMPORARY, cloudtrain, command_line, environment_of
from training.process.launch import launch as launch_job
from training.process.start_rank import PRELOAD, PRELOADED

BOUND_SECONDS = 120
INTERRUPTIBLE = ("env", "--default-signal=INT")  # also where the tests run in the background of a shell

# words that a shell, horovodrun or mpirun might take for theirs
WORDS = [
    *("-np", "3", "--help", ":", "", "a b", "$HOME", "*", "--", "--mca", "btl", "it's", '"', "\n", "é", "-x")
]


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (Ranks(4, None, "lo"), "-np 4 --bind-to none --map-by slot:OVERSUBSCRIBE"),
        (Ranks(4, "a:2,b:2", "eth0"), "-np 4 -H a:2,b:2 --bind-to none --map-by slot"),
    ],
    ids=["more ranks than cores", "slots count"],
)
def test_the_mpirun_command_names_the_variables_of_the_environment_without_their_values(job, expected):
    environment = {"KEY": "secret", "OLDPWD": "/", "CUDA_VISIBLE_DEVICES": "1", "BASH_FUNC_f%%": "() {}"}
    *options, python, isolated, program, words = command_line(job, cloudtrain("train", "x"), environment)
    start = f"mpirun --allow-run-as-root --tag-output {expected} --mca pml ob1"
    assert options == [*start.split(), "--mca", "btl_tcp_if_include", job.interface, "-x", "KEY"]
    assert (python, isolated, program) == (sys.executable, "-I", start_rank.__file__)
    assert json.loads(words) == [str(Path(sys.executable).parent / "cloudtrain"), "train", "x"]


def test_on_many_hosts_mpirun_starts_all_daemons_itself():
    hosts = ",".join(f"host{number}:1" for number in range(64))
    command = command_line(Ranks(64, hosts), ["true"], {})
    at = command.index("plm_ssh_no_tree_spawn")
    assert command[at + 1 : at + 4] == ["1", "--prtemca", "plm_ssh_num_concurrent"]
    assert "--prtemca" not in command_line(Ranks(63, hosts.rpartition(",")[0]), ["true"], {})


def test_the_interfaces_that_connect_hosts_are_those_with_an_address_of_their_own_on_each():
    first = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "docker0": "172.17.0.1", "ib0": "10.1.0.1"}
    second = {"lo": "127.0.0.1", "eth0": "10.0.0.2", "docker0": "172.17.0.1", "ib0": "10.1.0.2"}
    assert common([first, second]) == "eth0,ib0"
    assert common([first, first]) is None
    assert common([first]) is None
    assert common([first, {"ens3": "10.0.0.3"}]) is None


def test_a_host_that_ssh_does_not_reach_ends_the_job_with_a_line_of_it(tmp_path, monkeypatch, capsys):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\n[ $9 = b.. ] || { echo hello; echo {}; exit; }\necho no route >&2; exit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = signal.getsignal(signal.SIGTERM)
    assert launch_job(Ranks(2, "a:1,b..:1"), ["true"], lambda: None) == 1  # b.. can be no name
    signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "cloudtrain: ssh not successful for host b..: no route\n"


def test_the_command_line_of_a_program_is_checked_in_one_line_and_help_names_it():
    assert refusal("launch", "-np", "2", "--") == "--: expected a program behind it, such as: -- python my.py"
    expected = f"--: expected nothing of a configuration beside a program, got {DIGITS}"
    assert refusal("launch", "-np", "2", DIGITS, "--", "x") == expected
    assert "-- python my.py" in invoke("launch", "--help").stdout
    result = invoke("launch", "-np", "2")
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


@pytest.mark.parametrize(
    ("folder", "why"), [("environment", "none of cc, gcc, g++"), ("my environment", "a path with a space")]
)
def test_where_nothing_can_be_preloaded_a_warning_says_that_mpirun_listens_everywhere(
    monkeypatch, tmp_path, capsys, folder, why
):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / folder))
    monkeypatch.setenv("PATH", "")
    assert PRELOAD not in environment_of(Ranks(2))
    said = capsys.readouterr().err
    assert said.startswith(f"cloudtrain: warning: mpirun listens on all interfaces of this machine: {why}")
    assert PRELOAD not in environment_of(Ranks(2, "a:1,b:1"))
    assert capsys.readouterr().err == ""


def test_a_rank_keeps_what_its_user_preloads_and_not_what_the_launch_does(monkeypatch):
    monkeypatch.setenv(PRELOAD, "/lib/mine.so")
    mpirun = environment_of(Ranks(2))
    assert mpirun[PRELOAD].endswith(f"/{PRELOADED}:/lib/mine.so")
    rank = run(sys.executable, start_rank.__file__, f'["printenv", "{PRELOAD}"]', env=mpirun)
    assert rank.stdout == "/lib/mine.so\n"


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


@pytest.mark.launch
@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGINT, 130, "cloudtrain: interrupted\n"),
        (signal.SIGTERM, 128 + signal.SIGTERM, ""),
        (signal.SIGKILL, -signal.SIGKILL, ""),
        (None, 128 + signal.SIGKILL, ""),  # mpirun is killed
    ],
)
def test_a_launch_on_one_machine_listens_on_loopback_only_and_ends_with_all_that_it_has_started(
    number, status, said
):
    with started() as (process, below):
        connections = [connection for each in below for connection in each.net_connections("tcp")]
        addresses = {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
        assert addresses <= {"127.0.0.1", "::1"}
        assert addresses  # mpirun listens
        (mpirun,) = [each for each in below if each.name() == "prterun"]
        folders = [mpirun.environ()[name] for name in TEMPORARY]
        assert all(map(os.listdir, folders))
        mpirun.kill() if number is None else process.send_signal(number)
        out, errors = process.communicate(timeout=BOUND_SECONDS)
        assert (process.returncode, out, errors) == (status, "", said)
        _, left = psutil.wait_procs(below, timeout=BOUND_SECONDS)
        assert left == []
        assert not any(map(os.path.exists, folders))
