"""A run on an emulated cluster in a storm of faults: python -m tests.faults.storm --seconds 1200.

Ranks are killed and stopped, links throttled and cut, at random moments of four Poisson processes, one fault
after the other; one that finds a rank being started again waits for it. It prints one JSON object: what
happened, and the step efficiency, which is the steps kept over those that as much time without faults would
have had. Needs root, and a machine without other work. Ends with an error where a result is wrong or
something is left behind; the folder of the run then stays.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.faults.jobs import failures
from tests.faults.on_cluster import NODES, ONE_THREAD, RATE, ClusterJob, started_on
from tests.launching import run, tail
from tests.test_cluster import Cluster
from training.process.job import PREEMPTED
from training.receipt import digests_of, read_records
from training.run_folder import holder_of

RANKS = 3
# Mean seconds between faults of a kind, and how long each lasts.
KINDS = {"kill": (300.0, 0.0), "stop": (600.0, 20.0), "throttle": (150.0, 15.0), "cut": (240.0, 5.0)}
CALM_SECONDS = 60.0  # before the storm and after it, to know the rate
SLOW = "5mbit"
WORDS = ("phases.0.epochs=100000", "digest_every=25", "checkpoints={every_steps: 25}", "stall_timeout=60")
# All nodes are sound here: none is left out, and the steps can be made again by as many ranks.
OPTIONS = ("--restarts", "1000", "--host-failures", "1000")


def plan(seconds: float, seed: int) -> list[tuple[float, str, int]]:
    """Return the moments of a storm, what happens in each, and to which node, in order."""
    chance, found = random.Random(seed), []
    for kind, (mean, _) in KINDS.items():
        at = chance.expovariate(1 / mean)
        while at < seconds:
            found.append((at, kind, chance.randrange(RANKS)))
            at += chance.expovariate(1 / mean)
    return sorted(found)


def sent(job: ClusterJob, rank: int, number: signal.Signals) -> psutil.Process:
    """Send a rank a signal, and return its process."""
    while True:
        process = job.rank(rank)
        with suppress(psutil.NoSuchProcess):  # its job has just ended: that of the next one is meant
            process.send_signal(number)
            return process


def blow(job: ClusterJob, kind: str, rank: int) -> None:
    """Let a fault happen, and last."""
    seconds, node = KINDS[kind][1], NODES[rank]
    if kind in ("kill", "stop"):
        process = sent(job, rank, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        time.sleep(seconds)
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
        return
    begin, end = (job.cut, job.mend) if kind == "cut" else (lambda it: job.throttle(it, SLOW), job.throttle)
    begin(node)
    time.sleep(seconds)
    end(node)


def digests_so_far(folder: Path) -> list[Any]:
    """Return the records of digests of the run in a folder, of which the last may be half a line."""
    (path,) = folder.glob("runs/*/metrics.jsonl")
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}") and '"kind": "digest"' in line]


def kept(folder: Path) -> int:
    """Return how many steps of the run are made and recorded, those that were made again once."""
    return max((record["steps"] for record in digests_so_far(folder)), default=0)


def calm_rate(job: ClusterJob) -> float:
    """Return the steps a second for a while without faults, by the run's own clock."""
    reached = kept(job.folder)
    job.wait_until(lambda: kept(job.folder) > reached + 25)  # also where it is being started again
    first = digests_so_far(job.folder)[-1]
    time.sleep(CALM_SECONDS)
    last = digests_so_far(job.folder)[-1]
    return float((last["steps"] - first["steps"]) / (last["seconds"] - first["seconds"]))


def blow_all(job: ClusterJob, seconds: float, seed: int) -> Counter[str]:
    """Let a storm happen, one fault after the other, and return how often which did."""
    begun, happened = time.monotonic(), Counter[str]()
    for at, kind, rank in plan(seconds, seed):
        time.sleep(max(0.0, begun + at - time.monotonic()))
        if time.monotonic() - begun > seconds:
            break
        print(f"{time.monotonic() - begun:.0f} s: {kind} {NODES[rank]}", file=sys.stderr, flush=True)
        blow(job, kind, rank)
        happened[kind] += 1
    time.sleep(max(0.0, begun + seconds - time.monotonic()))
    return happened


def replayed(path: Path, seconds: int) -> str:
    """Make all steps of a run again on one host without faults; return what says that digests are equal."""
    last = max(digests_of(read_records(path)))
    ranks = ("-np", str(RANKS))
    words = (*ONE_THREAD, "cloudtrain", "receipt", "replay", str(path), "--steps", f"1:{last}", *ranks)
    again = run(*words, timeout=seconds)
    assert again.returncode == 0, tail(again)
    return again.stdout.splitlines()[-1]


def storm(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Train in a storm, end with a checkpoint, make all steps again without faults, and compare."""
    cluster = Cluster(folder / "state")
    try:
        result = cluster("up", "--nodes", str(RANKS), "--rate", RATE)
        assert result.returncode == 0, tail(result)
        with started_on(cluster, folder / "run", *WORDS, ranks=RANKS, launch=OPTIONS) as job:
            job.wait_until(lambda: list(job.folder.glob("runs/*/metrics.jsonl")) and kept(job.folder) > 25)
            before = calm_rate(job)
            begun, first = time.monotonic(), kept(job.folder)
            happened = blow_all(job, seconds, seed)
            lasted, steps = time.monotonic() - begun, kept(job.folder) - first
            after = calm_rate(job)
            job.terminate()
            status, restarts = job.end(), failures(job.said)
        assert status == PREEMPTED, job.said
        (path,) = (folder / "run" / "runs").iterdir()
        left = [*job.left, *([] if (holder := holder_of(path)) is None else [holder])]
        assert left == []
        calm = (before + after) / 2
        found = {
            "seconds": round(lasted),
            "faults": dict(happened),
            "restarts": len(restarts),
            "steps": steps,
            "steps_per_second_without_faults": [round(before, 2), round(after, 2)],
            "efficiency": round(steps / (calm * lasted), 3),
            "load": os.getloadavg()[2],
        }
        print(json.dumps(found), file=sys.stderr, flush=True)  # what follows takes as long again
        return found | {"replayed": replayed(path, int(4 * seconds) + 900)}
    finally:
        cluster("down")


def main() -> None:
    """Read the command line, and print what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    print(f"in {folder}", file=sys.stderr, flush=True)
    print(json.dumps(storm(folder, given.seconds, given.seed)))
    shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
