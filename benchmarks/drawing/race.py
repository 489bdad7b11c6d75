"""Steps a second of all that raced, and accuracies over time."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

from benchmarks.drawing.results import fingerprint
from benchmarks.drawing.style import STAGES, WHOLE, legend, name_rows, note, open_up, picture
from training.bench.record import Record


def is_whole(record: Record) -> bool:
    """Return whether it sends all entries."""
    return record.case["density"] is None


def draw_steps(records: Sequence[Record], path: Path) -> None:
    """Write the picture of steps a second: a bar a subject, its ratio to the peer above."""
    with picture(path, 5.4, 3.6, fingerprint(records)) as figure:
        row = figure.subplots(1, 1, squeeze=False)
        axes: Axes = row[0][0]
        axes.set_title(records[0].case["rate"])
        for number, record in enumerate(records):
            color = WHOLE if is_whole(record) else STAGES["select"]
            axes.bar(number, record.more["steps_a_second"], color=color, width=0.75)
            above = "" if record.ratio is None else f"{record.ratio:.3g}×"
            note(axes, number, record.more["steps_a_second"], above)
        axes.set_xticks(range(len(records)), [each.subject for each in records], rotation=90)
        open_up(axes)
        name_rows(row, ["steps a second"])
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
