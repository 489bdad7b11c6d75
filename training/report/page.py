"""The page of a report and its charts: one file that needs no network, and may not reach one.

Charts are figures of matplotlib on white, as PNG files, and as SVG in the colours of the page.
"""

import base64
import hashlib
import io
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import numpy.typing as npt
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from commlib import __version__
from commlib.errors import InvalidArgument
from commlib.rounds import Schedule
from datacache.escaping import escaped
from training.config.reading import mapping
from training.report import facts
from training.report.curves import Chart, Curve, Point, boundaries, charts
from training.report.run import Epoch, Phase, Run, whole
from training.report.style import LOOP_STAGES, PALETTE, STAGES, STYLE, WAITING, WHOLE, open_up
from training.report.texts import duration, plain

Axis = Literal["steps", "time"]
WIDTH, HEIGHT = 5.2, 2.5  # inches
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
# The colour and the dashes of each run; black is for axes.
LOOKS: list[tuple[str, Any]] = [(color, dashes) for dashes in DASHES for color in PALETTE[:-1]]
MOST_RUNS = len(LOOKS)  # that can be told apart
MOST_NAMED_PHASES, MOST_DOTS = 4, 40
LOG_FROM = 10  # the largest value over the smallest
POINTS_AN_INCH = 72  # of an SVG
OUTLIER = 4  # times the median of epochs
MOST_FRAGMENTS = 100  # that are drawn
INSTANT = 0.2  # steps, of the bar of an exchange that replicas wait for
PNG_DPI = 150
_COLOR = re.compile(r"#[0-9a-f]{6}")
# Names of colours in page.css, which are others on a dark screen.
_NAMES = {each: f"var(--run-{place})" for place, each in enumerate(PALETTE[:-1])}
_NAMES |= {PALETTE[-1]: "currentColor", WAITING: "var(--line)", WHOLE: "var(--quiet)"}
# Of an SVG of matplotlib: what has a colour; metadata, and ids that nothing uses; attributes of the root.
_STYLE = re.compile('style="[^"]*"')
_SURPLUS = re.compile('<metadata>.*?</metadata>|(?<=<g) id="[^"]*"', re.DOTALL)
_SIZE = re.compile(' ?(width|height|version)="[^"]*"')
# Names of runs are plain text: a ``$`` begins no formula.
OWN_STYLE: dict[Any, Any] = {**STYLE, "text.parse_math": False, "axes.formatter.useoffset": False}


def _page_color(run: int) -> str:
    return _NAMES[LOOKS[run][0]]


