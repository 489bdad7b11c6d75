"""Predict the papers' measurements on their own clusters, by the closed forms of commlib.cost.

HiTopKComm: 16 nodes of 8 GPUs at 25 Gbit/s (figures 7 and 8, table 3); Ok-Topk: 256 nodes of one GPU (figure
12). The papers' numbers are in ``papers.yaml``, their clusters in ``clusters/``.

    python -m benchmarks.predict_papers [--json] [--simulate] [--write]

``--json``: one object a row in place of tables. ``--simulate``: also run the reducers on the virtual clock,
which takes some minutes. ``--write``: also refresh the tables of docs/validation.md.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from math import floor, log10
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml

from benchmarks.drawing.pages import markdown, rewrite
from commlib import REDUCERS, Communicator, Link, Network, Prediction, Topology, make_reducer, predict
from commlib.cost import union
from commlib.transport import simulated
from commlib.tuning.tuner import step_seconds
from training.commands.printing import Table
from training.plan.site import load_cluster, nodes_of, per_second

PAGE = Path(__file__).resolve().parent.parent / "docs" / "validation.md"
PAPERS = yaml.safe_load(Path(__file__).with_name("papers.yaml").read_text())
SIMULATED_SIZE = 1_000_000
HALF, FULL = "fp16", "fp32"


def milliseconds(seconds: float) -> str:
    """Return three digits, and more before the point where there are: 12.3, 1500."""
    return f"{seconds * 1e3:.{max(0, 2 - int(floor(log10(seconds * 1e3))))}f}"


@dataclass(frozen=True)
class Cluster:
    """``nodes`` of equally many ranks, and the links inside and between them."""

    nodes: int
    ranks_per_node: int
    network: Network

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node


@cache
def communication(
    reducer: str, cluster: Cluster, size: int, density: float, values: str = FULL
) -> Prediction:
    """Return a step's prediction; 2-byte dense values count as half as many 4-byte ones, which ours sends."""
    nodes = nodes_of(cluster.size, cluster.ranks_per_node)
    if REDUCERS[reducer].sparse:
        return predict(reducer, nodes, size, density, cluster.network, wire=values)
    sent = size // 2 if values == HALF else size
    return predict(reducer, nodes, sent, network=cluster.network)


@dataclass(frozen=True)
class Comparison:
    """One number of a paper and its prediction, in the same unit."""

    paper: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.paper

    @property
    def factor(self) -> float:
        """Return by which factor the prediction is off, 1 or more."""
        return max(self.ratio, 1 / self.ratio)


HITOPKCOMM = SimpleNamespace(**PAPERS["hitopkcomm"])
TENCENT = load_cluster(HITOPKCOMM.cluster)
HITOPKCOMM.cluster = Cluster(TENCENT.nodes, TENCENT.ranks_per_node, TENCENT.network)
HITOPKCOMM.trainings = [
    SimpleNamespace(**each, single_gpu=per_second(TENCENT.throughput, precision="float16", **each["trained"]))
    for each in HITOPKCOMM.trainings
]  # the rows of table 3


def in_half(reducer: str, size: int) -> float:
    """Return the predicted seconds of a step's messages on HiTopKComm's cluster, in 16 bits."""
    return communication(reducer, HITOPKCOMM.cluster, size, HITOPKCOMM.density, HALF).seconds


def figure_7(size: int) -> dict[str, float]:
    """Return the predicted seconds at ``size`` entries of 16 bits, by reducer; ours, of no paper, last."""
    return {name: in_half(name, size) for name in (*HITOPKCOMM.reducers, "hioktopk")}


def figure_7_table() -> Table:
    """Return the predicted seconds at the paper's two sizes, in 16 bits, and how often HiTopKComm's."""
    columns = [figure_7(size) for size in HITOPKCOMM.sizes]
    head = ["reducer", "stands for"]
    for size in HITOPKCOMM.sizes:
        head += [f"ms at {size // 1_000_000} M", f"of `hitopk` at {size // 1_000_000} M"]
    rows = []
    for name in columns[0]:
        cells = [(milliseconds(each[name]), f"{each[name] / each['hitopk']:.2f}") for each in columns]
        rows.append([f"`{name}`", HITOPKCOMM.reducers.get(name, ""), *chain.from_iterable(cells)])
    return Table("figure 7", head, rows)


def figure_8_table() -> Table:
    """Return where ``hitopk`` spends its time, in 32 bits."""
    rows = []
    for size in HITOPKCOMM.sizes:
        step = communication("hitopk", HITOPKCOMM.cluster, size, HITOPKCOMM.density, FULL)
        times = (milliseconds(step.intra), milliseconds(step.inter), f"{step.inter / step.seconds:.0%}")
        rows.append((f"{size // 1_000_000} M entries", *times))
    return Table("figure 8", ("`hitopk`", "ms inside", "ms between", "share between"), rows)


