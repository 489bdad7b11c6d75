"""Times of reducers on emulated clusters, against all-reduces."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks.drawing.results import Results, fingerprint
from benchmarks.drawing.style import STAGES, WAITING, WHOLE, legend, name_rows, note, open_up, picture
from training.bench.record import Record
from training.bench.tables import NOTHING, label, percent, table_of
from training.commands.printing import milliseconds, times

CLUSTER = "cluster"  # the first word of results from emulated clusters

TEXT = """## {title}

Real ranks under `horovodrun` on an emulated cluster, on the cores of one machine, from barrier to barrier,
slowest rank. `mpi` and `horovod` are the dense all-reduces of Open MPI and Horovod, by the algorithm that is
named; `memory kept`: where the C library retains freed memory. "× peer" is against the fastest of them.
`bare` is the exchange of `hitopk`'s bytes through MPI alone, without the work. Stages are ms, means over
ranks; the rest of a step is waiting for the slowest.
"""


@dataclass(frozen=True)
class Cell:
    """The measurements on a cluster at one rate and size, and the picture of them."""

    kind: str
    rate: str
    size: int
    nodes: Sequence[int]
    records: Sequence[Record]

    @property
    def measured(self) -> list[Record]:
        """Return the records but for the probing of MPI's algorithms."""
        return [record for record in self.records if record.bench != "probe"]

    @property
    def densities(self) -> list[float]:
        """Return the densities, in the order in which they were measured."""
        found = (record.case["density"] for record in self.measured)
        return list(dict.fromkeys(density for density in found if density is not None)) or [1.0]

    def at(self, density: float) -> list[Record]:
        """Return the records of a density, with those that have none; all-reduces come last."""
        own = [record for record in self.measured if record.case["density"] in (None, density)]
        return sorted(own, key=is_allreduce)

    @property
    def title(self) -> str:
        """Return the title: rate, size and nodes."""
        return f"{self.rate}, {self.size:,} entries, {world(self.nodes)}"

    @property
    def picture(self) -> str:
        """Return the name of the picture."""
        return f"{self.kind}-{self.rate}-{self.size}.svg"

    @property
    def fingerprint(self) -> str:
        """Return a digest of the records, which the picture has among its metadata."""
        return fingerprint(self.measured)


def cells(results: Results) -> list[Cell]:
    """Return the records of clusters, by ranks, rate and size."""

    def place(record: Record) -> tuple[str, int, list[int]]:
        return record.case["rate"], record.case["size"], record.case["ranks_of_nodes"]

    return [Cell(results.kind, *key, list(own)) for key, own in groupby(results.records, key=place)]


def all_cells(newest_results: Iterable[Results]) -> list[Cell]:
    """Return all cells to draw."""
    return [cell for each in newest_results if each.kind.startswith(CLUSTER) for cell in cells(each)]


def world(nodes: Sequence[int]) -> str:
    """Return the numbers of nodes and ranks.

    >>> world([2, 2, 2, 2]), world([3, 1])
    ('4 nodes × 2 ranks', '2 nodes of 3 and 1 ranks')
    """
    if len(set(nodes)) == 1:
        return f"{len(nodes)} nodes × {nodes[0]} rank{'s' if nodes[0] > 1 else ''}"
    return f"{len(nodes)} nodes of {' and '.join(map(str, nodes))} ranks"


def is_allreduce(record: Record) -> bool:
    """Return whether it is a baseline of the others."""
    return "baselines" not in record.more


def tables(results: Results) -> Iterator[str]:
    """Yield a heading, a picture and a table for each cell, and what MPI's algorithms took there."""
    for cell in cells(results):
        yield f"### {cell.title}\n"
        yield f"{probed(cell)}\n"
        yield f"![Time by stage and bytes between nodes: {cell.title}]({cell.picture})\n"
        yield table_of(cell.measured).markdown()


def probed(cell: Cell) -> str:
    """Return the line about MPI's algorithms."""
    others = [
        f"{record.case['mpi_algorithm']} {milliseconds(record.peer_seconds.median)} ms"
        f" ({times(record.seconds.median / record.peer_seconds.median)} × `dense`)"
        for record in cell.records
        if record.bench == "probe"
    ]
    chosen = cell.measured[0].case["mpi_algorithm"]
    steps = cell.measured[0].seconds.runs
    if not others:
        return f"All-reduce of Open MPI: {chosen}. {steps} steps."
    return f"All-reduce of Open MPI, by algorithm: {', '.join(others)}; used: {chosen}. {steps} steps."


def draw(cell: Cell, path: Path) -> None:
    """Write the picture of a cell: for each density time by stage, and below it the bytes between nodes."""
    densities = cell.densities
    with picture(path, 0.8 + 4.1 * len(densities), 5.6, cell.fingerprint) as figure:
        rows = figure.subplots(
            2, len(densities), sharey="row", sharex="col", squeeze=False, height_ratios=(3, 2)
        )
        for density, time, sent in zip(densities, *rows, strict=True):
            records = cell.at(density)
            time.set_title(f"density {percent(density)}")
            draw_time(time, records)
            draw_bytes(sent, records)
            for axes in (time, sent):
                open_up(axes)
            sent.set_xticks(range(len(records)), [label(each) for each in records], rotation=90)
        name_rows(rows, ("ms a step", "MB between nodes,\nbusiest rank"))
        legend(figure, STAGES | {"waiting": WAITING, "dense all-reduce": WHOLE})
        figure.suptitle(cell.title)


def draw_time(axes: Axes, records: Sequence[Record]) -> None:
    """Draw a bar for each candidate; above it how many times as fast it is as its peer."""
    for place, record in enumerate(records):
        for color, low, high in bars(record):
            axes.bar(place, high - low, bottom=low, color=color, width=0.75)
        if record.ratio is not None:
            note(axes, place, record.seconds.median * 1e3, f"{record.ratio:.3g}×")


def bars(record: Record) -> Iterator[tuple[str, float, float]]:
    """Yield color, begin and end in ms of the parts of a bar, which is as high as the step took."""
    total = record.seconds.median * 1e3
    stages = record.more["stages"]
    if stages is None:
        yield WHOLE, 0.0, total
        return
    low = 0.0
    for stage, color in STAGES.items():
        high = min(total, low + stages[stage]["mean"] * 1e3)  # medians of parts may add up to more
        yield color, low, high
        low = high
    yield WAITING, low, total


def draw_bytes(axes: Axes, records: Sequence[Record]) -> None:
    """Draw what the busiest rank sends between nodes; that of MPI's own collectives is unknown."""
    megabytes = [record.bytes.inter / 1e6 if record.bytes else None for record in records]
    for place, sent in enumerate(megabytes):
        if sent is not None:
            axes.bar(place, sent, color=STAGES["inter"], width=0.75)
        note(axes, place, sent or 0.0, NOTHING if sent is None else f"{sent:.3g}")
