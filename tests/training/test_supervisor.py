"""When a failed job is started again; small programs stand for jobs."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ENVIRONMENT, ROOT
from training.config.config import load
from training.process import launch as launching
from training.process.hosts import Ranks
from training.process.launch import RestartPolicy, launch
from training.process.progress import FOLDER_MARK
from training.process.supervisor import (
    LONGEST_DELAY_SECONDS,
    Decision,
    Ended,
    Progress,
    Supervisor,
    cause_of,
    check_restarts,
)

KILLED = "prterun noticed that process rank {} with PID 30818 on node {} exited on\nsignal 9 (Killed).\n"
PEER_LOST = """An MPI communication peer process has unexpectedly disconnected.  This
usually indicates a failure in the peer process (e.g., a crash or

  Local host: {}
  Local PID:  3041
  Peer host:  {}
"""
LOST = "PRTE has lost communication.\n\n  Remote daemon: [prterun-a-1@0,2] on node b\n"
STALLED = "rank 0 of 2 on a has waited 6 s for other ranks at step 7; ranks [1] have not come\n"


def run_folder(path: Path, *, checkpoint: int | None = None, step: int | None = None) -> Path:
    (path / "checkpoints").mkdir(parents=True, exist_ok=True)
    if checkpoint is not None:
        (path / "checkpoints" / f"step-{checkpoint:08d}").mkdir()
    if step is not None:
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "step", "epoch": 2, "step": step}) + "\n")
    return path


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (KILLED.format(3, "b"), "rank 3 on b: signal 9"),
        (KILLED.format(1, "a.cluster"), "rank 1 on a: signal 9"),  # by the name that was given
        ("rank 2 of 4 on b failed:\nTraceback\n", "rank 2 on b: failed"),
        ("rank 1 of 4 on a has ended, and others wait for it\n", "rank 1 on a: has ended"),
        (
            "rank 0 of 4 on a has waited 31 s for other ranks at step 7; ranks [2, 3] have not come\n",
            "rank 2 on b: have not come",
        ),
        ("  Remote daemon: [prterun-a-1@0,2] on node b\n\nThis is usually\n", "b: not reached"),
        ("ssh not successful for host b:\nssh: connect to host b port 22\n", "b: not reached"),
        (PEER_LOST.format("c", "b"), "b: disconnected"),
        (PEER_LOST.format("b", "c") + KILLED.format(3, "b"), "rank 3 on b: signal 9"),
        ("epoch 1  step 3\n", ""),
    ],
)
def test_the_rank_and_host_with_which_a_job_ended_are_found_in_what_it_printed(said, expected):
    assert cause_of(said, Ranks(4, "a:2,b:2"))[0] == expected


def failed(rank: int, host: str, folder: Path | None = None) -> Ended:
    return Ended(137, KILLED.format(rank, host), folder)


def test_restarts_wait_twice_as_long_each_time_until_there_is_a_new_checkpoint(tmp_path):
    supervisor = Supervisor(Ranks(2), 20)
    delays = []
    for number in range(10):
        folder = run_folder(tmp_path, step=number, checkpoint=5 if number == 4 else None)
        decision = supervisor.after(failed(1, "vm", folder))
        assert decision.ranks is not None
        delays.append(decision.delay_seconds)
    assert delays == [0, 1, 2, 4, 0, 1, 2, 4, 8, 16]
    assert LONGEST_DELAY_SECONDS == 60
    decision = supervisor.after(failed(1, "vm", run_folder(tmp_path, step=10)))
    assert decision.delay_seconds == 32
    for number in range(11, 13):
        decision = supervisor.after(failed(1, "vm", run_folder(tmp_path, step=number)))
        assert decision.delay_seconds == 60
    assert decision.line == (
        "the job has failed with status 137 (rank 1 on vm: signal 9) at epoch 3, step 12 of its phase: "
        "restart 13 of 20 in 60 s"
    )
    assert decision.ranks == Ranks(2)  # the only host stays


def test_a_host_that_failed_twice_is_left_out_and_there_are_fewer_ranks():
    supervisor = Supervisor(Ranks(6, "a:2,b:2,c:2", "eth0"), 9)
    first, second = supervisor.after(failed(2, "b")), supervisor.after(failed(0, "a"))
    assert first.ranks == second.ranks == Ranks(6, "a:2,b:2,c:2", "eth0")
    third = supervisor.after(failed(3, "b"))
    assert third.ranks == Ranks(4, "a:2,c:2", "eth0")
    assert third.line.endswith("restart 3 of 9 in 2 s, with 4 ranks, without b, which has failed 2 times")
    supervisor.after(failed(2, "c.cluster"))  # rank 2 is on c now
    assert supervisor.after(failed(3, "c")).ranks == Ranks(2, "a:2", "eth0")
    end = supervisor.after(failed(0, "a"))
    assert end == Decision(
        "the job has failed with status 137 (rank 0 on a: signal 9): given up, no host is left that has not "
        "failed 2 times"
    )


def test_a_host_may_fail_as_often_as_is_asked_for():
    supervisor = Supervisor(Ranks(4, "a:2,b:2"), 9, host_failures=4)
    assert [supervisor.after(failed(2, "b")).ranks.count for _ in range(4)] == [4, 4, 4, 2]


def test_a_step_that_fails_three_times_in_a_row_is_given_up(tmp_path):
    supervisor = Supervisor(Ranks(2), 9)
    assert supervisor.after(Ended(1, "", run_folder(tmp_path, step=30, checkpoint=20))).ranks is not None
    assert supervisor.after(Ended(1, "", run_folder(tmp_path, step=40))).ranks is not None
    assert supervisor.after(Ended(1, "", run_folder(tmp_path, step=40))).ranks is not None
    end = supervisor.after(Ended(1, "", run_folder(tmp_path, step=40)))
    assert end == Decision(
        "the job has failed with status 1 at epoch 3, step 40 of its phase: given up after 3 failures there"
    )


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (0, None),
        (2, "not started again after a usage error (status 2)"),
        (127, "not started again after a program that cannot be started (status 127)"),
        (130, "not started again after an interrupt (status 130)"),
    ],
)
def test_what_no_restart_mends_is_given_up_at_once(status, line):
    assert Supervisor(Ranks(2), 9).after(Ended(status)) == Decision(line)


def test_a_run_whose_last_process_still_holds_it_is_waited_for():
    supervisor = Supervisor(Ranks(2), 9)
    alive = Ended(
        2, "cloudtrain: resume: expected a run that has stopped, got runs/x, which is being trained\n"
    )
    assert supervisor.after(alive).ranks is None  # by the user's own resume
    supervisor.after(Ended(137))
    assert supervisor.after(alive).ranks is not None


def test_a_preempted_job_is_started_again_at_once_and_that_does_not_count(tmp_path):
    supervisor = Supervisor(Ranks(2), 1)
    line = "the job was pre-empted at its beginning: starting it again"
    for number in range(5):
        decision = supervisor.after(Ended(75, "", run_folder(tmp_path, checkpoint=number)))
        assert decision == Decision(line, Ranks(2))
    still = Ended(75, "", tmp_path)  # without another step
    assert supervisor.after(still).line.endswith("restart 1 of 1 now")
    assert supervisor.after(still).ranks is None


def test_progress_is_read_from_the_end_of_a_long_file_with_half_a_line(tmp_path):
    assert Progress.of(None) is None
    assert Progress.of(tmp_path / "missing") is None
    assert Progress.of(run_folder(tmp_path)) == Progress(None, None)
    run_folder(tmp_path, step=1, checkpoint=30)
    run_folder(tmp_path, checkpoint=7)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f'{{"kind": "examples", "text": "{"x" * 100_000}"}}\n')
    run_folder(tmp_path, step=50)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "epoch": 2}\n{"kind": "step", "epo')
    assert Progress.of(tmp_path) == Progress(30, (2, 50))


def test_restarts_without_checkpoints_or_of_a_dry_run_are_refused():
    config = load("digits")
    check_restarts(0, config, is_dry=True)
    with pytest.raises(ValueError, match="--restarts: expected 0 where there are no checkpoints, got 3"):
        check_restarts(3, config, is_dry=False)
    config = load("digits", ["checkpoints={}"])
    check_restarts(3, config, is_dry=False)
    with pytest.raises(ValueError, match="--restarts: expected 0 for a dry run, got 3"):
        check_restarts(3, config, is_dry=True)


JOB = """
import os, sys
from pathlib import Path
folder, *words = sys.argv[1:]
folder = Path(folder)
folder.mkdir(exist_ok=True)
starts = folder / "starts"
with starts.open("a") as file:
    print(*words, os.environ.get("CLOUDTRAIN_FOLDER"), file=file)
count = len(starts.read_text().splitlines())
{body}
"""


@pytest.fixture
def job(monkeypatch, tmp_path):
    """Return a function that launches a program of its own, without mpirun; and its starts."""
    monkeypatch.setattr(launching, "command_line", lambda ranks, command, environment: list(command))
    monkeypatch.setattr(launching.time, "sleep", lambda seconds: None)
    before = signal.getsignal(signal.SIGTERM)

    def start(body: str, *words: str, **policy: object) -> tuple[int, list[str]]:
        command = [sys.executable, "-c", JOB.format(body=body), str(tmp_path / "job"), *words]
        status = launch(Ranks(2), command, lambda: None, RestartPolicy(**policy))
        return status, (tmp_path / "job" / "starts").read_text().splitlines()

    yield start
    signal.signal(signal.SIGTERM, before)


def test_a_run_goes_on_in_its_folder_once_it_has_one(job, capfd, tmp_path):
    mark = f"print({FOLDER_MARK!r} + json.dumps(str(folder / 'my run')), flush=True)"
    body = f"import json\nif count == 2: {mark}\nprint('start', count)\nsys.exit(0 if count == 4 else 7)"
    status, starts = job(body, "resume=auto", restarts=5, resumes=True)
    resume = f'resume="{tmp_path}/job/my run"'
    assert starts == ["resume=auto 1"] * 2 + [f"resume=auto {resume} 1"] * 2
    said = capfd.readouterr()
    assert status == 0
    assert said.out.splitlines() == ["start 1", "start 2", "start 3", "start 4"]
    assert said.err.splitlines() == [
        f"cloudtrain: the job has failed with status 7: restart {number} of 5 {when}"
        for number, when in ((1, "now"), (2, "in 1 s"), (3, "in 2 s"))
    ]


def test_a_program_is_only_started_again_and_the_last_status_is_the_launch_s(job, capfd):
    status, starts = job("print('no', file=sys.stderr)\nsys.exit(10 + count)", "x", restarts=2)
    assert (status, starts) == (13, ["x None"] * 3)
    assert capfd.readouterr().err.splitlines() == [
        *("no", "cloudtrain: the job has failed with status 11: restart 1 of 2 now"),
        *("no", "cloudtrain: the job has failed with status 12: restart 2 of 2 in 1 s"),
        *("no", "cloudtrain: the job has failed with status 13: given up after 2 restarts"),
    ]


HANGS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def test_a_job_that_has_lost_a_host_has_failed_although_mpirun_says_nothing_of_it(job, capfd):
    status, starts = job(f"sys.stderr.write({LOST!r})", restarts=1)
    assert (status, len(starts)) == (1, 2)
    assert "the job has failed with status 1 (b: not reached): restart 1 of 1" in capfd.readouterr().err


def test_a_job_that_mpirun_cannot_end_is_ended_with_what_keeps_its_output_open(job, monkeypatch, capfd):
    """Like mpirun that waits for its daemon on a lost host, and the ssh to that, which ignore SIGTERM."""
    monkeypatch.setattr(launching, "ENDS_WITHIN_SECONDS", 0.2)
    body = (
        "import subprocess\n"
        f"subprocess.Popen([sys.executable, '-c', {HANGS!r}], preexec_fn=os.setpgrp)\n"
        f"if count == 1: sys.stderr.write({STALLED!r}); sys.stderr.flush()\n"
        f"if count == 1: exec({HANGS!r})"
    )
    status, starts = job(body, restarts=1)
    assert (status, len(starts)) == (0, 2)
    assert "has failed with status 1 (rank 1: have not come): restart 1 of 1" in capfd.readouterr().err


ASKED = """
import signal, sys
from training.process import launch as launching
from training.process.hosts import Ranks
launching.command_line = lambda ranks, command, environment: list(command)
program = '''
import os, signal, sys, time
{handler}
print("ready", flush=True)
for _ in range(12_000): time.sleep(0.05)
'''
policy = launching.RestartPolicy(restarts=3, grace_seconds={grace})
sys.exit(launching.launch(Ranks(2), [sys.executable, "-c", program], lambda: None, policy))
"""


@pytest.mark.parametrize(
    ("handler", "grace", "status"),
    [
        ("signal.signal(signal.SIGUSR1, lambda *words: sys.exit(75))", 60, 75),
        ("signal.signal(signal.SIGUSR1, lambda *words: sys.exit(0))", 60, 0),
        ("signal.signal(signal.SIGUSR1, lambda *words: sys.exit(1))", 60, 143),
        ("signal.signal(signal.SIGUSR1, lambda *words: None)", 0.2, 143),
    ],
    ids=["saves-and-ends", "is-done", "fails", "does-not-end"],
)
def test_a_launch_that_is_to_end_asks_its_job_and_does_not_start_it_again(handler, grace, status):
    program = ASKED.format(handler=handler, grace=grace)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.terminate()
            out, errors = process.communicate(timeout=120)  # the program would take longer
        finally:
            process.kill()
    assert (process.returncode, out, errors) == (status, "", "")
