"""The picture of reducers on an emulated cluster: time by stage, and bytes between nodes."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks.drawing.results import fingerprint
from benchmarks.drawing.style import STAGES, WAITING, WHOLE, legend, name_rows, note, open_up, picture
from training.bench.record import Record
from training.bench.reducers import NOTHING, label, percent


def world(nodes: Sequence[int]) -> str:
    """Return the numbers of nodes and ranks.

    >>> world([2, 2, 2, 2]), world([3, 1])
    ('4 nodes × 2 ranks', '2 nodes of 3 and 1 ranks')
    """
    if len(set(nodes)) == 1:
        return f"{len(nodes)} nodes × {nodes[0]} rank{'s' if nodes[0] > 1 else ''}"
    return f"{len(nodes)} nodes of {' and '.join(map(str, nodes))} ranks"


def title_of(record: Record) -> str:
    """Return the rate, size and nodes of a record."""
    case = record.case
    return f"{case['rate']}, {case['size']:,} entries, {world(case['ranks_of_nodes'])}"


def draw(records: Sequence[Record], path: Path) -> None:
    """Write the picture: for each density time by stage, and below it the bytes between nodes."""
    found = (record.case["density"] for record in records)
    densities = list(dict.fromkeys(density for density in found if density is not None)) or [1.0]
    with picture(path, 0.8 + 4.1 * len(densities), 5.6, fingerprint(records)) as figure:
        rows = figure.subplots(
            2, len(densities), sharey="row", sharex="col", squeeze=False, height_ratios=(3, 2)
        )
        for density, time, sent in zip(densities, *rows, strict=True):
            own = [record for record in records if record.case["density"] in (None, density)]
            own.sort(key=lambda record: "baselines" not in record.more)  # the all-reduces at the end
            time.set_title(f"density {percent(density)}")
            draw_time(time, own)
            draw_bytes(sent, own)
            for axes in (time, sent):
                open_up(axes)
            sent.set_xticks(range(len(own)), [label(each) for each in own], rotation=90)
        name_rows(rows, ("ms a step", "MB between nodes,\nbusiest rank"))
        legend(figure, STAGES | {"waiting": WAITING, "dense all-reduce": WHOLE})
        figure.suptitle(title_of(records[0]))


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