@dataclass(frozen=True)
class Cell:
    """A cell of table 3: one training with one reducer.

    ``exposed``: seconds a step beyond computing that the paper's throughput leaves, and the predicted seconds
    of messages. ``is_fitted``: the prediction was made to meet the paper.
    """

    training: SimpleNamespace
    reducer: str
    throughput: Comparison
    exposed: Comparison
    is_fitted: bool = False


def local_batch(training: SimpleNamespace) -> float:
    """Return the samples a rank and step; where the paper gives none, those that meet its 2DTAR-SGD.

    ``B`` of ``throughput = P·B/(B/single_gpu + communication)``.
    """
    if training.local_batch is not None:
        return training.local_batch
    throughput = training.throughput["torus2d"]
    seconds = in_half("torus2d", training.parameters)
    return throughput * seconds / (HITOPKCOMM.cluster.size - throughput / training.single_gpu)


def cell(training: SimpleNamespace, reducer: str, slowdown: float = 1.0) -> Cell:
    """Predict a cell of table 3: computing as on one GPU, then communication, nothing of it hidden."""
    batch, world_size = local_batch(training), HITOPKCOMM.cluster.size
    seconds = slowdown * in_half(reducer, training.parameters)
    computing = batch / training.single_gpu
    paper = training.throughput[reducer]
    return Cell(
        training,
        reducer,
        Comparison(paper, world_size * batch / (computing + seconds)),
        Comparison(world_size * batch / paper - computing, seconds),
        is_fitted=training.local_batch is None and reducer == "torus2d",
    )


def table_3() -> list[Cell]:
    """Predict all cells of table 3 from the rate of the link alone."""
    return [cell(training, reducer) for training in HITOPKCOMM.trainings for reducer in HITOPKCOMM.schemes]


def table_3_slowed() -> list[Cell]:
    """Predict Dense-SGD with an all-reduce slowed by a factor fitted to the case of most communication.

    That is the shortest computing of a step among cases whose batch is known, ResNet-50 at 96 × 96.
    """
    known = [each for each in HITOPKCOMM.trainings if each.local_batch is not None]
    shortest = min(known, key=lambda each: local_batch(each) / each.single_gpu)
    slowdown = 1 / cell(shortest, "dense").exposed.ratio
    cells = [cell(training, "dense", slowdown) for training in HITOPKCOMM.trainings]
    return [replace(each, is_fitted=each.training is shortest) for each in cells]


def cells_table(name: str, cells: Sequence[Cell]) -> Table:
    head = ["training", "scheme", "samples/s, paper", "predicted", "predicted/paper", "efficiency, paper"]
    head += ["efficiency, predicted", "ms beyond computing, paper", "ms of messages, predicted"]
    rows = []
    for each in cells:
        ideal = HITOPKCOMM.cluster.size * each.training.single_gpu
        found = each.throughput
        row = (
            *(each.training.name, HITOPKCOMM.schemes[each.reducer]),
            *(f"{found.paper:,.0f}", f"{found.predicted:,.0f}"),
            "fitted" if each.is_fitted else f"{found.ratio:.2f}",
            *(f"{found.paper / ideal:.1%}", f"{found.predicted / ideal:.1%}"),
            *(milliseconds(each.exposed.paper), milliseconds(each.exposed.predicted)),
        )
        rows.append(row)
    return Table(name, head, rows)


def gains() -> dict[str, Comparison]:
    """Return MSTopK-SGD's throughput over 2DTAR-SGD's, by training."""
    found = {(each.training.name, each.reducer): each.throughput for each in table_3()}
    return {
        each.name: Comparison(mstopk.paper / torus.paper, mstopk.predicted / torus.predicted)
        for each in HITOPKCOMM.trainings
        for mstopk, torus in [(found[each.name, "hitopk"], found[each.name, "torus2d"])]
    }


OKTOPK = SimpleNamespace(**PAPERS["oktopk"])
OKTOPK.link = load_cluster(OKTOPK.cluster).network.inter
OKTOPK.step = OKTOPK.hours * 3600 / OKTOPK.iterations  # seconds on 32 GPUs
OKTOPK.dense_step = OKTOPK.dense_hours * 3600 / OKTOPK.iterations
ALGORITHMS = OKTOPK.algorithms


@dataclass(frozen=True)
class Fit:
    """A step of BERT over links like ``link``; ``meets``: the statement that it meets by construction."""

    name: str
    meets: str
    link: Link
    computing: float

    def seconds(self, algorithm: str, ranks: int) -> float:
        return self.computing + messages(algorithm, ranks, self.link)

    def speedup(self, algorithm: str, ranks: int) -> float:
        """Return Ok-Topk's speed-up over ``algorithm``."""
        return self.seconds(algorithm, ranks) / self.seconds("Ok-Topk", ranks)


