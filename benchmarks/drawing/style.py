"""The style of all pictures: colours, legends, and numbers above bars."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# That of reports: all other pictures have it, too.
from training.report.style import LOOP_STAGES, PALETTE, STAGES, STYLE, WAITING, WHOLE, open_up  # noqa: F401

# The most of a picture's width: the viewer's font may be wider.
LEGEND_SHARE = 0.95

OPEN = {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
DOCS_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "commlib", "font.size": 9}


@contextmanager
def picture(
    path: Path,
    width: float,
    height: float,
    fingerprint: str | None = None,
    *,
    style: Mapping[str, Any] = STYLE,
    layout: str | None = "constrained",
) -> Iterator[Figure]:
    """Yield a figure of this size in inches; it is saved when the block ends, equal numbers as equal bytes.

    ``fingerprint``: of the records, which the file has among its metadata.
    """
    with matplotlib.rc_context({**OPEN, **style}):
        figure = Figure(figsize=(width, height), facecolor="white", layout=layout)
        yield figure
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": fingerprint})


@contextmanager
def docs_picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield a figure for a page of docs/."""
    with picture(path, width, height, style=DOCS_STYLE, layout=None) as figure:
        yield figure
        figure.tight_layout()


def name_row(axes: Axes, name: str) -> None:
    """Label the y axis of the first axes of a row of bars."""
    axes.set_ylabel(name)
    axes.margins(y=0.1)  # for the numbers above the bars


def legend(figure: Figure, colors: Mapping[str, str]) -> None:
    """Explain the colours below all axes, in as few rows as fit into the figure's width."""
    patches = [Patch(color=color, label=name) for name, color in colors.items()]
    for rows in range(1, len(patches) + 1):
        columns = -(-len(patches) // rows)
        below = figure.legend(handles=patches, loc="outside lower center", ncols=columns)
        if below.get_window_extent().width <= LEGEND_SHARE * figure.bbox.width:
            return
        below.remove()
    raise ValueError(
        f"expected a figure as wide as each of {', '.join(colors)}, got {figure.bbox.width:g} px"
    )


def note(axes: Axes, place: float, height: float, text: str) -> None:
    axes.annotate(text, (place, height), (0, 2), textcoords="offset points", ha="center", fontsize=6)
