"""Where the time of a step goes, as a figure: the stages of the loop, and those of the exchange."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from training.report.drawing import HEIGHT, WIDTH, Picture, lay_out
from training.report.reading import mapping
from training.report.run import Run
from training.report.style import LOOP_STAGES, STAGES, WHOLE, open_up

OUTLIER = 4  # times the median of epochs


def stages(run: Run) -> Picture | None:
    """Return where the time of a step goes, epoch by epoch: in the loop, and in the exchange."""
    epochs = [epoch for epoch in run.epochs if mapping(epoch.record.get("stage_seconds"))]
    if not epochs:
        return None
    figure = Figure(figsize=(2 * WIDTH, HEIGHT), facecolor="white", layout="constrained")
    exchanges = any(epoch.stage(name) for epoch in epochs for name in STAGES)
    panels = figure.subplots(1, 2, squeeze=False)[0]
    edges = [epoch.number + 0.5 for epoch in epochs] + [epochs[-1].number + 1.5]
    if any(after - before != 1 for before, after in zip(edges, edges[1:], strict=False)):
        edges = [place + 0.5 for place in range(len(epochs) + 1)]  # lines of some are missing
    titles = ("The loop, ms a step", "The exchange, ms a step")
    for axes, colors, title in zip(panels, (LOOP_STAGES, STAGES), titles, strict=True):
        if colors is STAGES and not exchanges:
            axes.axis("off")  # on one rank nothing is exchanged
            continue
        _stack(axes, edges, [[1e3 * epoch.stage(name) for epoch in epochs] for name in colors], colors)
        axes.set_title(title, loc="left", pad=14)  # above the heights of what is cut off
    whole = [1e3 * (epoch.a_step("train_seconds") or 0.0) for epoch in epochs]
    panels[0].stairs(whole, edges, color=WHOLE, linewidth=0.8, baseline=None)
    _explain(panels[0], {**LOOP_STAGES, "whole step": None})
    lay_out(figure)
    return Picture(figure)


def _stack(
    axes: Axes, edges: Sequence[float], rows: Sequence[Sequence[float]], colors: dict[str, str]
) -> None:
    below = np.zeros(len(edges) - 1)
    _cut(axes, edges, np.sum(rows, axis=0))
    for row, one in zip(rows, colors.values(), strict=True):
        axes.stairs(below + row, edges, baseline=below, fill=True, color=one, linewidth=0)
        below = below + row
    axes.set_xlim(edges[0], edges[-1])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.set_xlabel("epoch")
    _explain(axes, dict(colors))
    open_up(axes)


def _cut(axes: Axes, edges: Sequence[float], heights: npt.NDArray[Any]) -> None:
    """Cut off epochs that are far above the others, as a first one can be, and say how high they are."""
    usual = OUTLIER * np.median(heights) or np.inf
    axes.set_ylim(0, 1.1 * heights[heights <= usual].max() or None)
    for begin, height in zip(edges, heights, strict=False):
        if height > usual:
            above = axes.get_xaxis_transform()
            axes.annotate(f"↑ {height:,.4g}", (begin, 1), (0, 1), above, "offset points", fontsize=7)


def _explain(axes: Axes, colors: dict[str, str | None]) -> None:
    """Put a legend beside the axes, in the order of the stack; a line for what has no colour."""
    handles = [
        Line2D([], [], color=WHOLE, linewidth=0.8, label=name)
        if one is None
        else Patch(color=one, label=name.replace("_", " "))
        for name, one in reversed(colors.items())
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=7)
