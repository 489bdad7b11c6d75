"""The tables and pictures of docs/convergence.md, from the records of benchmarks/convergence.py."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml

from benchmarks.drawing.style import PALETTE, docs_picture, open_up
from training.commands.printing import markdown
from training.tasks import TASKS, Metric, Task

DENSE = "dense"
ROUNDING = 1e-9  # of a mean: what is a point away is not farther
PANELS = {
    "selected": "entries selected / target",
    "xi": "ξ",
    "overlap": "share of entries that another rank selects",
    "fill_in": "entries of the union / k",
    "residual": "norm of the residual / of the gradient",
}


@dataclass(frozen=True)
class Row:
    """One variant on one layout: the last value of the metric of each seed."""

    variant: str
    layout: tuple[int, ...]
    values: Sequence[float]
    skipped_steps: int

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return fmean(self.values)

    @property
    def ranks(self) -> str:
        """Those of each node."""
        return " + ".join(map(str, self.layout))


def task_of(experiment: Mapping[str, Any]) -> type[Task]:
    """Return the task that an experiment trains."""
    task = experiment["config"].get("task", "image_classification")
    return TASKS[task if isinstance(task, str) else task["name"]]


def metric_of(experiment: Mapping[str, Any]) -> Metric:
    """Return the metric by which an experiment is compared."""
    return task_of(experiment).metrics[experiment["metric"]]


def rows(records: Iterable[Mapping[str, Any]], experiment: Mapping[str, Any], name: str) -> list[Row]:
    """Return a row for each variant and layout of an experiment that has a record, in the plan's order."""
    own = [record for record in records if record["case"]["experiment"] == name]
    found = []
    for runs in experiment["runs"]:
        for variant in runs["variants"]:
            layout = tuple(runs["ranks"])
            told = [each for each in own if _is_of(each, variant, layout)]
            if told:
                values = [each["epochs"][-1][experiment["metric"]] for each in told]
                found.append(Row(variant, layout, values, sum(each["skipped_steps"] for each in told)))
    return found


def _is_of(record: Mapping[str, Any], variant: str, layout: tuple[int, ...]) -> bool:
    case = record["case"]
    return case["variant"] == variant and tuple(case["layout"]) == layout


def table(own: Sequence[Row], experiment: Mapping[str, Any]) -> str:
    """Return the table of an experiment: where each variant ends, and how far that is from dense."""
    dense, metric = _dense(own), metric_of(experiment)
    header = ["reducer", "ranks", "seeds", experiment["label"], "smallest … largest", "against dense"]
    lines = []
    for row in own:
        ends = f"{_shown(min(row.values), metric)} … {_shown(max(row.values), metric)}"
        apart = _apart(row, dense, metric)
        against = f"{100 * apart:+.2f} points" if metric.share else f"{apart:+.1%}"
        if row is dense:
            against = ""
        seeds, mean = str(len(row.values)), _shown(row.mean, metric)
        lines.append([row.variant, row.ranks, seeds, mean, ends, against])
    return markdown(header, lines)


def verdict(own: Sequence[Row], experiment: Mapping[str, Any]) -> str:
    """Return for each goal of an experiment which variants reach it, and which do not."""
    dense, metric = _dense(own), metric_of(experiment)
    sign = 1 if metric.better == "lower" else -1
    lines = []
    for goal in experiment["goals"]:
        most = goal["within"]
        judged = [row for row in own if row.variant in goal["variants"]]
        close = [sign * _apart(row, dense, metric) <= most + ROUNDING for row in judged]
        names = [f"{row.variant} on {row.ranks}" for row in judged]
        limit = f"{100 * most:.1f} points" if metric.share else f"{most:.1%}"
        lines.append(f"- Worse than dense by at most {limit}: {_listed(names, close, True)}.")
        lines.append(f"  By more: {_listed(names, close, False)}.")
    return "\n".join(lines) + "\n"


def settings(experiment: Mapping[str, Any]) -> str:
    """Return the configuration of an experiment as a block of YAML."""
    config = json.loads(json.dumps(experiment["config"]))  # what is shared would be written by reference
    text = yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=110)
    return f"```yaml\n{text}```\n"


def _dense(own: Sequence[Row]) -> Row:
    (dense,) = (row for row in own if row.variant == DENSE)
    return dense


def _apart(row: Row, dense: Row, metric: Metric) -> float:
    """Return how much a mean is above that of dense: in shares, or relatively."""
    return row.mean - dense.mean if metric.share else row.mean / dense.mean - 1


def _shown(value: float, metric: Metric) -> str:
    return f"{value:.2%}" if metric.share else f"{value:.4g}"


def _listed(names: Sequence[str], are: Sequence[bool], wanted: bool) -> str:
    return "; ".join(name for name, is_so in zip(names, are, strict=True) if is_so == wanted) or "none"


def draw_curves(path: Path, records: Sequence[Mapping[str, Any]], experiment: Mapping[str, Any]) -> None:
    """Draw how the variants get there that the plan names ``drawn``: means over seeds.

    The metric after each epoch, or with ``curve: loss`` the loss in training.
    """
    is_loss = experiment.get("curve") == "loss"
    layout = tuple(experiment["runs"][0]["ranks"])
    with docs_picture(path, 6.5, 3.0) as figure:
        axes = figure.subplots()
        for color, variant in zip(PALETTE, experiment["drawn"], strict=False):
            told = [each for each in records if _is_of(each, variant, layout)]
            if told:
                curve = _losses(told) if is_loss else _tests(told, experiment["metric"])
                style = {} if is_loss else {"marker": ".", "markersize": 4}
                axes.plot(*curve, color=color, label=variant, linewidth=1.2, **style)
        axes.set_xlabel("step" if is_loss else "epoch")
        axes.set_ylabel("loss in training" if is_loss else experiment["label"])
        axes.legend(frameon=False, fontsize=7)


def _tests(told: Sequence[Mapping[str, Any]], metric: str) -> tuple[Any, Any]:
    values = np.mean([[epoch[metric] for epoch in each["epochs"]] for each in told], axis=0)
    return np.arange(len(values)) + 1, values


def _losses(told: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    values = np.mean([each["losses"] for each in told], axis=0)
    steps = sum(epoch["steps"] for epoch in told[0]["epochs"])
    return (np.arange(len(values)) + 0.5) * steps / len(values), values


def draw_steps(path: Path, records: Sequence[Mapping[str, Any]], variants: Sequence[str]) -> None:
    """Draw what was seen on the way, a panel for each: of the first seed of these variants."""
    with docs_picture(path, 6.5, 6.0) as figure:
        panels = figure.subplots(3, 2).flat
        for axes, (name, label) in zip(panels, PANELS.items(), strict=False):
            for color, variant in zip(PALETTE, variants, strict=False):
                told = [each["seen"] for each in records if each["case"]["variant"] == variant]
                if not told:
                    continue
                values = [step[name] / (step["target"] if name == "selected" else 1.0) for step in told[0]]
                axes.plot([step["step"] for step in told[0]], values, color=color, linewidth=1, label=variant)
            axes.set_title(label, fontsize=8)
            axes.set_xlabel("step")
            open_up(axes)
        handles, labels = axes.get_legend_handles_labels()
        last = list(figure.axes)[-1]
        last.axis("off")
        last.legend(handles, labels, frameon=False, loc="center", fontsize=8)
