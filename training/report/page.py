"""The page of a report: one file that needs no network, and may not reach one."""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from commlib import __version__
from training.report import drawing, facts, tables
from training.report.curves import Chart, charts
from training.report.drawing import Axis, Picture
from training.report.html import Html, joined, table, tag
from training.report.run import Run
from training.report.stage_charts import stages
from training.report.svg import inline, png
from training.report.texts import NOTHING, duration

AXES: dict[Axis, str] = {"steps": "over steps", "time": "over time"}
# Also a name or a value that should not be text after all could load and run nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{}'; form-action 'none'"


class Page:
    """A report on runs. ``text``: the page; ``pictures``: its charts over steps, PNG by their names."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self.pictures: dict[str, bytes] = {}
        with drawing.styled():
            self.text = self._page()

    def _page(self) -> str:
        runs = self._runs
        title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag(
                "meta", http_equiv="Content-Security-Policy", content=POLICY.format(_digest(_file("page.js")))
            ),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="generator", content=f"cloudtrain {__version__}"),
            tag("title", f"{title} – cloudtrain"),
            tag("style", Html(_file("page.css"))),
        )
        several = [tag("p", "Curves of the same kind share their axes; colours tell runs apart.")]
        body = tag(
            "body",
            tag("h1", title, *([] if len(runs) > 1 else [_state(runs[0])])),
            *(several if len(runs) > 1 else []),
            *(_card(place, run, is_named=len(runs) > 1) for place, run in enumerate(runs)),
            *self._curves(),
            *self._stages(),
            *_tables(runs),
            tag("script", Html(_file("page.js"))),
        )
        return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"

    # ---------------------------------------------------------------------------------------------- pictures

    def _curves(self) -> Iterator[Html]:
        runs, found = self._runs, charts(self._runs)
        yield tag("h2", "Curves")
        if not found:
            yield tag("p", "No step was recorded yet.")
            return
        for axis in AXES:
            checked = {"checked": ""} if axis == "steps" else {}
            yield tag("input", type="radio", name="axis", id=f"by-{axis}", **checked)
        labels = [tag("label", words, for_=f"by-{axis}") for axis, words in AXES.items()]
        keys = [_key(place, run) for place, run in enumerate(runs)] if len(runs) > 1 else []
        yield tag("div", *labels, *keys, class_="switch")
        figures = [self._figure(chart, axis) for chart in found for axis in AXES]
        yield tag("div", *figures, class_="charts")

    def _figure(self, chart: Chart, axis: Axis) -> Html:
        picture = drawing.drawn(chart, self._runs, axis)
        names = ", ".join(run.name for run in self._runs)
        content = inline(picture.figure, f"{chart.name}-{axis}", f"{chart.title}, {AXES[axis]}: {names}")
        if axis == "steps":
            drawing.complete(picture.figure, chart.title, self._runs)
            self.pictures[chart.name] = png(picture.figure)
        extra = sorted({curve.label for curve in chart.curves if curve.label and curve.points})
        note = tag("small", f" – {'faint' if chart.name == 'loss' else 'dashed'}: {', '.join(extra)}")
        caption = tag("figcaption", chart.title, *([note] if extra else []))
        return tag("figure", caption, content, class_=f"of-{axis}", data_curves=self._data(picture))

    def _data(self, picture: Picture) -> str:
        """Return the points of curves as the script reads them."""
        return json.dumps(
            [
                [_color(run), self._spoken(run, label), [[spot.x, spot.y, spot.text] for spot in spots]]
                for run, label, spots in picture.spots
                if spots
            ],
            separators=(",", ":"),
        )

    def _spoken(self, run: int, label: str) -> str:
        name = self._runs[run].name if len(self._runs) > 1 else ""
        return ", ".join(each for each in (name, label) if each)

    def _stages(self) -> Iterator[Html]:
        pictures = [(place, run, stages(run)) for place, run in enumerate(self._runs)]
        shown = [(place, run, picture) for place, run, picture in pictures if picture is not None]
        if not shown:
            return
        yield tag("h2", "Where the time of a step goes")
        yield tag(
            "p",
            "Means over the steps of an epoch and all ranks. Without overlap the exchange is a part of the "
            "loop's exchange wait; where buckets overlap, it passes beside the loop.",
        )
        for place, run, picture in shown:
            name = "stages" if len(self._runs) == 1 else f"stages-{place + 1}"
            content = inline(picture.figure, name, f"Seconds of a step by stage and epoch: {run.name}")
            drawing.complete(picture.figure, run.name, [run])
            self.pictures[name] = png(picture.figure)
            yield tag("figure", *([tag("figcaption", run.name)] if len(self._runs) > 1 else []), content)


def _color(run: int) -> str:
    """Return the colour of a run as page.css names it."""
    return f"var(--run-{run % drawing.COLORS})"


def _key(place: int, run: Run) -> Html:
    """Return the line and the name of a run, for the legend."""
    dashes = drawing.dashes(place)
    pattern = {} if dashes == "-" else {"stroke_dasharray": " ".join(f"{2 * each:g}" for each in dashes[1])}
    color = _color(place)
    line = tag("line", x1="0", x2="36", y1="6", y2="6", stroke=color, stroke_width="3", **pattern)
    return tag("span", tag("svg", line, viewBox="0 0 36 12", aria_hidden="true"), run.name, class_="key")


def _state(run: Run) -> Html:
    state = facts.state(run)
    return tag("span", state, class_="state ended" if state in facts.ENDED else "state")


def _card(place: int, run: Run, *, is_named: bool) -> Html:
    tiles = [
        tag("div", tag("dt", name), tag("dd", value, tag("small", more)))
        for name, value, more in facts.tiles(run)
    ]
    return tag(
        "section",
        *([tag("h2", run.name, _state(run))] if is_named else []),
        tag("dl", *tiles, class_="tiles"),
        class_="run",
        style=f"border-color: {_color(place)}",
    )


# -------------------------------------------------------------------------------------------------- tables


def _tables(runs: Sequence[Run]) -> Iterator[Html]:
    yield tag("h2", "Facts")
    columns = [facts.facts(run) for run in runs]
    header = [""] + ([run.name for run in runs] if len(runs) > 1 else [""])
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    told = [row for row in rows if any(each != NOTHING for each in row[1:])]
    yield table(header, told, class_="facts")
    yield from _each(runs, "Phases", _phases)
    yield from _each(runs, "Samples read, by level", _reads)
    yield from _each(runs, "What happened", _events)
    yield from _each(runs, "Epochs", _epochs)


def _each(runs: Sequence[Run], title: str, of_run: Callable[[Run], Html | None]) -> Iterator[Html]:
    """Yield a section with what there is of each run."""
    found = [(run, content) for run in runs if (content := of_run(run)) is not None]
    if found:
        yield tag("h2", title)
    for run, content in found:
        yield joined(*([tag("h3", run.name)] if len(runs) > 1 else []), content)


def _phases(run: Run) -> Html | None:
    if not run.phases:
        return None
    header, rows = tables.phases(run)
    note = (
        "Exchange: time of a step in the reducer, median of epochs; waiting for later ranks is a part of it."
    )
    more = " Predicted: what auto expected when it chose the reducer, without such waiting."
    told = tag("p", note + (more if run.all_of("choice") else ""))
    return joined(table(header, rows), *([told] if tables.EXCHANGE in header else []))


def _reads(run: Run) -> Html | None:
    rows = [[name, f"{count:,}", f"{share:.1%}", _bar(share)] for name, count, share in tables.reads(run)]
    return table(["level", "samples", "share", ""], rows) if rows else None


def _bar(share: float) -> Html:
    return tag("div", tag("div", class_="part", style=f"width: {share:.1%}"), class_="bar")


def _events(run: Run) -> Html | None:
    rows = [[duration(seconds), f"{step:,}", words] for seconds, step, words in tables.events(run)]
    return table(["after", "step", ""], rows, class_="events") if rows else None


def _epochs(run: Run) -> Html | None:
    header, rows = tables.epochs(run)
    return table(header, rows) if rows else None


# -------------------------------------------------------------------------------------------------- its files


@cache
def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
