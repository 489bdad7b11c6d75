"""A run on an emulated cluster in a storm of faults: python -m tests.faults.storm --seconds 1200.

Ranks are killed and stopped, links throttled and cut, at random moments of four Poisson processes. It prints
one JSON object: what happened, and the step efficiency, which is the steps kept over those that as much time
without faults would have had. Needs root, and a machine without other work. Ends with an error where a result
is wrong.
"""

import argparse
import json
import os
import random
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
from training.receipt.records import digests_of, read_records

# Mean seconds between faults of a kind, and how long each lasts.
KINDS = {"kill": (300.0, 0.0), "stop": (600.0, 20.0), "throttle": (150.0, 15.0), "cut": (240.0, 5.0)}
CALM_SECONDS = 30.0  # before the storm, to know the rate
SLOW = "5mbit"
WORDS = ("phases.0.epochs=100000", "digest_every=25", "checkpoints={every_steps: 25}", "stall_timeout=60")


def plan(seconds: float, seed: int) -> list[tuple[float, str, int]]:
    """Return the moments of a storm, what happens in each, and to which node, in order."""
    chance, found = random.Random(seed), []
    for kind, (mean, _) in KINDS.items():
        at = chance.expovariate(1 / mean)
        while at < seconds:
            found.append((at, kind, chance.randrange(len(NODES))))
            at += chance.expovariate(1 / mean)
    return sorted(found)


def blow(job: ClusterJob, kind: str, rank: int) -> None:
    """Let a fault happen, and last."""
    seconds, node = KINDS[kind][1], NODES[rank]
    if kind in ("kill", "stop"):
        process = next(job._ranks(rank), None)
        if process is None:  # it is being started again
            return
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            time.sleep(seconds)
            if kind == "stop":
                process.send_signal(signal.SIGCONT)
        return
    begin, end = (job.cut, job.mend) if kind == "cut" else (lambda it: job.throttle(it, SLOW), job.throttle)
    begin(node)
    time.sleep(seconds)
    end(node)


def kept(folder: Path) -> int:
    """Return how many steps of the run are made and recorded, those that were made again once."""
    (path,) = folder.glob("runs/*")
    return max((record["steps"] for record in read_records_so_far(path)), default=0)


def read_records_so_far(path: Path) -> list[Any]:
    """Return the records of digests, of which the last may be half a line."""
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}") and '"kind": "digest"' in line]


def storm(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Train in a storm, end with a checkpoint, make all steps again without faults, and compare."""
    cluster = Cluster(folder / "state")
    try:
        result = cluster("up", "--nodes", str(len(NODES)), "--rate", RATE)
        assert result.returncode == 0, tail(result)
        with started_on(cluster, folder / "run", *WORDS, restarts=1000) as job:
            job.wait_until(lambda: list(job.folder.glob("runs/*/metrics.jsonl")) and kept(job.folder) > 25)
            begun, first = time.monotonic(), kept(job.folder)
            time.sleep(CALM_SECONDS)
            calm = (kept(job.folder) - first) / (time.monotonic() - begun)
            begun, first, happened = time.monotonic(), kept(job.folder), Counter[str]()
            for at, kind, rank in plan(seconds, seed):
                time.sleep(max(0.0, begun + at - time.monotonic()))
                if time.monotonic() - begun > seconds:
                    break
                blow(job, kind, rank)
                happened[kind] += 1
            time.sleep(max(0.0, begun + seconds - time.monotonic()))
            lasted, steps = time.monotonic() - begun, kept(job.folder) - first
            reached = kept(job.folder)
            job.wait_until(lambda: kept(job.folder) > reached)  # before its first step SIGTERM is an end
            job.terminate()
            status, restarts, left = job.end(), failures(job.said), job.left
        (path,) = (folder / "run" / "runs").iterdir()
        last = max(digests_of(path, read_records(path)))
        again = run(
            *(
                *ONE_THREAD,
                "cloudtrain",
                "receipt",
                "replay",
                str(path),
                "--steps",
                f"1:{last}",
                "-np",
                str(len(NODES)),
            ),
            timeout=int(4 * seconds) + 600,
        )
        assert again.returncode == 0, tail(again)
    finally:
        cluster("down")
    return {
        "seconds": round(lasted),
        "faults": dict(happened),
        "restarts": len(restarts),
        "steps": steps,
        "steps_per_second_without_faults": round(calm, 2),
        "efficiency": round(steps / (calm * lasted), 3),
        "status": status,
        "left": left,
        "replayed": again.stdout.splitlines()[-1],
        "load": os.getloadavg()[2],
    }


def main() -> None:
    """Read the command line, and print what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        print(json.dumps(storm(Path(folder), given.seconds, given.seed)))


if __name__ == "__main__":
    sys.exit(main())
