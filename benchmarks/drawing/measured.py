"""The pictures of benchmarks/README.md: reducers on a cluster, races, the cache, norms in parts."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

from benchmarks.drawing.pages import fingerprint
from benchmarks.drawing.style import STAGES, WAITING, WHOLE, legend, name_row, note, open_up, picture
from benchmarks.jobs import world
from training.bench.record import Record
from training.bench.reducers import NOTHING, label, percent


def draw_cluster(records: Sequence[Record], path: Path) -> None:
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
        name_row(rows[0, 0], "ms a step")
        name_row(rows[1, 0], "MB between nodes,\nbusiest rank")
        legend(figure, STAGES | {"waiting": WAITING, "dense all-reduce": WHOLE})
        case = records[0].case
        figure.suptitle(f"{case['rate']}, {case['size']:,} entries, {world(case['ranks_of_nodes'])}")


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


def is_whole(record: Record) -> bool:
    """Return whether it sends all entries."""
    return record.case["density"] is None


def draw_steps(records: Sequence[Record], path: Path) -> None:
    """Write the picture of steps a second: a bar a subject, its ratio to the peer above."""
    with picture(path, 5.4, 3.6, fingerprint(records)) as figure:
        axes: Axes = figure.subplots()
        axes.set_title(records[0].case["rate"])
        for number, record in enumerate(records):
            color = WHOLE if is_whole(record) else STAGES["select"]
            axes.bar(number, record.more["steps_a_second"], color=color, width=0.75)
            above = "" if record.ratio is None else f"{record.ratio:.3g}×"
            note(axes, number, record.more["steps_a_second"], above)
        axes.set_xticks(range(len(records)), [each.subject for each in records], rotation=90)
        open_up(axes)
        name_row(axes, "steps a second")
        legend(figure, {"sends all entries": WHOLE, "sends a part": STAGES["select"]})


def draw_runs(records: Sequence[Record], path: Path) -> None:
    """Write the picture of accuracies over time: a line a seed, and the accuracy that is raced to."""
    colors = matplotlib.colormaps["tab20"].colors
    of_subject = {record.subject: colors[number % 20] for number, record in enumerate(records)}
    with picture(path, 6.8, 4.2, fingerprint(records)) as figure:
        axes: Axes = figure.subplots()
        for record in records:
            style = "--" if is_whole(record) else "-"
            for curve in record.more["curves"]:
                seconds, accuracies = zip(*curve, strict=True)
                axes.plot(seconds, accuracies, style, color=of_subject[record.subject], linewidth=0.9)
        axes.axhline(records[0].more["target"], color=WHOLE, linewidth=0.5)
        axes.set_xscale("log")
        axes.set_xlabel("s")
        axes.set_ylabel("test accuracy")
        axes.spines[["top", "right"]].set_visible(False)
        legend(figure, of_subject)


def draw_cache(records: Sequence[Record], path: Path) -> None:
    """Write the picture of the time of a sample: a bar for each subject and peer."""
    seconds = {each.subject: each.seconds.median for each in records}
    subjects = set(seconds)
    seconds |= {each.peer: each.peer_seconds.median for each in records if each.peer_seconds}
    bars_of = sorted(seconds.items(), key=lambda each: each[1])
    with picture(path, 6.4, 2.4, fingerprint(records)) as figure:
        axes = figure.subplots()
        colors = [STAGES["select"] if name in subjects else WHOLE for name, _ in bars_of]
        axes.barh([name for name, _ in bars_of], [each * 1e6 for _, each in bars_of], color=colors)
        for place, (_, each) in enumerate(bars_of):
            axes.annotate(
                f"{each * 1e6:,.0f}", (each * 1e6, place), (3, 0), textcoords="offset points", va="center"
            )
        axes.set_xscale("log")
        axes.set_xlabel("µs a sample")
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
