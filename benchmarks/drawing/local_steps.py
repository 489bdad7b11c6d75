"""The tables and pictures of docs/local_steps.md, from the records of benchmarks/local_steps.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.drawing.style import PALETTE, docs_picture
from training.commands.printing import markdown, times

DENSE, COMPARED = "dense", "SparseLoCo"
NOTHING = "–"
Variant = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A variant, over its seeds.

    ``losses``: those at the end. ``sent``: by the busiest rank to other nodes, mean over seeds. ``selected``:
    entries by all ranks. ``tested``: steps and losses on the way, of each seed.
    """

    variant: str
    layout: tuple[int, ...]
    phase: Variant
    losses: Sequence[float]
    steps: int
    weights: int
    sent: float
    all_sent: float
    selected: float
    tested: Sequence[Sequence[Sequence[float]]]

    @classmethod
    def of(cls, variant: str, phase: Variant, records: Sequence[Mapping[str, Any]]) -> "Run":
        """Return it from the records of its seeds."""
        sent = [[rank["sent"]["inter"] for rank in record["ranks"]] for record in records]
        return cls(
            variant=variant,
            layout=tuple(records[0]["case"]["layout"]),
            phase=phase,
            losses=[record["loss"] for record in records],
            steps=records[0]["steps"],
            weights=records[0]["weights"],
            sent=fmean(max(each) for each in sent),
            all_sent=fmean(sum(each) for each in sent),
            selected=fmean(sum(rank["selected"] for rank in record["ranks"]) for record in records),
            tested=[record["tested"] for record in records],
        )

    @property
    def loss(self) -> float:
        """Return the mean over seeds."""
        return fmean(self.losses)

    @property
    def bits(self) -> float | None:
        """Return the bits of an entry, index and value, where a rank sends it to all others."""
        reducer = self.phase["reducer"]
        if isinstance(reducer, str) or reducer["name"] != "hitopk":
            return None
        return 8 * self.all_sent / self.selected / (len(self.layout) - 1)

    def steps_to(self, target: float) -> float | None:
        """Return the steps to a loss, mean over seeds; ``None`` where one has not come there."""
        found = [steps_to(target, tested) for tested in self.tested]
        return None if None in found else fmean(each for each in found if each is not None)


def steps_to(target: float, tested: Sequence[Sequence[float]]) -> float | None:
    """Return the step at which a loss is reached, on the line between two tests.

    >>> steps_to(3.0, [[10, 5.0], [20, 4.0], [30, 2.0]])
    25.0
    """
    before = None
    for step, loss in tested:
        if loss <= target:
            if before is None:
                return float(step)
            return float(np.interp(-target, [-before[1], -loss], [before[0], step]))
        before = step, loss
    return None


@dataclass(frozen=True)
class Runs:
    """All variants that have a record, in the order of the plan."""

    content: Mapping[str, Any]
    runs: Mapping[str, Run]

    @classmethod
    def of(cls, content: Mapping[str, Any], records: Sequence[Mapping[str, Any]], experiment: str) -> "Runs":
        """Return them from the records of an experiment."""
        found = {}
        for variant, phase in content["variants"].items():
            wanted = {"experiment": experiment, "variant": variant}.items()
            own = [each for each in records if wanted <= each["case"].items()]
            if own:
                found[variant] = Run.of(variant, phase, own)
        return cls(content, found)

    @property
    def dense(self) -> Run:
        """Return the run with all gradients in every step."""
        return self.runs[DENSE]

    def against(self, run: Run) -> str:
        """Return how much more a run's loss is than that of dense."""
        return f"{run.loss / self.dense.loss - 1:+.1%}".replace("%", " %")

    def of_method(self, method: str) -> dict[int, Run]:
        """Return the runs of a method by H."""
        named = {steps: f"{method}, H = {steps}" for steps in sorted(self.content["local_steps"])}
        return {steps: self.runs[name] for steps, name in named.items() if name in self.runs}

    def against_h(self) -> str:
        """Return the table of losses by method and H."""
        methods = {method: self.of_method(method) for method in self.content["methods"]}
        lines = []
        for steps in sorted(self.content["local_steps"]):
            shown = [self._shown(own[steps]) if steps in own else NOTHING for own in methods.values()]
            lines.append([str(steps), *shown])
        return (
            f"{markdown(['H', *methods], lines)}\nWithout local steps, `dense`: {self._shown(self.dense)}\n"
        )

    def _shown(self, run: Run) -> str:
        seeds = "" if len(run.losses) == 1 else f", {min(run.losses):.3f} … {max(run.losses):.3f}"
        beside = "" if run is self.dense else f" ({self.against(run)})"
        return f"{run.loss:.3f}{beside}{seeds}"

    def against_bytes(self) -> str:
        """Return the table of all variants, those first that send the most."""
        header = ["variant", "MB a rank", "bytes a weight and step", "bits an entry", "seeds", "test loss"]
        lines = []
        for run in sorted(self.runs.values(), key=lambda each: -each.sent):
            bits = NOTHING if run.bits is None else f"{run.bits:.2f}"
            beside = NOTHING if run is self.dense else self.against(run)
            sent = [f"{run.sent / 1e6:,.3f}", f"{run.sent / run.weights / run.steps:.5f}", bits]
            lines.append([run.variant, *sent, str(len(run.losses)), f"{run.loss:.3f}", beside])
        return markdown([*header, "against dense"], lines)

    def at_equal_bytes(self) -> str:
        """Return the table of local steps beside steps with as many entries."""
        local, lines = self.of_method(COMPARED), []
        for steps, name in self.content["compared"].items():
            if steps in local and name in self.runs:
                ours, other = local[steps], self.runs[name]
                pair = [[f"{each.sent / 1e6:.3f}", f"{each.loss:.3f}"] for each in (ours, other)]
                lines.append([str(steps), *pair[0], *pair[1], f"{other.loss - ours.loss:+.3f}"])
        head = ["H", "MB, every H steps", "test loss", "MB, every step", "test loss", "every step − every H"]
        return markdown(head, lines)