def drawn(chart: Chart, runs: Sequence[Run], axis: Axis) -> tuple[Figure, list[Any]]:
    """Return a chart over steps or time, and its curves as the script reads them.

    Of each curve: its colour, its name and its points. Of each point: the place, in points of an SVG from
    the figure's top left, and a text.
    """
    figure, x = _figure(WIDTH), _X.of(runs, axis)
    axes = figure.subplots()
    values = [point.value for curve in chart.curves for point in curve.points if point.value > 0]
    is_log = chart.log and max(values, default=0.0) >= LOG_FROM * min(values, default=1.0)
    curves = [
        replace(curve, points=[point for point in curve.points if point.value > 0 or not is_log])
        for curve in chart.curves
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
    _lay_out(figure)  # only now points have their places
    described = []
    for curve in curves:
        if curve.points:
            name = runs[curve.run].name if len(runs) > 1 else ""
            words = ", ".join(filter(None, (name, curve.label)))
            described.append((_page_color(curve.run), words, _spots(figure, axes, curve, chart, x)))
    return figure, described


def _figure(width: float) -> Figure:
    return Figure(figsize=(width, HEIGHT), facecolor="white", layout="constrained")


def _lay_out(figure: Figure) -> None:
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
    color, dashes = LOOKS[curve.run]
    has_dots = curve.points and curve.points[0].epoch is not None and count <= MOST_DOTS and not curve.stepped
    axes.plot(
        [x.place(point) for point in curve.points],
        [point.value for point in curve.points],
        color=color,
        linestyle=(0, (2, 2)) if curve.dashed else dashes,
        linewidth=0.8 if curve.faint or curve.dashed else 1.4,
        alpha=0.4 if curve.faint else None,
        marker="o" if has_dots or count == 1 else None,  # one point would not be seen without
        markersize=2.8,
    )


def _mark_phases(axes: Axes, runs: Sequence[Run], x: _X) -> None:
    """Draw where phases begin; name them where there is one run of few phases."""
    for place, run in enumerate(runs):
        begins = boundaries(run)
        line = WHOLE if len(runs) == 1 else LOOKS[place][0]
        for phase, point in begins:
            axes.axvline(x.place(point), color=line, linewidth=0.7, linestyle=(0, (1, 2)))
            if len(runs) == 1 and len(begins) < MOST_NAMED_PHASES:
                name = f"phase {phase.number + 1}" + (f": {phase.reducer}" if phase.reducer else "")
                above = axes.get_xaxis_transform()
                axes.annotate(name, (x.place(point), 1), (2, 1), above, "offset points", color=WHOLE)


def _spots(figure: Figure, axes: Axes, curve: Curve, chart: Chart, x: _X) -> list[tuple[float, float, str]]:
    data = np.array([(x.place(point), point.value) for point in curve.points])
    places = axes.transData.transform(data) * POINTS_AN_INCH / figure.dpi
    height = POINTS_AN_INCH * figure.get_figheight()
    return [
        (round(left, 1), round(height - above, 1), f"{chart.shown(point.value)} {_where(point, x.axis)}")
        for (left, above), point in zip(places.tolist(), curve.points, strict=True)
    ]


def _where(point: Point, axis: Axis) -> str:
    at = f"step {point.end:,.0f}" if axis == "steps" else duration(point.seconds)
    return f"at {at}" if point.epoch is None else f"at {at}, epoch {point.epoch + 1}"


# -------------------------------------------------------------------------------- the stages of a step


def stages(run: Run) -> Figure | None:
    """Return where the time of a step goes, epoch by epoch: in the loop, and in the exchange."""
    epochs = [epoch for epoch in run.epochs if mapping(epoch.record.get("stage_seconds"))]
    if not epochs:
        return None
    figure = _figure(2 * WIDTH)
    exchanges = any(epoch.stage(name) for epoch in epochs for name in STAGES)
    panels = figure.subplots(1, 2, squeeze=False)[0]
    edges = [epoch.number + 0.5 for epoch in epochs] + [epochs[-1].number + 1.5]
    if any(after - before != 1 for before, after in pairwise(edges)):
        edges = [place + 0.5 for place in range(len(epochs) + 1)]  # lines of some are missing
    for axes, what, colors in zip(panels, ("loop", "exchange"), (LOOP_STAGES, STAGES), strict=True):
        if colors is STAGES and not exchanges:
            axes.axis("off")  # on one rank nothing is exchanged
            continue
        _stack(axes, edges, epochs, colors)
        if colors is LOOP_STAGES:
            whole = [1e3 * (epoch.a_step("train_seconds") or 0.0) for epoch in epochs]
            axes.stairs(whole, edges, color=WHOLE, linewidth=0.8, baseline=None, label="whole step")
        axes.set_title(f"The {what}, ms a step", loc="left", pad=14)  # above the heights of what is cut off
        # Beside the axes, in the order of the stack.
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=7, reverse=True)
    _lay_out(figure)
    return figure


