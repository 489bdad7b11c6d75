"""Draw a trace of a run: what the loop and the engine of each rank did when.

python -m benchmarks.draw_trace runs/NAME/trace.json docs/training/trace.svg
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.drawing.style import LOOP_STAGES, STAGES, legend, picture

THREADS = ("loop", "engine")  # of a rank in the trace, by their numbers
COLORS = {name: color for name, color in LOOP_STAGES.items() if name != "data_wait"} | STAGES
HEIGHT = 0.8  # of a row, of which there are two a rank
Event = dict[str, Any]


def spans(content: dict[str, Any]) -> list[Event]:
    """Return the spans that are drawn: stages, not the steps and buckets that contain them.

    They begin with each rank's second step: before it, ranks still wait for the slowest to be ready.
    """
    events = [each for each in content["traceEvents"] if each["ph"] == "X"]
    steps: dict[int, list[float]] = {}
    for each in events:
        if each["name"].startswith("step "):
            steps.setdefault(each["pid"], []).append(each["ts"])
    begins = {rank: sorted(own)[:2][-1] for rank, own in steps.items()}
    first = min(begins.values())
    return [
        each | {"ts": each["ts"] - first}
        for each in events
        if each["name"] in COLORS and each["ts"] >= begins[each["pid"]]
    ]


def draw(events: Sequence[Event], path: Path) -> None:
    """Write the picture; a stage of the engine that contains another is drawn first, below it."""
    ranks = sorted({each["pid"] for each in events})
    with picture(path, 7.2, 0.9 + 0.42 * len(ranks)) as figure:
        axes: Axes = figure.subplots()
        for each in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            row = 2.4 * ranks.index(each["pid"]) + each["tid"]
            bar = [(each["ts"] / 1e6, each["dur"] / 1e6)]
            axes.broken_barh(bar, (row, HEIGHT), color=COLORS[each["name"]], linewidth=0)
        rows = {
            f"rank {rank}, {name}": 2.4 * place + thread
            for place, rank in enumerate(ranks)
            for thread, name in enumerate(THREADS)
        }
        axes.set_yticks([row + HEIGHT / 2 for row in rows.values()], list(rows))
        axes.invert_yaxis()
        axes.set_xlabel("s")
        drawn = {each["name"] for each in events}
        legend(figure, {name.replace("_", " "): color for name, color in COLORS.items() if name in drawn})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(spans(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]))
