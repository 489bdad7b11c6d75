"""Charts as figures of matplotlib, on white; :mod:`training.report.svg` makes of them what a page shows."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from training.report.curves import Chart, Curve, Point, boundaries
from training.report.run import Run
from training.report.style import PALETTE, STYLE, WAITING, WHOLE, open_up
from training.report.texts import duration, plain

Axis = Literal["steps", "time"]
WIDTH, HEIGHT = 5.2, 2.5  # inches
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
COLORS = len(PALETTE) - 1  # of runs; black is for axes
MOST_RUNS = len(DASHES) * COLORS  # that can be told apart
MOST_NAMED_PHASES, MOST_DOTS = 4, 40
LOG_FROM = 10  # the largest value over the smallest
POINTS_AN_INCH = 72  # of an SVG
# Names of runs are no mathematics.
OWN_STYLE: dict[Any, Any] = {**STYLE, "text.parse_math": False, "axes.formatter.useoffset": False}


def color(run: int) -> str:
    """Return the colour of a run."""
    return PALETTE[run % COLORS]


def dashes(run: int) -> Any:
    """Return how its lines are dashed."""
    return DASHES[run // COLORS % len(DASHES)]


@dataclass(frozen=True)
class Spot:
    """A point of a curve in a figure, from its top left in points; ``text``: what it says."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Picture:
    """A figure, and what can be pointed at in it, by the curve: the number of its run, and its label."""

    figure: Figure
    spots: Sequence[tuple[int, str, Sequence[Spot]]] = ()


@contextmanager
def styled() -> Iterator[None]:
    """Draw and save figures in our style."""
    with matplotlib.rc_context(OWN_STYLE), warnings.catch_warnings():
        # Of letters that the font has not, and of numbers so long that they leave no room for a chart.
        warnings.simplefilter("ignore", UserWarning)
        yield


def drawn(chart: Chart, runs: Sequence[Run], axis: Axis) -> Picture:
    """Return a chart over steps or time."""
    figure = Figure(figsize=(WIDTH, HEIGHT), facecolor="white", layout="constrained")
    axes, x = figure.subplots(), _X.of(runs, axis)
    values = [point.value for curve in chart.curves for point in curve.points if point.value > 0]
    is_log = chart.log and max(values) >= LOG_FROM * min(values)
    curves = [
        replace(each, points=[point for point in each.points if point.value > 0 or not is_log])
        for each in chart.curves
    ]
    for curve in curves:
        _draw(axes, curve, x)
    if is_log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: chart.shown(value)))
    if chart.goal is not None:
        axes.axhline(chart.goal, color=WHOLE, linewidth=0.8, linestyle=(0, (2, 2)))
        place = axes.get_yaxis_transform()
        axes.annotate("target", (1, chart.goal), (0, 2), place, "offset points", ha="right", color=WHOLE)
    _mark_phases(axes, runs, x)
    axes.set_xlim(left=0)
    axes.set_xlabel(x.label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axes.grid(axis="y", color=WAITING, linewidth=0.5)
    axes.set_axisbelow(True)
    open_up(axes)
    lay_out(figure)  # only now points have their places
    spots = [(curve.run, curve.label, _spots(figure, axes, curve, chart, x)) for curve in curves]
    return Picture(figure, [each for each in spots if each[2]])


def lay_out(figure: Figure) -> None:
    """Lay a figure out once, instead of whenever it is saved."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


@dataclass(frozen=True)
class _X:
    """The horizontal axis: steps, or time in a unit of so many seconds."""

    axis: Axis
    unit: float
    label: str

    @classmethod
    def of(cls, runs: Sequence[Run], axis: Axis) -> "_X":
        longest = max(run.seconds for run in runs)
        if axis == "steps":
            return cls(axis, 1.0, "steps")
        for seconds, unit in ((3600.0, "hours"), (60.0, "minutes")):
            if longest >= 2 * seconds:
                return cls(axis, seconds, f"{unit} of training")
        return cls(axis, 1.0, "seconds of training")

    def place(self, point: Point) -> float:
        return (point.end if self.axis == "steps" else point.seconds) / self.unit


def _draw(axes: Axes, curve: Curve, x: _X) -> None:
    count = len(curve.points)
    has_dots = curve.points and curve.points[0].epoch is not None and count <= MOST_DOTS and not curve.stepped
    axes.plot(
        [x.place(point) for point in curve.points],
        [point.value for point in curve.points],
        color=color(curve.run),
        linestyle=(0, (2, 2)) if curve.dashed else dashes(curve.run),
        linewidth=0.8 if curve.faint or curve.dashed else 1.4,
        alpha=0.4 if curve.faint else None,
        marker="o" if has_dots or count == 1 else None,  # one point would not be seen without
        markersize=2.8,
    )


def _mark_phases(axes: Axes, runs: Sequence[Run], x: _X) -> None:
    """Draw where phases begin; name them where there is one run of few phases."""
    for place, run in enumerate(runs):
        begins = boundaries(run)
        line = WHOLE if len(runs) == 1 else color(place)
        for phase, point in begins:
            axes.axvline(x.place(point), color=line, linewidth=0.7, linestyle=(0, (1, 2)))
            if len(runs) == 1 and len(begins) < MOST_NAMED_PHASES:
                name = f"phase {phase.number + 1}" + (f": {phase.reducer}" if phase.reducer else "")
                above = axes.get_xaxis_transform()
                axes.annotate(name, (x.place(point), 1), (2, 1), above, "offset points", color=WHOLE)


def _spots(figure: Figure, axes: Axes, curve: Curve, chart: Chart, x: _X) -> list[Spot]:
    data = np.array([(x.place(point), point.value) for point in curve.points]).reshape(-1, 2)
    places = axes.transData.transform(data) * POINTS_AN_INCH / figure.dpi
    height = POINTS_AN_INCH * figure.get_figheight()
    return [
        Spot(round(left, 1), round(height - above, 1), f"{chart.shown(point.value)} {_where(point, x.axis)}")
        for (left, above), point in zip(places.tolist(), curve.points, strict=True)
    ]


def _where(point: Point, axis: Axis) -> str:
    """Return the place of a point as texts say it."""
    at = f"step {point.end:,.0f}" if axis == "steps" else duration(point.seconds)
    return f"at {at}" if point.epoch is None else f"at {at}, epoch {point.epoch + 1}"


def complete(figure: Figure, title: str, runs: Sequence[Run]) -> None:
    """Put a title over a figure and a legend of runs below it, for a file of its own; a page has both."""
    figure.set_layout_engine("constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=9)
    if len(runs) == 1:
        return
    handles = [Line2D([], [], color=color(place), linestyle=dashes(place)) for place, _ in enumerate(runs)]
    legend = figure.legend(handles, [""] * len(runs), loc="outside lower left", frameon=False, ncols=1)
    for label, run in zip(legend.get_texts(), runs, strict=True):
        label.set_text(run.name)  # as a label, one that begins with "_" would be left out
