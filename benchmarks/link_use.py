"""What a link carries over time while ranks take local steps, and what of the exchange is hidden.

    python -m benchmarks.local_steps --link    # on emulated clusters; as root
    python -m benchmarks.link_use JOB.json     # one rank of that

The cards of the nodes are read while the ranks train. Rank 0 prints when each round began, by the clock
that all processes of a machine have in common.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks import race_job
from benchmarks.drawing.pages import layout_in_words, markdown, rate_in_words
from benchmarks.drawing.style import PALETTE, docs_picture
from benchmarks.emulated.nodes import Cluster
from commlib import Topology
from training.bench.record import Seconds, code_of
from training.bench.train import endless

SAMPLE_SECONDS, WINDOW_SECONDS = 0.02, 0.1
COMPUTING = ("forward_backward", "norms", "update")
DRAWN_ROUNDS = 2  # of the slowest
Json = dict[str, Any]


def measured(job: Json, topology: Topology, dataset: Any) -> Iterator[Json]:
    """Yield when the rounds of each subject began and ended, and what its steps took; collective."""
    # All threads of a rank on one core: ranks that share the cores of a machine are then equally fast.
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {cores[topology.world.rank % len(cores)]})
    for subject in job["subjects"]:
        config = job["config"] | subject["config"] | {"phases": [subject["phase"]]}
        trainer = race_job.make_trainer(config, topology, dataset, horovod=False)
        yield {"subject": subject["name"], **_rounds(trainer, job["rounds"])}
        race_job.close_trainer(trainer)


def _rounds(trainer: Any, rounds: int) -> Json:
    """Take one round that does not count, and ``rounds`` that do."""
    (phase,), step, world = trainer.phases, trainer.parts.step, trainer.topology.world
    steps = phase.phase.local_steps
    batches = endless(phase.data.training_batches)
    phase.backward.prepare()
    step.begin(phase.phase)
    begun, own = [], dict.fromkeys(("computing", "busy", "hidden"), 0.0)
    for number in range((1 + rounds) * steps):
        if number == steps:
            world.barrier()
        if number % steps == 0:
            begun.append(time.monotonic())
        step.stopwatch.restart()
        _, report = step.take(phase.backward, next(batches), phase.hyperparameters(number))
        if number >= steps:
            own["computing"] += sum(getattr(step.stopwatch.seconds, stage) for stage in COMPUTING)
            own["busy"] += report.busy
            own["hidden"] += report.hidden
    begun.append(time.monotonic())
    step.abandon_round()
    of_ranks = world.allgather_objects(own)
    told = {key: [each[key] for each in of_ranks] for key in own}
    return told | {"begun": begun[1:], "steps": steps, "weights": trainer.gradient_size}


@contextmanager
def sampled(state: Path) -> Iterator[list[tuple[float, list[int]]]]:
    """Yield a list to which times and the bytes that each node has sent are added, until the block ends."""
    nodes, over = Cluster(state).nodes(), threading.Event()
    samples = list[tuple[float, list[int]]]()

    def sample() -> None:
        while not over.wait(SAMPLE_SECONDS):
            before = time.monotonic()
            sent = [node.card_bytes()[0] for node in nodes]
            if time.monotonic() - before < SAMPLE_SECONDS / 10:  # else it is not known when they were read
                samples.append((before, sent))

    thread = threading.Thread(target=sample, name="sample cards", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def record_of(case: Json, told: Mapping[str, Any], samples: Sequence[tuple[float, list[int]]]) -> Json:
    """Return the record of a subject; ``seconds``: of its rounds. ``sent``: by the busiest node."""
    begun = told["begun"]
    times, sent = np.array([each for each, _ in samples]), np.array([each for _, each in samples])
    grid = np.arange(begun[0], begun[-1], SAMPLE_SECONDS)
    by_node = [np.interp(grid, times, of_node) for of_node in sent.T]
    busiest = max(by_node, key=lambda each: float(each[-1] - each[0]))
    window = round(WINDOW_SECONDS / SAMPLE_SECONDS)
    return {
        "bench": "local steps, link",
        "code": code_of("local steps, link"),
        "case": case,
        "seconds": asdict(Seconds.of(np.diff(begun).tolist())),
        "steps": told["steps"],
        "peak_bytes": max(int((each[window:] - each[:-window]).max()) for each in by_node),
        "hidden_share": sum(told["hidden"]) / (sum(told["busy"]) or 1.0),
        "utilisation": fmean(told["computing"]) / (begun[-1] - begun[0]),
        "sent": np.diff(busiest).round().astype(int).tolist(),
        "sample_seconds": SAMPLE_SECONDS,
        **{key: told[key] for key in ("busy", "hidden", "computing", "weights", "machine", "settings")},
        "command": "python -m benchmarks.local_steps --link",
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    header = ["link", "ranks", "variant", "ms a step", "kB in any 100 ms at most"]
    shares = ["of the exchange hidden", "computing, of all time"]
    lines = [
        [
            rate_in_words(each["case"]["rate"]),
            layout_in_words(each["case"]["layout"]),
            each["case"]["variant"],
            f"{1e3 * each['seconds']['median'] / each['steps']:.1f}",
            f"{each['peak_bytes'] / 1e3:,.0f}",
            f"{100 * each['hidden_share']:.0f} %",
            f"{100 * each['utilisation']:.0f} %",
        ]
        for each in records
    ]
    return markdown([*header, *shares], lines)


def draw(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Draw what the busiest node sends in each 100 ms, a panel a record."""
    drawn = DRAWN_ROUNDS * max(each["seconds"]["median"] for each in records)
    with docs_picture(path, 6.5, 0.6 + 1.3 * len(records)) as figure:
        panels = figure.subplots(len(records), sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, record, color in zip(panels, records, PALETTE, strict=False):
            wide = round(WINDOW_SECONDS / record["sample_seconds"])
            windows = min(round(drawn / WINDOW_SECONDS), len(record["sent"]) // wide)
            sent = np.array(record["sent"][: windows * wide]).reshape(-1, wide).sum(axis=1)
            axes.stairs(sent / 1e3, np.arange(windows + 1) * WINDOW_SECONDS, fill=True, color=color)
            axes.set_title(record["case"]["variant"], fontsize=8)
        panels[len(records) // 2].set_ylabel("kB in 100 ms")
        panels[-1].set_xlabel("s")


if __name__ == "__main__":
    race_job.tell(sys.argv[1], measured)