def messages(algorithm: str, ranks: int, link: Link) -> float:
    """Return the predicted seconds of a step's messages for BERT, one rank a node."""
    given, cluster = ALGORITHMS[algorithm], Cluster(ranks, 1, Network(inter=link))
    density = OKTOPK.density * given.get("share", 1.0)
    return communication(given["reducer"], cluster, OKTOPK.parameters, density).seconds


def over(beta: float, name: str, meets: str = "") -> Fit:
    """Return a step at so many seconds a byte; computing is the rest of Ok-Topk's step."""
    link = Link(OKTOPK.link.alpha, beta)
    return Fit(name, meets, link, OKTOPK.step - messages("Ok-Topk", OKTOPK.few, link))


def fit(other: str, algorithm: str, step: float) -> Fit:
    """Return the rate at which ``algorithm`` on 32 ranks takes ``step`` seconds where Ok-Topk takes its own.

    The seconds of both are linear in the seconds a byte, ``a + b·β``, so ``β`` follows from their difference.
    """

    def difference(beta: float) -> float:
        link = Link(OKTOPK.link.alpha, beta)
        return messages(algorithm, OKTOPK.few, link) - messages("Ok-Topk", OKTOPK.few, link)

    at_zero = difference(0.0)
    beta = (step - OKTOPK.step - at_zero) / (difference(1.0) - at_zero)
    return over(beta, f"fitted to {other}", f"32 GPUs: over {other}")


def fits() -> list[Fit]:
    """Return the network's own rate, and those that two statements on 32 GPUs imply."""
    return [
        over(OKTOPK.link.beta, "the network's rate"),
        fit("DenseOvlp", "Dense", OKTOPK.dense_step),
        fit("Gaussiank", "Gaussiank", OKTOPK.over_gaussian * OKTOPK.step),
    ]


def statements(given: Fit) -> dict[str, Comparison]:
    """Return the numbers of Ok-Topk's text, but that which the fit was made with, by what they say."""
    fastest, slowest = OKTOPK.over_all
    speedups = {name: given.speedup(name, OKTOPK.many) for name in ALGORITHMS if name != "Ok-Topk"}
    efficiency = given.seconds("Ok-Topk", OKTOPK.few) / given.seconds("Ok-Topk", OKTOPK.many)
    over_dense, over_gaussian = (given.speedup(name, OKTOPK.few) for name in ("Dense", "Gaussiank"))
    but_gtopk = min(each for name, each in speedups.items() if name != "gTopk")
    found = {
        "32 GPUs: over DenseOvlp": Comparison(OKTOPK.dense_step / OKTOPK.step, over_dense),
        "32 GPUs: over Gaussiank": Comparison(OKTOPK.over_gaussian, over_gaussian),
        "256 GPUs: over the fastest other": Comparison(fastest, min(speedups.values())),
        "256 GPUs: over the fastest other but gTopk": Comparison(fastest, but_gtopk),
        "256 GPUs: over the slowest other": Comparison(slowest, max(speedups.values())),
        "256 GPUs: parallel efficiency": Comparison(OKTOPK.efficiency, efficiency),
    }
    return {text: each for text, each in found.items() if text != given.meets}


def statements_table() -> Table:
    columns = [statements(each) for each in fits()]
    rows = []
    for text, first in columns[0].items():
        found = [each.get(text) for each in columns]
        cells = [f"{each.predicted:.2f} ({each.ratio:.2f})" if each else "(fitted)" for each in found]
        rows.append((text, f"{first.paper:.2f}", *cells))
    return Table("statements", ("Ok-Topk", "paper", *(each.name for each in fits())), rows)


def figure_12_table() -> Table:
    """Return the predicted seconds of the messages of each algorithm, at the rate fitted to DenseOvlp."""
    link, ranks = fits()[1].link, (32, 64, 128, 256)
    rows = [
        (name, f"`{given['reducer']}`", *(milliseconds(messages(name, each, link)) for each in ranks))
        for name, given in ALGORITHMS.items()
    ]
    return Table("figure 12", ("algorithm", "reducer", *(f"ms on {each}" for each in ranks)), rows)


def fill_in() -> dict[str, Comparison]:
    """Return the densities of sums of independent, evenly spread selections."""
    return {
        f"{each['model']}, {each['ranks']} GPUs at {each['density']:.0%}": Comparison(
            each["found"], union(each["ranks"], each["density"], 1.0)
        )
        for each in OKTOPK.fill_in
    }


