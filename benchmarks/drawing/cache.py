"""The picture of batches from each level of the cache."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.drawing.results import fingerprint
from benchmarks.drawing.style import STAGES, WHOLE, picture
from training.bench.record import Record


def draw(records: Sequence[Record], path: Path) -> None:
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
