"""Predict how much of a step's messages hides behind backpropagation on HiTopKComm's cluster, at three rates.

    python -m benchmarks.predict_overlap --simulate  # by the engine, into benchmarks/results: some minutes
    python -m benchmarks.predict_overlap             # the tables and picture of docs/, with the last of it

Computing takes as long as one GPU did in the paper, and its layers share it by their multiply-adds; see
training/plan/step.py for what follows from that, by closed forms. ``--simulate``: the same by
``commlib.BucketExchange`` and the reducers themselves, on simulated ranks.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.drawing.pages import Table, milliseconds, with_block
from benchmarks.drawing.style import PALETTE, docs_picture
from benchmarks.papers import HALF, HITOPKCOMM, Cluster, communication, local_batch
from benchmarks.predict_papers import FOLDER, PAGE
from benchmarks.shapes import Shape, resnet50, vgg19
from benchmarks.validate import RESULTS, newest
from commlib import REDUCERS, BucketExchange, Communicator, Link, Network, Topology
from commlib.transport import simulated
from training.bench.record import command, machine
from training.config.config import DEFAULT_BUCKET_MIB
from training.plan.step import FORWARD, Bucket, StepSeconds, Workload, buckets_of, step_seconds

TRAINING_PAGE = PAGE.with_name("training.md")
PICTURE, RECORD = FOLDER / "overlap.svg", "overlap-papers.json"
RATES = (25.0, 10.0, 1.0)  # Gbit/s of a node's card: the paper's, and slower ones
SHOWN = ("dense", "torus2d", "hitopk", "hioktopk", "oktopk")
SIMULATED_SIZE = 125_000
SIMULATED = (
    *(("ResNet-50 (96)", 25.0, reducer) for reducer in ("dense", "torus2d", "hitopk", "hioktopk")),
    ("ResNet-50 (224)", 1.0, "hitopk"),
    ("VGG-19", 10.0, "torus2d"),
    ("VGG-19", 10.0, "hitopk"),
    ("Transformer", 25.0, "hitopk"),
)


# ------------------------------------------------------------- what is trained


def resnet50_sides() -> list[int]:
    """Return the sides of the maps that ResNet-50's convolutions make of 224 × 224, in their order."""
    sides = [112]
    for stage, blocks in enumerate((3, 4, 6, 3)):
        own = 56 >> stage
        for block in range(blocks):
            first = 2 * own if stage and not block else own  # v1.5 halves the maps in the 3×3 convolution
            sides += [first, own, own, *([own] if block == 0 else [])]
    return sides


def vgg19_sides() -> list[int]:
    """Return the sides of the maps that VGG-19's convolutions make of 224 × 224."""
    return [224 >> stage for stage, count in enumerate((2, 2, 4, 4, 4)) for _ in range(count)]


def operations(shapes: Sequence[Shape], sides: Sequence[int]) -> list[int]:
    """Return the multiply-adds of a sample in the forward pass, by tensor; scales and shifts have none."""
    of_convolutions = iter(sides)
    return [
        prod(shape) * (next(of_convolutions) ** 2 if len(shape) == 4 else 1) if len(shape) > 1 else 0
        for shape in shapes
    ]


def transformer() -> tuple[list[Shape], list[int]]:
    """Return tensors of about as many entries as the paper's Transformer, and their multiply-adds a word.

    The paper does not say of which layers its 110 million parameters are: here of twelve, 768 wide, after an
    embedding, in which nothing is multiplied.
    """
    width, inner = 768, 3072
    norm = [(width,), (width,)]
    embedding: list[Shape] = [(30_522, width), (512, width), *norm]
    attention: list[Shape] = [*[(width, width), (width,)] * 4, *norm]
    layer = [*attention, (width, inner), (inner,), (inner, width), (width,), *norm]
    return [*embedding, *layer * 12], [0] * len(embedding) + operations(layer, []) * 12


def buckets(shapes: Sequence[Shape], work: Sequence[int]) -> tuple[Bucket, ...]:
    """Return the buckets of a gradient, of 25 MiB where nothing else is configured."""
    return buckets_of([prod(shape) for shape in shapes], work, DEFAULT_BUCKET_MIB << 20)


@cache
def workloads() -> dict[str, Workload]:
    """Return the trainings of table 3, by name."""
    resnet = buckets(resnet50(), operations(resnet50(), resnet50_sides()))  # at 96 × 96 in the same ratios
    vgg = buckets(vgg19(), operations(vgg19(), vgg19_sides()))
    parts = (resnet, resnet, vgg, buckets(*transformer()))
    return {
        each.name: Workload(each.name, local_batch(each) / each.single_gpu, buckets)
        for each, buckets in zip(HITOPKCOMM.trainings, parts, strict=True)
    }


# ------------------------------------------------------------- a step


