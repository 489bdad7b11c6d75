"""HiTopKComm on its cluster, 16 nodes of 8 GPUs at 25 Gbit/s: figures 7 and 8, and table 3."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

from benchmarks.drawing.pages import Table, milliseconds
from benchmarks.papers.clusters import FULL, HALF, PAPERS, Cluster, Comparison, communication
from training.plan.cluster import load_cluster
from training.plan.step import Bucket, Workload, step_seconds


@dataclass(frozen=True)
class Training:
    """A row of HiTopKComm's table 3; see ``papers.yaml`` for the units."""

    name: str
    parameters: int
    single_gpu: float
    local_batch: int | None
    throughput: Mapping[str, float]


HITOPKCOMM = SimpleNamespace(**PAPERS["hitopkcomm"])
TENCENT = load_cluster(HITOPKCOMM.cluster)
HITOPKCOMM.nodes, HITOPKCOMM.ranks_per_node = TENCENT.nodes, TENCENT.ranks_per_node
HITOPKCOMM.cluster = Cluster(TENCENT.nodes, TENCENT.ranks_per_node, TENCENT.network)
HITOPKCOMM.trainings = [
    Training(single_gpu=TENCENT.per_second(precision="float16", **each.pop("trained")), **each)
    for each in HITOPKCOMM.trainings
]


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
        row = [f"`{name}`", HITOPKCOMM.reducers.get(name, "")]
        for seconds in columns:
            row += [milliseconds(seconds[name]), f"{seconds[name] / seconds['hitopk']:.2f}"]
        rows.append(row)
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

    training: str
    reducer: str
    throughput: Comparison
    efficiency: Comparison
    exposed: Comparison
    is_fitted: bool = False


def local_batch(training: Training) -> float:
    """Return the samples a rank and step; where the paper gives none, those that meet its 2DTAR-SGD.

    ``B`` of ``throughput = P·B/(B/single_gpu + communication)``.
    """
    if training.local_batch is not None:
        return training.local_batch
    throughput = training.throughput["torus2d"]
    seconds = in_half("torus2d", training.parameters)
    return throughput * seconds / (HITOPKCOMM.cluster.size - throughput / training.single_gpu)


def cell(training: Training, reducer: str, slowdown: float = 1.0) -> Cell:
    """Predict a cell of table 3: computing as on one GPU, then communication, nothing of it hidden."""
    batch, world_size = local_batch(training), HITOPKCOMM.cluster.size
    seconds = slowdown * in_half(reducer, training.parameters)
    computing = batch / training.single_gpu
    paper = training.throughput[reducer]
    whole = Workload(training.name, computing, (Bucket(training.parameters, 1.0),))
    throughput = world_size * batch / step_seconds(whole, seconds, [seconds]).plain
    ideal = world_size * training.single_gpu
    return Cell(
        training.name,
        reducer,
        Comparison(paper, throughput),
        Comparison(paper / ideal, throughput / ideal),
        Comparison(world_size * batch / paper - computing, seconds),
        is_fitted=training.local_batch is None and reducer == "torus2d",
    )


def table_3() -> list[Cell]:
    """Predict all cells of table 3 from the rate of the link alone."""
    return [cell(training, reducer) for training in HITOPKCOMM.trainings for reducer in HITOPKCOMM.schemes]


def table_3_slowed() -> list[Cell]:
    """Predict Dense-SGD with a slower all-reduce: by how much, is fitted to the case of most communication.

    That is the smallest share of computing among those whose batch is known, ResNet-50 at 96 × 96.
    """
    known = [each for each in HITOPKCOMM.trainings if each.local_batch is not None]
    shortest = min(known, key=lambda each: local_batch(each) / each.single_gpu)
    slowdown = 1 / cell(shortest, "dense").exposed.ratio
    cells = [cell(training, "dense", slowdown) for training in HITOPKCOMM.trainings]
    return [replace(each, is_fitted=each.training == shortest.name) for each in cells]


def cells_table(name: str, cells: Sequence[Cell]) -> Table:
    """Return the cells as rows."""
    head = ["training", "scheme", "samples/s, paper", "predicted", "predicted/paper", "efficiency, paper"]
    head += ["efficiency, predicted", "ms beyond computing, paper", "ms of messages, predicted"]
    rows = [
        (
            *(each.training, HITOPKCOMM.schemes[each.reducer]),
            *(f"{each.throughput.paper:,.0f}", f"{each.throughput.predicted:,.0f}"),
            "fitted" if each.is_fitted else f"{each.throughput.ratio:.2f}",
            *(f"{each.efficiency.paper:.1%}", f"{each.efficiency.predicted:.1%}"),
            *(milliseconds(each.exposed.paper), milliseconds(each.exposed.predicted)),
        )
        for each in cells
    ]
    return Table(name, head, rows)


def gains() -> dict[str, Comparison]:
    """Return MSTopK-SGD's throughput over 2DTAR-SGD's, by training."""
    found = {(each.training, each.reducer): each.throughput for each in table_3()}
    pairs = {
        each.name: (found[each.name, "hitopk"], found[each.name, "torus2d"]) for each in HITOPKCOMM.trainings
    }
    return {
        name: Comparison(mstopk.paper / torus.paper, mstopk.predicted / torus.predicted)
        for name, (mstopk, torus) in pairs.items()
    }