def _stack(axes: Axes, edges: Sequence[float], epochs: Sequence[Epoch], colors: dict[str, str]) -> None:
    rows = [[1e3 * epoch.stage(name) for epoch in epochs] for name in colors]
    below = np.zeros(len(epochs))
    _cut(axes, edges, np.sum(rows, axis=0))
    for row, (stage, color) in zip(rows, colors.items(), strict=True):
        name = stage.replace("_", " ")
        axes.stairs(below + row, edges, baseline=below, fill=True, color=color, linewidth=0, label=name)
        below = below + row
    axes.set_xlim(edges[0], edges[-1])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.set_xlabel("epoch")
    open_up(axes)


def _cut(axes: Axes, edges: Sequence[float], heights: npt.NDArray[Any]) -> None:
    """Cut off epochs that are far above the others, as a first one can be, and say how high they are."""
    usual = OUTLIER * np.median(heights) or np.inf
    axes.set_ylim(0, 1.1 * heights[heights <= usual].max() or None)
    for begin, height in zip(edges, heights, strict=False):
        if height > usual:
            above = axes.get_xaxis_transform()
            axes.annotate(f"↑ {height:,.4g}", (begin, 1), (0, 1), above, "offset points", fontsize=7)


# ------------------------------------------------------------------------------- fragments of local steps


def rounds(run: Run) -> Figure | None:
    """Return when fragments are exchanged in a round, a panel for each phase with fragments or a delay."""
    found = [(phase.number, schedule) for phase in run.phases if (schedule := _schedule(phase))]
    if not (found := found[:MOST_NAMED_PHASES]):
        return None
    figure = _figure(2 * WIDTH)
    for axes, (number, schedule) in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        for turn in range(1, schedule.fragments + 1):
            step = turn * schedule.interval
            fragment, steps = schedule.leaving(step) or 0, schedule.delay or INSTANT
            axes.broken_barh([(step, steps)], (fragment + 0.6, 0.8), color=STAGES["inter"], linewidth=0)
        steps_of_delay = f", under way for {schedule.delay} steps" if schedule.delay else ""
        axes.set_title(f"Phase {number + 1}: H = {schedule.steps}{steps_of_delay}", loc="left")
        axes.set_ylim(schedule.fragments + 0.5, 0.5)
        axes.set_xlim(0, schedule.steps + schedule.interval)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.set_ylabel("fragment")
        axes.set_xlabel("local steps")
        open_up(axes)
    _lay_out(figure)
    return figure


def _schedule(phase: Phase) -> Schedule | None:
    """Return when fragments are exchanged, unless all weights are at once or the configuration is damaged."""
    outer = mapping(phase.config.get("outer"))
    steps = whole(phase.choice, "local_steps") or whole(phase.config, "local_steps")
    fragments, delay = whole(outer, "fragments") or 1, whole(outer, "delay") or 0
    if not steps or (fragments == 1 and delay == 0) or fragments > MOST_FRAGMENTS:
        return None
    with suppress(InvalidArgument):
        return Schedule(steps, fragments, delay)
    return None


# ------------------------------------------------------------------------------------------------ files