@dataclass(frozen=True, kw_only=True)
class Step(StepSeconds):
    """The seconds of a step of a training, at a rate, with a reducer."""

    workload: str
    gbit: float
    reducer: str


def cluster(gbit: float, scale: float = 1.0) -> Cluster:
    """Return the paper's cluster at another rate, on which a byte takes ``scale`` times as long."""
    given = Network(inter=Link.of(microseconds=30, gbit_per_second=gbit))
    scaled = (Link(link.alpha, scale * link.beta) for link in (given.intra, given.inter))
    return Cluster(HITOPKCOMM.nodes, HITOPKCOMM.ranks_per_node, Network(*scaled))


@cache
def predicted(name: str, gbit: float, reducer: str) -> Step:
    """Return a step by closed forms."""
    workload = workloads()[name]
    return step_of(workload, gbit, reducer, cluster(gbit), [bucket.size for bucket in workload.buckets])


def step_of(workload: Workload, gbit: float, reducer: str, where: Cluster, sizes: Sequence[int]) -> Step:
    """Return a step by closed forms of buckets of these sizes, on that cluster."""
    whole, *messages = (
        communication(reducer, where, size, HITOPKCOMM.density, HALF).seconds for size in (sum(sizes), *sizes)
    )
    seconds = asdict(step_seconds(workload, whole, messages))
    return Step(workload=workload.name, gbit=gbit, reducer=reducer, **seconds)


def steps() -> list[Step]:
    """Return what the page's table shows."""
    return [predicted(name, gbit, reducer) for name in workloads() for gbit in RATES for reducer in SHOWN]


# ------------------------------------------------------------- the same by the engine, on the virtual clock


@dataclass(frozen=True)
class Simulation:
    """The seconds of a step on simulated ranks, and the share that their engines say they have hidden."""

    workload: str
    gbit: float
    reducer: str
    plain: float
    overlapped: float
    hidden: float

    @property
    def expected(self) -> Step:
        """Return the same step by closed forms."""
        workload = workloads()[self.workload]
        where = cluster(self.gbit, scale_of(workload))
        return step_of(workload, self.gbit, self.reducer, where, scaled_sizes(workload))


def scale_of(workload: Workload) -> float:
    """Return by which factor the simulated gradient is smaller."""
    return sum(bucket.size for bucket in workload.buckets) / SIMULATED_SIZE


def scaled_sizes(workload: Workload) -> list[int]:
    """Return the entries of small buckets; even, as half of them stand for 16 bits in what sends them all."""
    return [2 * max(1, round(bucket.size / scale_of(workload) / 2)) for bucket in workload.buckets]