def compared(name: str, first: str, found: Mapping[str, Comparison], form: str) -> Table:
    """Return the table of comparisons by name, the numbers in this format."""
    rows = [
        (key, format(each.paper, form), format(each.predicted, form), f"{each.ratio:.2f}")
        for key, each in found.items()
    ]
    return Table(name, (first, "paper", "predicted", "predicted/paper"), rows)


def comparisons() -> dict[str, list[Comparison]]:
    """Return the comparisons that the factors of the page bound, by their names, without fitted ones."""
    fast = [each for each in table_3() if not each.is_fitted]
    slow = [each for each in table_3_slowed() if not each.is_fitted]
    bounded = {
        "2DTAR-SGD and MSTopK-SGD": [each.throughput for each in fast if each.reducer != "dense"],
        "MSTopK-SGD over 2DTAR-SGD": list(gains().values()),
        "Dense-SGD, at the link's rate": [each.throughput for each in fast if each.reducer == "dense"],
        "Dense-SGD, slowed": [each.throughput for each in slow],
    }
    for given in fits()[1:]:
        bounded[f"Ok-Topk, {given.name}"] = list(statements(given).values())
    return bounded | {"density of the sum": list(fill_in().values())}


def tables() -> list[Table]:
    rates = [(fit.name, f"{1 / fit.link.beta / 1e9:.2f}", milliseconds(fit.computing)) for fit in fits()]
    return [
        figure_7_table(),
        figure_8_table(),
        cells_table("table 3", table_3()),
        cells_table("table 3, slowed", table_3_slowed()),
        compared("gains", "MSTopK-SGD over 2DTAR-SGD", gains(), ".2f"),
        Table("rates", ("rate", "GB/s", "computing, ms a step"), rates),
        figure_12_table(),
        statements_table(),
        compared("fill-in", "density of the sum", fill_in(), ".1%"),
    ]


def blocks(given: Sequence[Table] | None = None) -> dict[str, str]:
    """Return the text between each pair of marks of the page: of all tables that need no simulation."""
    return {table.title: markdown(table.header, table.rows) for table in given or tables()}


def simulated_seconds(reducer: str, cluster: Cluster, density: float, values: str) -> float:
    """Return the seconds of the second step on the slowest rank: thresholds and regions are reused in it."""
    is_sparse = REDUCERS[reducer].sparse
    size = SIMULATED_SIZE if is_sparse or values == FULL else SIMULATED_SIZE // 2
    options: dict[str, Any] = {"density": density, "wire": values} if is_sparse else {}

    def body(comm: Communicator) -> float:
        made = make_reducer(reducer, Topology(comm), size, **options)
        for step in range(2):
            normal = np.random.default_rng([comm.rank, step]).standard_normal(size, np.float32)
            # What is selected from is then distributed alike in all steps, as in a training that has settled.
            seconds = step_seconds(comm, made, normal - made.residual)
        return seconds

    return simulated.run(body, cluster.size, cluster.ranks_per_node, cluster.network)[0]


def simulated_table() -> Table:
    """Return simulated and predicted seconds on both clusters, Ok-Topk's cut to 128 nodes."""
    one_gpu = Cluster(128, 1, Network(inter=fits()[1].link))
    of_oktopk = dict.fromkeys(each["reducer"] for each in ALGORITHMS.values())
    clusters = (
        ("16 × 8", HITOPKCOMM.cluster, HITOPKCOMM.density, HALF, [*HITOPKCOMM.reducers, "hioktopk"]),
        ("128 × 1", one_gpu, OKTOPK.density, FULL, list(of_oktopk)),
    )
    rows = []
    for name, cluster, density, values, reducers in clusters:
        for reducer in reducers:
            expected = communication(reducer, cluster, SIMULATED_SIZE, density, values).seconds
            found = simulated_seconds(reducer, cluster, density, values)
            ratio = f"{expected / found:.3f}"
            rows.append((name, f"`{reducer}`", milliseconds(found), milliseconds(expected), ratio))
    head = ("nodes × GPUs", "reducer", "simulated, ms", "closed form, ms", "closed form/simulated")
    return Table("simulated", head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object a row")
    parser.add_argument("--simulate", action="store_true", help="also run the reducers on the virtual clock")
    parser.add_argument("--write", action="store_true", help="also refresh the page")
    options = parser.parse_args()
    given = tables() + ([simulated_table()] if options.simulate else [])
    if options.json:
        for table in given:
            for row in table.rows:
                print(json.dumps({"table": table.title, **dict(zip(table.header, row, strict=True))}))
    else:
        for name, text in blocks(given).items():
            print(f"{name}\n\n{text}")
    if options.write:
        rewrite(PAGE, blocks(given))


if __name__ == "__main__":
    main()
