"""What all pictures share: a style, colours, and what is written above a bar."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# Okabe and Ito's palette; all-reduces, whose stages are not measured, are grey.
STAGES = {"select": "#0072b2", "intra": "#56b4e9", "inter": "#d55e00", "combine": "#009e73"}
WAITING, WHOLE = "#dcdcdc", "#6e6e6e"

# The most of a picture's width: the viewer's font may be wider.
LEGEND_SHARE = 0.95

# Text stays text, and elements have the same names in every run.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "cloudtrain", "font.size": 8, "axes.titlesize": 9}


@contextmanager
def picture(path: Path, width: float, height: float, fingerprint: str) -> Iterator[Figure]:
    """Yield a figure of this size in inches; it is saved when the block ends.

    ``fingerprint``: of the records, which the file has among its metadata.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": fingerprint})


def open_up(axes: Axes) -> None:
    """Leave out the lines above and to the right, and the ticks of what are no numbers."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)


def name_rows(rows: npt.NDArray[Any], names: Sequence[str]) -> None:
    """Label the y axis of the first axes of each row."""
    for axes, name in zip(rows[:, 0], names, strict=True):
        axes.set_ylabel(name)
        axes.margins(y=0.1)  # for what is written above the bars


def legend(figure: Figure, colors: Mapping[str, str]) -> None:
    """Say below all axes what each colour is, in as few rows as fit into the figure's width."""
    patches = [Patch(color=color, label=name) for name, color in colors.items()]
    for rows in range(1, len(patches) + 1):
        columns = -(-len(patches) // rows)
        below = figure.legend(handles=patches, loc="outside lower center", ncols=columns, frameon=False)
        if below.get_window_extent().width <= LEGEND_SHARE * figure.bbox.width:
            return
        below.remove()
    raise ValueError(
        f"expected a figure as wide as each of {', '.join(colors)}, got {figure.bbox.width:g} px"
    )


def note(axes: Axes, place: float, height: float, text: str) -> None:
    """Write above a bar."""
    axes.annotate(text, (place, height), (0, 2), textcoords="offset points", ha="center", fontsize=6)
