"""The tables of docs/local_steps.md on time: seconds to a loss on emulated clusters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

from benchmarks.drawing.local_steps import DENSE, NOTHING, Runs
from training.commands.printing import markdown, times

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Cluster:
    """Times of steps on one cluster, by variant; with the steps of the runs, those to the target's loss."""

    runs: Runs
    records: Mapping[str, Record]

    @property
    def plan(self) -> Mapping[str, Any]:
        """Return the plan of what is timed."""
        return times_of(self.runs)

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

    def fastest_dense(self) -> float | None:
        """Return the seconds to the target of the fastest that sends all gradients."""
        found = self.seconds()
        return min((found[name] for name in self.plan["dense"] if name in found), default=None)

    def table(self) -> str:
        """Return a line for each variant."""
        found, beside, dense = self.seconds(), self.plan["beside"], self.fastest_dense()
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

    def verdict(self) -> str:
        """Return whether the goals are reached, by the fastest of those with local steps."""
        goals, found, beside = self.plan["goals"], self.seconds(), self.plan["beside"]
        local = [name for name in self.plan["subjects"] if name in found]
        if not local:
            return ""
        best = min(local, key=lambda name: found[name])
        told = [
            _goal("the fastest dense one", _ratio(self.fastest_dense(), found[best]), goals["dense"]),
            _goal(f"`{beside}`", _ratio(found.get(beside), found[best]), goals["beside"]),
        ]
        return f"The fastest is {best}: {'; '.join(told)}.\n"


def times_of(runs: Runs) -> Mapping[str, Any]:
    """Return the plan of what is timed."""
    plan: Mapping[str, Any] = runs.content["times"]
    return plan


def page(runs: Runs, records: Sequence[Record]) -> str:
    """Return a table for each cluster, and where goals are set, whether they are reached."""
    return "\n".join(_parts(runs, records))


def _parts(runs: Runs, records: Sequence[Record]) -> Iterator[str]:
    plan = times_of(runs)
    target = plan["target"]
    yield f"To a test loss of {target}, a perplexity of {exp(target):.0f}:\n"
    for layout in plan["layouts"]:
        for rate in plan["rates"]:
            own = [
                each for each in records if (each["case"]["rate"], each["case"]["layout"]) == (rate, layout)
            ]
            if own:
                cluster = Cluster(runs, {each["case"]["variant"]: each for each in own})
                yield f"{rate.replace('mbit', ' Mbit/s')}, {layout.replace('x', ' × ')}:\n"
                yield cluster.table()
                yield cluster.verdict() if rate == plan["goals"]["rate"] else ""


def _ratio(other: float | None, own: float | None) -> float | None:
    return None if other is None or own is None else other / own


def _goal(beside: str, ratio: float | None, goal: float) -> str:
    reached = "reached" if ratio is not None and ratio >= goal else "not reached"
    return f"{times(ratio)} times as fast as {beside}, of which {goal} was the goal: {reached}"