def simulate(name: str, gbit: float, reducer: str) -> Simulation:
    """Return a step on simulated ranks.

    The gradient is smaller by a factor by which a byte takes longer: all messages take as long as those of
    the whole gradient, but for the integers that ranks agree on.
    """
    workload, is_sparse = workloads()[name], REDUCERS[reducer].sparse
    options: dict[str, Any] = {"density": HITOPKCOMM.density, "wire": HALF} if is_sparse else {}
    sizes = [size if is_sparse else size // 2 for size in scaled_sizes(workload)]

    def body(comm: Communicator) -> tuple[float, float, float, float]:
        assert isinstance(comm, simulated.SimulatedCommunicator)
        topology = Topology(comm)
        normal = np.random.default_rng(comm.rank).standard_normal
        settings = {"name": reducer, **options}

        def begin(exchange: BucketExchange) -> tuple[Any, float]:
            # What is selected from is distributed alike in all steps, as in a training that has settled.
            gradient = normal(exchange.size, np.float32) - exchange.residual
            comm.barrier()
            return gradient, comm.now()

        with BucketExchange(topology, sizes, settings, overlap=True) as exchange:
            for _ in range(2):  # the order of the buckets is recorded in the first one
                gradient, begun = begin(exchange)
                comm.compute(workload.forward)
                for number in reversed(range(len(sizes))):
                    comm.compute(workload.backward(workload.buckets[number]))
                    exchange.submit(number, gradient[exchange.slices[number]])
                _, report = exchange.wait()
                overlapped = comm.now() - begun
        with BucketExchange(topology, sizes, settings) as exchange:
            for _ in range(2):
                gradient, begun = begin(exchange)
                comm.compute(workload.computing)
                for number, part in enumerate(exchange.slices):
                    exchange.submit(number, gradient[part])
                exchange.wait()
                plain = comm.now() - begun
        return plain, overlapped, report.busy, report.hidden

    where = cluster(gbit, scale_of(workload))
    found = simulated.run(body, where.size, where.ranks_per_node, where.network)
    plain, overlapped, busy, hidden_seconds = zip(*found, strict=True)
    hidden = fmean(hidden_seconds) / fmean(busy)
    return Simulation(name, gbit, reducer, max(plain), max(overlapped), hidden)


def save() -> None:
    """Simulate, and write the record, with the machine and the command that made it."""
    steps = [asdict(simulate(*each)) for each in SIMULATED]
    content = {"command": command(), "machine": machine(), "steps": steps}
    path = RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-{RECORD}"
    path.write_text(json.dumps(content, indent=1) + "\n")


def load() -> list[Simulation]:
    """Return the steps of the newest record."""
    (path,) = newest(RECORD)
    return [Simulation(**row) for row in json.loads(path.read_text())["steps"]]


# ------------------------------------------------------------- tables and picture


def percent(value: float) -> str:
    """Return a share as the tables show it."""
    return f"{100 * value:.0f} %"


def steps_table() -> Table:
    """Return all predicted steps."""
    head = ["training", "Gbit/s", "reducer", "ms of messages", "of the step", "ms, one piece"]
    head += ["ms, overlap off", "ms, on", "off/on", "hidden"]
    rows = [
        (
            *(each.workload, f"{each.gbit:g}", f"`{each.reducer}`"),
            *(milliseconds(each.messages), percent(each.share)),
            *(milliseconds(each.undivided), milliseconds(each.plain), milliseconds(each.overlapped)),
            *(f"{each.gain:.2f}", percent(each.hidden)),
        )
        for each in steps()
    ]
    return Table("overlap", head, rows)


def simulated_table() -> Table:
    """Return the simulated steps beside those by closed forms, of the same small buckets."""
    head = ("training", "Gbit/s", "reducer", "ms, overlap off", "closed form", "ms, on", "closed form")
    rows = []
    for found in load():
        expected = found.expected
        seconds = (found.plain, expected.plain, found.overlapped, expected.overlapped)
        names = (found.workload, f"{found.gbit:g}", f"`{found.reducer}`")
        rows.append((*names, *map(milliseconds, seconds), percent(found.hidden), percent(expected.hidden)))
    return Table("overlap, simulated", (*head, "hidden, by the engine", "closed form"), rows)


def asked_for() -> list[Step]:
    """Return the steps whose messages are a third of them or more, and fit behind the backward pass."""
    fit = [each for each in steps() if each.messages <= (1 - FORWARD) * each.computing]
    return [each for each in fit if each.share >= 1 / 3]


def verdict() -> str:
    """Return what overlap gains there."""
    found = asked_for()
    gains, hidden = sorted(each.gain for each in found), sorted(each.hidden for each in found)
    undivided = sorted(each.undivided / each.overlapped for each in found)
    return (
        "Where messages are a third of the step or more, and no longer than the backward pass\n"
        f"({len(found)} of {len(steps())} cases), a step is {gains[0]:.2f} to {gains[-1]:.2f} times as fast"
        " as with the same buckets\nand no overlap, "
        f"{undivided[0]:.2f} to {undivided[-1]:.2f} times as fast as with the gradient in one piece, and\n"
        f"{percent(hidden[0])} to {percent(hidden[-1])} of the messages are hidden.\n"
    )


def draw(path: Path) -> None:
    """Draw what overlap gains over the messages' share of the step, and the most that it could."""
    with docs_picture(path, 6.8, 4) as figure:
        axes = figure.subplots()
        for reducer, color in zip(SHOWN, PALETTE, strict=False):
            own = [each for each in steps() if each.reducer == reducer]
            shares, gains = [each.share for each in own], [each.gain for each in own]
            axes.plot(shares, gains, "o", color=color, markersize=4.5, label=reducer, alpha=0.85)
        shares = np.linspace(0.0, 0.99, 200)
        messages = shares / (1 - shares)  # of computing
        most = (1 + messages) / np.maximum(1, FORWARD + messages)
        axes.plot(shares, most, color="#999999", linewidth=0.9, label="the most it can gain", zorder=0)
        axes.axvline(1 / 3, color="#cccccc", linewidth=0.8, zorder=0)
        axes.set(xlabel="share of messages in the step, overlap off", ylabel="step off/on", ylim=(0.98, 1.75))
        axes.legend(frameon=False, fontsize=8, loc="upper left")


def pages() -> dict[Path, dict[str, str]]:
    """Return the text between each pair of marks, by page."""
    tables = {table.name: table.markdown() for table in (steps_table(), simulated_table())}
    said = {"overlap, verdict": verdict()}
    return {PAGE: tables | said, TRAINING_PAGE: said}


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, and write tables and picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--simulate", action="store_true", help="simulate again, into benchmarks/results")
    if parser.parse_args(arguments).simulate:
        save()
    for path, blocks in pages().items():
        page = path.read_text()
        for name, text in blocks.items():
            page = with_block(page, name, text)
        path.write_text(page)
    draw(PICTURE)


if __name__ == "__main__":
    main()
