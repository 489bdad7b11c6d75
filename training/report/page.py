"""The page of a report: one file that needs no network, and may not reach one."""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from commlib import __version__
from datacache.escaping import escaped
from training.report import drawing, facts
from training.report.curves import Chart, charts
from training.report.drawing import Axis, Picture
from training.report.run import Run

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
        sections = {title: [(run.name, of(run)) for run in runs] for title, of in TABLES.items()}
        with drawing.styled():
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
                stages=list(self._stages()),
                facts=facts.facts_of(runs),
                sections={title: [pair for pair in all_ if pair[1].rows] for title, all_ in sections.items()},
            )

    def _chart(self, chart: Chart, axis: Axis) -> dict[str, Any]:
        picture = drawing.drawn(chart, self._runs, axis)
        names = ", ".join(run.name for run in self._runs)
        svg = drawing.inline(picture.figure, f"{chart.name}-{axis}", f"{chart.title}, {AXES[axis]}: {names}")
        if axis == "steps":
            self.pictures[chart.name] = drawing.png(picture.figure, chart.title, self._runs)
        labels = sorted({curve.label for curve in chart.curves if curve.label and curve.points})
        note = f"{'faint' if chart.name == 'loss' else 'dashed'}: {', '.join(labels)}" if labels else ""
        return {"axis": axis, "title": chart.title, "note": note, "svg": svg, "data": self._data(picture)}

    def _data(self, picture: Picture) -> str:
        """Return the points of curves as the script reads them."""
        names = [run.name for run in self._runs] if len(self._runs) > 1 else [""]
        curves = [
            [drawing.page_color(run), ", ".join(filter(None, (names[run], label))), spots]
            for run, label, spots in picture.spots
        ]
        return json.dumps(curves, separators=(",", ":"))

    def _stages(self) -> Iterator[tuple[str, Markup]]:
        """Yield the name of each run whose stages were measured, and the picture of its stages."""
        for place, run in enumerate(self._runs, 1):
            if (figure := drawing.stages(run)) is not None:
                name = "stages" if len(self._runs) == 1 else f"stages-{place}"
                title = f"Seconds of a step by stage and epoch: {run.name}"
                yield run.name, drawing.inline(figure, name, title)
                self.pictures[name] = drawing.png(figure, run.name, [run])


def _card(place: int, run: Run) -> dict[str, Any]:
    dashes, state = drawing.dashes(place), facts.state(run)
    return {
        "name": run.name,
        "color": drawing.page_color(place),
        "dashes": "none" if dashes == "-" else " ".join(f"{2 * each:g}" for each in dashes[1]),
        "state": state,
        "has_ended": state in facts.ENDED,
        "tiles": list(facts.tiles(run)),
    }
