"""Ranks that are killed, stopped or sent SIGTERM, under ``cloudtrain launch --restarts``."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.faults.injected import is_poisoned
from tests.faults.jobs import Job, assert_same, failures, injected, started, undisturbed, weights_of

KILLS = {1: 6, 2: 6}  # at random moments: how many in a run of which seed
STEPS = 396  # of a run
# Eight more, which chance seldom finds: the rank, the function, which of a process's calls, whether after it.
CHECKPOINT = "training.checkpoint"
MOMENTS = {
    "amid-a-file-of-a-checkpoint": (1, f"{CHECKPOINT}.serialization:sync", 3, False),
    "one-file-is-written": (0, f"{CHECKPOINT}.folders:write_tree", 3, True),
    "amid-the-manifest": (0, f"{CHECKPOINT}.folders:sync", 4, False),
    "before-the-checkpoint-is-renamed": (0, f"{CHECKPOINT}.places:Folder.complete", 5, False),
    "before-an-old-one-is-removed": (0, f"{CHECKPOINT}.places:Folder.remove", 2, True),
    "in-a-test": (1, "training.run.trainer:evaluate", 2, False),
    "at-the-boundary": (1, "training.run.step:TrainingStep.begin", 1, True),
    "when-the-weights-are-saved": (0, "training.run_folder:RunFolder.save_weights", 1, True),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "run")


def goes_on(job: Job, resumptions: int) -> bool:
    """Tell whether a job has made steps after it was resumed so many times."""
    for path in job.folder.glob("runs/*/metrics.jsonl"):
        kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines() if line.endswith("}")]
        if kinds.count("resume") >= resumptions:
            last = len(kinds) - 1 - kinds[::-1].index("resume") if resumptions else 0
            return kinds[last:].count("step") > 20
    return False


@pytest.mark.slow
@pytest.mark.launch
def test_a_rank_is_killed_then_sent_sigterm_then_the_launch_is_and_the_weights_are_the_same(tmp_path):
    folder, words = tmp_path / "run", ("phases.0.epochs=3", "phases.1.epochs=2")
    expected = undisturbed(tmp_path / "whole", words=words)
    with started(folder, *words) as job:
        job.wait_until(lambda: goes_on(job, 0))
        job.rank(1).kill()
        job.wait_until(lambda: goes_on(job, 1))
        assert "prterun" in {each.name() for each in psutil.Process(job.process.pid).children()}
        job.rank(1).terminate()  # one of the two: both stop after the same step
        job.wait_until(lambda: goes_on(job, 2))
        job.process.terminate()
        assert job.end() == 75
        killed, preempted = failures(job.said)
        assert killed.startswith("has failed with status 137 (rank 1 on ")
        assert "signal 9) at epoch " in killed
        assert killed.endswith("restart 1 of 3 now")
        assert preempted.startswith("was pre-empted at epoch ")
    output = (folder / "output").read_text()
    assert output.count("SIGTERM: stopped after step ") == 2
    with started(folder, *words, "resume=auto") as job:
        assert job.end() == 0
    assert (folder / "output").read_text().count("resumed from step-") == 3
    assert_same(weights_of(folder), expected)


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", KILLS)
def test_ranks_that_are_killed_at_random_moments_end_with_the_same_weights(expected, tmp_path, seed):
    """At steps, and whatever ranks do between them; also while they start."""
    generator, folder, kills = random.Random(seed), tmp_path / "run", KILLS[seed]
    with started(folder, restarts=kills) as job:
        moments = sorted(generator.sample(range(0, STEPS, 20), kills))  # in steps, also those that were lost
        for number, steps in enumerate(moments, 1):
            job.wait_until(lambda steps=steps: job.steps >= steps)
            time.sleep(0.1 * generator.random())
            job.rank(generator.randrange(2)).kill()
            job.wait_until(lambda number=number: len(failures(job.said)) == number)
        assert job.end() == 0, job.said
        assert len(failures(job.said)) == kills
    assert_same(weights_of(folder), expected)
    assert list(folder.glob("runs/*/checkpoints/unfinished-*")) == []


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_ranks_that_are_killed_where_it_matters_end_with_the_same_weights(expected, tmp_path):
    """While a checkpoint is written and completed, in a test, at the boundary and at the end."""
    folder, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    with started(folder, injected("Killed", kills=MOMENTS, marks=str(marks)), restarts=len(MOMENTS)) as job:
        assert job.end() == 0, job.said
    assert {path.name for path in marks.iterdir()} == MOMENTS.keys()
    assert len(failures(job.said)) >= len(MOMENTS) - 1  # two ranks may be killed at once
    assert_same(weights_of(folder), expected)
    assert list(folder.glob("runs/*/checkpoints/unfinished-*")) == []


@pytest.mark.faults
def test_a_rank_that_hangs_is_named_and_the_job_goes_on_without_that_process(expected, tmp_path):
    folder = tmp_path / "run"
    with started(folder, "stall_timeout=5") as job:
        job.wait_until(lambda: goes_on(job, 0))
        job.rank(1).send_signal(signal.SIGSTOP)
        assert job.end() == 0, job.said
        (line,) = failures(job.said)
        assert line.startswith("has failed with status 1 (rank 1: have not come) at epoch ")
        assert " has waited " in job.said
    assert_same(weights_of(folder), expected)


@pytest.mark.faults
@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_checkpoint_is_left_out_after_a_kill(expected, tmp_path, damage):
    folder = tmp_path / "run"
    with started(folder) as job:
        # two, so that there is one before the newest
        job.wait_until(lambda: len(list(folder.glob("runs/*/checkpoints/step-*"))) > 1)
        for process in (job.rank(0), job.rank(1)):
            process.send_signal(signal.SIGSTOP)
        newest = sorted(folder.glob("runs/*/checkpoints/step-*"))[-1]
        assert newest.exists()
        spoil(newest / "shared.safetensors", damage)
        job.rank(0).kill()
        assert job.end() == 0, job.said
        assert f"the checkpoint of step {int(newest.name[5:])} is left out: " in job.said
    assert_same(weights_of(folder), expected)


def spoil(path: Path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content[: len(content) // 3] if damage == "truncated" else content)


@pytest.mark.faults
def test_a_disk_that_is_full_ends_the_job_and_what_there_was_is_gone_on_with(expected, tmp_path):
    """A file system of 6 MiB in memory, which root can mount: a fault that no restart mends by itself."""
    folder = tmp_path / "run"
    (folder / "runs").mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder / "runs")]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system takes root")
    try:
        with started(folder) as job:
            job.wait_until(lambda: goes_on(job, 0))
            (run,) = (folder / "runs").iterdir()
            filler = folder / "runs" / "filler"
            with filler.open("wb") as file, pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            job.wait_until(lambda: "is not saved: " in job.said)
            filler.unlink()
            assert job.end() == 0, job.said
        assert "No space left on device" in job.said
        shutil.copytree(run, tmp_path / "kept" / "runs" / run.name)
    finally:
        subprocess.run(["umount", "-l", str(folder / "runs")], check=True)
    assert_same(weights_of(tmp_path / "kept"), expected)


@contextmanager
def memory_group(number: int) -> Iterator[Path]:
    """Give a control group of the kernel with a limit of so many bytes; skip where there is none."""
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, limit = (first, "limit_in_bytes") if first.is_dir() else (second, "max")
    group = root / f"cloudtrain-{os.getpid()}"
    try:
        group.mkdir()
        (group / f"memory.{limit}").write_text(str(number))
    except OSError as error:
        pytest.skip(f"no control group of memory: {error}")
    try:
        yield group
    finally:
        with suppress(OSError):
            group.rmdir()


@pytest.mark.faults
def test_a_rank_that_the_kernel_kills_for_memory_is_started_again(expected, tmp_path):
    folder = tmp_path / "run"
    with started(folder) as job, memory_group(1 << 20) as group:
        job.wait_until(lambda: goes_on(job, 0))
        rank = job.rank(1)
        (group / "cgroup.procs").write_text(str(rank.pid))  # what it takes from now on counts
        job.wait_until(lambda: "restart 1 of 3" in job.said)
        assert job.end() == 0, job.said
        (line,) = failures(job.said)
        assert "(rank 1 on " in line
        assert "signal 9)" in line
    assert_same(weights_of(folder), expected)


@pytest.mark.faults
def test_steps_with_nans_of_one_rank_are_skipped_on_both_and_the_weights_stay_equal_and_finite(tmp_path):
    """In a twentieth of the steps at random, with one rank killed on the way."""
    folder, share = tmp_path / "run", 0.05
    words = (injected("NotFinite", rank=1, share=share), "digest_every=5")
    expected = undisturbed(tmp_path / "whole", words=words)
    with started(folder, *words) as job:
        job.wait_until(lambda: goes_on(job, 0))
        job.rank(0).kill()
        assert job.end() == 0, job.said
        assert len(failures(job.said)) == 1
    (run,) = (folder / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    steps = json.loads((run / "receipt.json").read_text())["end"]["steps"]
    skipped = sum(phase["skipped_steps"] for phase in summary["phases"])
    assert skipped == sum(is_poisoned(step, share) for step in range(steps)) > 5
    assert all(np.isfinite(each).all() for each in expected.values())
    assert_same(weights_of(folder), expected)


@pytest.mark.faults
def test_a_clock_that_jumps_changes_nothing(expected, tmp_path):
    """The wall's, of all ranks, by two hours to and fro: without a library for it, by one of twenty lines."""
    folder, library, jump = tmp_path / "run", tmp_path / "clock.so", tmp_path / "jump"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    environment = {"LD_PRELOAD": str(library), "CLOCK_JUMP": str(jump)}
    with started(folder, "stall_timeout=20", environment=environment) as job:
        job.wait_until(lambda: goes_on(job, 0))
        seen = subprocess.run(["date", "+%s"], env=os.environ | environment, capture_output=True, check=True)
        for seconds in (7200, -7200, 0):
            jump.write_text(f"{seconds}\n")
            after = subprocess.run(
                ["date", "+%s"], env=os.environ | environment, capture_output=True, check=True
            )
            assert abs(int(after.stdout) - int(seen.stdout) - seconds) < 600  # it does jump
            steps = job.steps
            job.wait_until(lambda steps=steps: job.steps > steps + 20)
        assert job.end() == 0, job.said
        assert failures(job.said) == []
    assert_same(weights_of(folder), expected)