# ------------------------------------------------------------------------------------------- pictures


def draw_against_h(path: Path, runs: Runs) -> None:
    """Draw the loss at the end against H, a line a method."""
    with docs_picture(path, 6.5, 3.0) as figure:
        axes = figure.subplots()
        for color, method in zip(PALETTE, runs.content["methods"], strict=False):
            if not (own := runs.of_method(method)):
                continue
            axes.plot(list(own), [run.loss for run in own.values()], ".-", color=color, label=method)
        axes.axhline(runs.dense.loss, color="grey", linewidth=0.8, linestyle="--", label=DENSE)
        axes.set_xscale("log")
        hs = sorted(runs.content["local_steps"])
        axes.set_xticks(hs, [str(steps) for steps in hs], minor=False)
        axes.minorticks_off()
        axes.set_xlabel("H, local steps")
        axes.set_ylabel("test loss")
        axes.legend(frameon=False, fontsize=7)


Record = Mapping[str, Any]


@dataclass(frozen=True)
class Cluster:
    """Times of steps on one cluster, by variant; with the steps of the runs, those to the target's loss."""

    runs: Runs
    records: Mapping[str, Record]

    @property
    def plan(self) -> Mapping[str, Any]:
        """Return the plan of what is timed."""
        plan: Mapping[str, Any] = self.runs.content["times"]
        return plan

    def steps(self, variant: str) -> float | None:
        """Return the steps to the target; all that send all gradients train alike."""
        name = DENSE if variant in self.plan["dense"] else variant
        run = self.runs.runs.get(name)
        return None if run is None else run.steps_to(self.plan["target"])

    def seconds(self) -> dict[str, float]:
        """Return the seconds to the target of those that reach it."""
        steps = {variant: self.steps(variant) for variant in self.records}
        return {
            name: self.records[name]["seconds"]["median"] * each
            for name, each in steps.items()
            if each is not None
        }

    def table(self) -> str:
        """Return a line for each variant."""
        found, beside = self.seconds(), self.plan["beside"]
        dense = min((found[name] for name in self.plan["dense"] if name in found), default=None)
        lines = []
        for variant, record in self.records.items():
            seconds, steps = found.get(variant), self.steps(variant)
            local_steps = self.runs.content["variants"].get(variant, {}).get("local_steps", 1)
            exchange = record["stages"] and sum(record["stages"].values()) / local_steps
            lines.append(
                [
                    variant,
                    f"{1e3 * record['seconds']['median']:,.1f}",
                    NOTHING if exchange is None else f"{1e3 * exchange:,.1f}",
                    NOTHING if steps is None else f"{steps:,.0f}",
                    "not reached" if seconds is None else f"{seconds:,.1f}",
                    times(_ratio(dense, seconds)),
                    times(_ratio(found.get(beside), seconds)),
                ]
            )
        header = ["variant", "ms a step", "of it exchange", "steps", "s", "× dense", f"× {beside}"]
        return markdown(header, lines)


def page(runs: Runs, records: Sequence[Record]) -> str:
    """Return a table for each cluster."""
    plan = runs.content["times"]
    parts = [f"To a test loss of {plan['target']}, a perplexity of {exp(plan['target']):.0f}:\n"]
    for layout in plan["layouts"]:
        for rate in plan["rates"]:
            wanted = {"rate": rate, "layout": layout}.items()
            own = {each["case"]["variant"]: each for each in records if wanted <= each["case"].items()}
            if own:
                parts.append(f"{rate.replace('mbit', ' Mbit/s')}, {layout.replace('x', ' × ')}:\n")
                parts.append(Cluster(runs, own).table())
    return "\n".join(parts)


def _ratio(other: float | None, own: float | None) -> float | None:
    return None if other is None or own is None else other / own