def png(figure: Figure, title: str, runs: Sequence[Run]) -> bytes:
    """Return a figure as a picture on white, with a title over it and a legend of several runs below it."""
    figure.set_layout_engine("constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=9)
    if len(runs) > 1:
        _add_legend(figure, runs)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return file.getvalue()


def _add_legend(figure: Figure, runs: Sequence[Run]) -> None:
    handles = [Line2D([], [], color=color, linestyle=dashes) for color, dashes in LOOKS[: len(runs)]]
    legend = figure.legend(handles, [""] * len(runs), loc="outside lower left", frameon=False, ncols=1)
    for label, run in zip(legend.get_texts(), runs, strict=True):
        label.set_text(run.name)  # as a label, one that begins with "_" would be left out


def inline(figure: Figure, name: str, title: str) -> Markup:
    """Return a figure as an SVG element of a page; each figure has another ``name``, which is one word."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):  # ids that are used are unique in the page
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    _, _, element = file.getvalue().partition("<svg ")
    element = _STYLE.sub(lambda style: _COLOR.sub(_by_name, style[0]), _SURPLUS.sub("", element))
    head, _, content = element.partition(">")
    begin = Markup('<svg {} role="img" aria-labelledby="{}-title"><title id="{}-title">{}</title>')
    return begin.format(Markup(_SIZE.sub("", head)), name, name, escaped(title)) + Markup(content)


def _by_name(color: re.Match[str]) -> str:
    return _NAMES.get(color[0], color[0])


HERE = Path(__file__).parent
AXES: Mapping[Axis, str] = {"steps": "over steps", "time": "over time"}
TABLES = {
    "Phases": facts.phases,
    "Samples read, by level": facts.reads,
    "What happened": facts.events,
    "Epochs": facts.epochs,
}
# Names of runs and files may be hostile: markup in them is escaped, control characters too.
TEMPLATES = Environment(
    loader=FileSystemLoader(HERE),
    autoescape=True,
    trim_blocks=True,
    finalize=lambda value: value if isinstance(value, Markup) else escaped(str(value)),
)


class Page:
    """A report on runs. ``text``: the page; ``pictures``: its charts over steps, PNG by their names."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self.pictures: dict[str, bytes] = {}
        style, script = ((HERE / name).read_text() for name in ("page.css", "page.js"))
        sections = {
            title: [(run.name, table) for run in runs if (table := of(run)).rows]
            for title, of in TABLES.items()
        }
        with matplotlib.rc_context(OWN_STYLE), warnings.catch_warnings():
            # Warnings of glyphs that the font lacks, and of numbers so long that no room is left for a chart.
            warnings.simplefilter("ignore", UserWarning)
            self.text = TEMPLATES.get_template("page.html").render(
                title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
                several=len(runs) > 1,
                version=__version__,
                style=Markup(style),
                script=Markup(script),
                digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
                runs=[_card(place, run) for place, run in enumerate(runs)],
                axes=AXES,
                charts=[self._chart(chart, axis) for chart in charts(runs) for axis in AXES],
                stages=list(self._pictures(stages, "Seconds of a step by stage and epoch")),
                rounds=list(self._pictures(rounds, "Exchanges of fragments in a round")),
                facts=facts.facts_of(runs),
                sections=sections,
            )

    def _chart(self, chart: Chart, axis: Axis) -> dict[str, Any]:
        figure, curves = drawn(chart, self._runs, axis)
        names = ", ".join(run.name for run in self._runs)
        svg = inline(figure, f"{chart.name}-{axis}", f"{chart.title}, {AXES[axis]}: {names}")
        if axis == "steps":
            self.pictures[chart.name] = png(figure, chart.title, self._runs)
        labels = sorted({curve.label for curve in chart.curves if curve.label and curve.points})
        note = f"{'faint' if chart.name == 'loss' else 'dashed'}: {', '.join(labels)}" if labels else ""
        data = json.dumps(curves, separators=(",", ":"))
        return {"axis": axis, "title": chart.title, "note": note, "svg": svg, "data": data}

    def _pictures(self, draw: Callable[[Run], Figure | None], title: str) -> Iterator[tuple[str, Markup]]:
        """Yield the name of each run of which there is something to draw, and the picture."""
        for place, run in enumerate(self._runs, 1):
            if (figure := draw(run)) is not None:
                name = draw.__name__ if len(self._runs) == 1 else f"{draw.__name__}-{place}"
                yield run.name, inline(figure, name, f"{title}: {run.name}")
                self.pictures[name] = png(figure, run.name, [run])


def _card(place: int, run: Run) -> dict[str, Any]:
    pattern, state = LOOKS[place][1], facts.state(run)
    return {
        "name": run.name,
        "color": _page_color(place),
        "dashes": "none" if pattern == "-" else " ".join(f"{2 * each:g}" for each in pattern[1]),
        "state": state,
        "has_ended": state in facts.ENDED,
        "tiles": list(facts.tiles(run)),
    }
