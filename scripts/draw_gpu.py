"""Draw the newest benchmarks/results/DAY-gpu-selection.jsonl to docs/gpu-selection.svg, and print its table.

The figure of HiTopKComm's section 3.1, time against the length of the vector, with the selector of
``commlib.gpu`` beside what the paper compares: python scripts/draw_gpu.py
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from training.bench.gpu import SWEEP
from training.bench.record import Record, milliseconds, times

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURE = ROOT / "benchmarks" / "results", ROOT / "docs" / "gpu-selection.svg"
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
    READ: "#6e6e6e",
}
# Text stays text, and elements have the same names in every run.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "cloudtrain", "font.size": 8, "axes.titlesize": 9}
UNITS = ((1 << 20, "M"), (1 << 10, "K"))


@dataclass(frozen=True)
class Curve:
    """Seconds of one contender at each length."""

    name: str
    sizes: list[int]
    seconds: list[float]


def newest(folder: Path) -> list[Record]:
    """Return the records of the newest file; none where there is no file."""
    paths = [path for path in sorted(folder.glob("*-gpu-selection.jsonl")) if path.stat().st_size]
    return [Record.of(json.loads(line)) for line in paths[-1].read_text().splitlines()] if paths else []


def of_entry(records: Iterable[Record], entry: str) -> list[Record]:
    """Return the records of a type of entries, the shortest vectors first."""
    return sorted(
        (each for each in records if each.case["entry"] == entry), key=lambda each: each.case["size"]
    )


def curves(records: Sequence[Record], longest: int = LONGEST) -> list[Curve]:
    """Return what is drawn, of records of one type of entries; what was never measured has no curve."""
    found: dict[str, dict[int, float]] = {name: {} for name in COLORS}
    for record in records:
        size = record.case["size"]
        if record.subject != SUBJECT or size > longest:
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


def draw(records: Sequence[Record], path: Path) -> None:
    """Write the picture: a panel for each type of entries."""
    entries = sorted({each.case["entry"] for each in records}, reverse=True)  # float32 first
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(0.8 + 3.2 * len(entries), 3.6), facecolor="white", layout="constrained")
        panels = figure.subplots(1, len(entries), sharey=True, squeeze=False)[0]
        for axes, entry in zip(panels, entries, strict=True):
            drawn = curves(of_entry(records, entry))
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
            axes.set_title(f"{entry}, density {records[0].case['density']:.1%}")
            axes.set_xlabel("entries")
        panels[0].set_ylabel("ms a selection")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(records[0].more["gpu"]["name"])
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": fingerprint(records)})


def fingerprint(records: Iterable[Record]) -> str:
    """Return a digest of records, which the picture has among its metadata."""
    lines = [repr((each.subject, each.case, each.seconds, each.peer_seconds)) for each in records]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def table(records: Sequence[Record]) -> str:
    """Return a table in Markdown: a row a type of entries and length; "×": how many times as fast."""
    peers = [name for name in COLORS if name in {each.peer for each in records}]
    header = [
        "entries",
        "d",
        "ms",
        "of a read",
        "sweep, ms",
        "of its floor",
        *(f"× {name}" for name in peers),
    ]
    rows = [header, ["---", *["---:"] * (len(header) - 1)]]
    for entry in sorted({each.case["entry"] for each in records}, reverse=True):
        own = of_entry(records, entry)
        for size in dict.fromkeys(each.case["size"] for each in own):
            rows.append([entry, *_row([each for each in own if each.case["size"] == size], peers)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(records: Sequence[Record], peers: Sequence[str]) -> list[str]:
    by_subject = {each.subject: each for each in records}
    cells = [length(records[0].case["size"])]
    for name in (SUBJECT, SWEEP):
        median, floor = by_subject[name].seconds.median, by_subject[name].more["floor_seconds"]
        cells += [milliseconds(median), f"{median / floor:.2f}"]
    ratios = {each.peer: each.ratio for each in records if each.subject == SUBJECT}
    return cells + [times(ratios.get(peer)) for peer in peers]


def main() -> int:
    """Draw the picture and print the table; return 1 where nothing was measured."""
    records = newest(RESULTS)
    if not records:
        sys.stderr.write(f"{RESULTS}: expected a file DAY-gpu-selection.jsonl, found none\n")
        return 1
    draw(records, PICTURE)
    sys.stdout.write(table(records) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
