"""Selections on a GPU: the figure of HiTopKComm's section 3.1, time against the length of the vector."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks.drawing.results import Results
from benchmarks.drawing.style import WHOLE, picture
from benchmarks.gpu import SWEEP
from training.bench.record import Record
from training.commands.printing import markdown, milliseconds, times

SUBJECT = "exact"
LONGEST = 1 << 27  # that the paper shows

READ = "reading once"
# In the order of the legend, of Okabe and Ito's palette.
COLORS = {
    "mstopk, 30 passes": "#d55e00",
    "cupy.argpartition": "#cc79a7",
    "jax.lax.approx_max_k": "#e69f00",
    "torch.topk": "#56b4e9",
    SUBJECT: "#0072b2",
    READ: WHOLE,
}
UNITS = ((1 << 20, "M"), (1 << 10, "K"))


@dataclass(frozen=True)
class Curve:
    """Seconds of one candidate at each length."""

    name: str
    sizes: list[int]
    seconds: list[float]


def types_of(records: Iterable[Record]) -> list[str]:
    """Return the types of entries, float32 first."""
    return sorted({each.case["entry"] for each in records}, reverse=True)


def of_entry(records: Iterable[Record], entry: str) -> list[Record]:
    """Return the records of a type of entries, the shortest vectors first."""
    return sorted((row for row in records if row.case["entry"] == entry), key=lambda row: row.case["size"])


def curves(records: Sequence[Record]) -> list[Curve]:
    """Return the curves of records of one type of entries, without candidates that were not measured."""
    found: dict[str, dict[int, float]] = {name: {} for name in COLORS}
    for record in records:
        size = record.case["size"]
        if record.subject != SUBJECT or size > LONGEST:
            continue
        found[SUBJECT][size] = record.seconds.median
        found[READ][size] = record.more["floor_seconds"]
        if record.peer in found and record.peer_seconds is not None:
            found[record.peer][size] = record.peer_seconds.median
    return [Curve(name, list(own), list(own.values())) for name, own in found.items() if own]


def length(size: int) -> str:
    """Return a number of entries in binary units.

    >>> length(1 << 18), length(1 << 27), length(1000)
    ('256 K', '128 M', '1,000')
    """
    return next((f"{size // unit} {name}" for unit, name in UNITS if size % unit == 0), f"{size:,}")


def draw(results: Results, path: Path) -> None:
    """Write the picture: a panel for each type of entries."""
    records = results.records
    types = types_of(records)
    with picture(path, 0.8 + 3.2 * len(types), 3.6, results.fingerprint) as figure:
        panels = figure.subplots(1, len(types), sharey=True, squeeze=False)[0]
        for axes, entry in zip(panels, types, strict=True):
            draw_panel(axes, curves(of_entry(records, entry)))
            axes.set_title(f"{entry}, density {records[0].case['density']:.1%}")
        panels[0].set_ylabel("ms a selection")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(records[0].more["gpu"]["name"])


def draw_panel(axes: Axes, drawn: Sequence[Curve]) -> None:
    """Draw the curves of one type of entries, both axes logarithmic."""
    for curve in drawn:
        style = {"linestyle": ":"} if curve.name == READ else {"marker": "o", "markersize": 3}
        milli = [each * 1e3 for each in curve.seconds]
        axes.plot(curve.sizes, milli, color=COLORS[curve.name], label=curve.name, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({size for curve in drawn for size in curve.sizes})
    axes.set_xticks(sizes, [length(size) for size in sizes], rotation=90)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("entries")


def tables(results: Results, folder: str = "") -> Iterator[str]:
    """Yield the picture, which is in ``folder``, and a table: a row a type of entries and length."""
    records = results.records
    yield f"![Time of a selection against the length of the vector]({folder}gpu-selection.svg)\n"
    peers = [name for name in COLORS if name in {each.peer for each in records}]
    own = ["ms", "of a read", "sweep, ms", "of its floor"]
    rows = []
    for entry in types_of(records):
        of_type = of_entry(records, entry)
        for size in dict.fromkeys(each.case["size"] for each in of_type):
            rows.append([entry, *_row([each for each in of_type if each.case["size"] == size], peers)])
    yield markdown(["entries", "d", *own, *(f"× {name}" for name in peers)], rows)


def _row(records: Sequence[Record], peers: Sequence[str]) -> list[str]:
    by_subject = {each.subject: each for each in records}
    cells = [length(records[0].case["size"])]
    for name in (SUBJECT, SWEEP):
        median, floor = by_subject[name].seconds.median, by_subject[name].more["floor_seconds"]
        cells += [milliseconds(median), f"{median / floor:.2f}"]
    ratios = {each.peer: each.ratio for each in records if each.subject == SUBJECT}
    return cells + [times(ratios.get(peer)) for peer in peers]
