"""The tables and pictures of docs/convergence.md, from the records of scripts/convergence.py."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.drawing.style import PALETTE, docs_picture, open_up
from training.commands.printing import markdown

DENSE = "dense"
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
    (dense,) = (row for row in own if row.variant == DENSE)
    is_share = experiment["metric"] in ("top1", "masked_accuracy")
    header = ["reducer", "ranks", "seeds", experiment["label"], "smallest … largest", "against dense"]
    lines = []
    for row in own:
        ends = f"{_shown(min(row.values), is_share)} … {_shown(max(row.values), is_share)}"
        apart = row.mean - dense.mean
        against = f"{100 * apart:+.2f} points" if is_share else f"{apart / dense.mean:+.1%}"
        ranks = " + ".join(map(str, row.layout))
        mean = _shown(row.mean, is_share)
        lines.append([row.variant, ranks, str(len(row.values)), mean, ends, "" if row is dense else against])
    return markdown(header, lines)


def _shown(value: float, is_share: bool) -> str:
    return f"{value:.2%}" if is_share else f"{value:.2f}"


def draw_curves(path: Path, records: Sequence[Mapping[str, Any]], experiment: Mapping[str, Any]) -> None:
    """Draw the metric after each epoch, mean over seeds, of the variants that the plan names ``drawn``."""
    with docs_picture(path, 6.5, 3.0) as figure:
        axes = figure.subplots()
        for color, variant in zip(PALETTE, experiment["drawn"], strict=False):
            layout = tuple(experiment["runs"][0]["ranks"])
            told = [each["epochs"] for each in records if _is_of(each, variant, layout)]
            epochs = range(1, min(map(len, told), default=0) + 1)
            means = [fmean(each[epoch - 1][experiment["metric"]] for each in told) for epoch in epochs]
            axes.plot(epochs, means, color=color, label=variant, linewidth=1.2, marker=".", markersize=4)
        axes.set_xlabel("epoch")
        axes.set_ylabel(experiment["label"])
        axes.legend(frameon=False, fontsize=7)


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
