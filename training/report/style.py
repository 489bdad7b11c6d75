"""The style of all pictures of the project: colours that the colour-blind can tell apart, and fonts."""

from typing import Any

from matplotlib.axes import Axes

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")  # Okabe and Ito's
# All-reduces, whose stages are not measured, are grey.
WAITING, WHOLE = "#dcdcdc", "#6e6e6e"
# The stages of a step, in their order: of the loop, and of the exchange inside it or beside it.
LOOP_STAGES = {
    "data_wait": PALETTE[1],
    "forward_backward": PALETTE[3],
    "exchange_wait": WAITING,
    "norms": PALETTE[6],
    "update": PALETTE[5],
}
STAGES = {"select": PALETTE[0], "intra": PALETTE[4], "inter": PALETTE[1], "combine": PALETTE[2]}

# Text stays text, and elements have the same names in every run.
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cloudtrain",
    "font.size": 8,
    "axes.titlesize": 9,
}


def open_up(axes: Axes) -> None:
    """Hide the top and right spines, and the tick marks of the x axis."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
