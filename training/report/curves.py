"""The curves of runs: what each chart shows, as numbers over steps and seconds."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from training.config.reading import mapping
from training.report.run import Epoch, Event, Phase, Run, number, text
from training.report.texts import METRICS, bytes_shown, percent, plain, shown_by

MOST_POINTS = 240  # of a curve; where there are more, each is the mean of several
MOST_METRICS = 6


@dataclass(frozen=True)
class Point:
    """A point of a curve; ``epoch``: the number of the epoch whose value this is."""

    end: float
    seconds: float
    value: float
    epoch: int | None = None


@dataclass(frozen=True)
class Curve:
    """A curve of the run with the number ``run``; ``label`` tells several curves of a run apart.

    ``faint``: in the background. ``dashed``: hypothetical. ``stepped``: constant during each epoch.
    """

    run: int
    points: Sequence[Point]
    label: str = ""
    faint: bool = False
    dashed: bool = False
    stepped: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart: ``name`` of its files, ``title``, ``shown`` formats a value; ``goal``: a line across it.

    ``log``: a logarithmic axis where values are far apart. ``from_zero``: a linear axis begins at 0.
    """

    name: str
    title: str
    curves: Sequence[Curve]
    shown: Callable[[float], str]
    goal: float | None = None
    log: bool = False
    from_zero: bool = False


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts for which there is something to draw."""
    hidden = _of_runs(runs, lambda epoch: number(epoch.record, "hidden_share"))
    found = [
        _loss(runs),
        *_metrics(runs),
        _throughput(runs),
        Chart("learning-rate", "Learning rate", _of_steps(runs, "learning_rate"), plain, from_zero=True),
        *_densities(runs),
        *_bytes(runs),
        Chart("hidden", "Share of the exchange hidden behind computing", hidden, percent),
    ]
    return [each for each in found if any(curve.points for curve in each.curves)]


def _loss(runs: Sequence[Run]) -> Chart:
    steps = [replace(curve, label="rank 0", faint=True) for curve in _of_steps(runs, "loss")]
    epochs = _of_runs(runs, lambda epoch: number(epoch.record, "loss"))
    return Chart("loss", "Training loss", [*steps, *epochs], plain)


def _metrics(runs: Sequence[Run]) -> Iterator[Chart]:
    names = dict.fromkeys(name for run in runs for epoch in run.epochs for name in epoch.metrics)
    for place, name in enumerate(list(names)[:MOST_METRICS], 1):
        curves = _of_runs(runs, lambda epoch, name=name: epoch.metrics.get(name))  # type: ignore[misc]
        goals = {goal for run in runs if (goal := goal_of(run, name)) is not None}
        goal = goals.pop() if len(goals) == 1 else None
        if name in METRICS:
            yield Chart(name, METRICS[name].label.capitalize(), curves, shown_by(name), goal)
        else:  # a user's own metric: the name may not fit a file
            yield Chart(f"metric-{place}", text(name), curves, shown_by(name), goal)


def _throughput(runs: Sequence[Run]) -> Chart:
    units = {epoch.unit for run in runs for epoch in run.epochs}
    title = f"Throughput, {text(units.pop())} a second" if len(units) == 1 else "Throughput, a second"
    curves = _of_runs(runs, lambda epoch: epoch.throughput)
    return Chart("throughput", title, curves, plain, from_zero=True)


def _densities(runs: Sequence[Run]) -> Iterator[Chart]:
    curves = _stepped(runs, lambda run, epoch: run.phases[epoch.phase].density(epoch))
    if any(point.value < 1 for curve in curves for point in curve.points):
        yield Chart("density", "Density", curves, lambda value: f"{100 * value:.3g} %", log=True)


def _bytes(runs: Sequence[Run]) -> Iterator[Chart]:
    """Yield the bytes of a step of all ranks by link, beside the bytes of the dense reducer."""
    inter = _stepped(runs, lambda _, epoch: epoch.a_step("sent_inter_bytes"))
    intra = _stepped(runs, lambda _, epoch: epoch.a_step("sent_intra_bytes"))
    dense = _stepped(runs, lambda _, epoch: epoch.a_step("dense_inter_bytes"))
    other = [
        replace(curve, label="were it dense", dashed=True)
        for curve, sent in zip(dense, inter, strict=True)
        if curve.points != sent.points
    ]
    for link, where, curves in (("inter", "between", [*inter, *other]), ("intra", "inside", intra)):
        if any(point.value for curve in curves for point in curve.points):
            title = f"Bytes a step {where} nodes, all ranks"
            yield Chart(f"bytes-{link}", title, curves, bytes_shown, log=True, from_zero=True)


def _of_runs(runs: Sequence[Run], value: Callable[[Epoch], float | None]) -> list[Curve]:
    """Return a curve of each run: one value of each epoch."""
    return [_curve(place, run.epochs, value) for place, run in enumerate(runs)]


def _of_steps(runs: Sequence[Run], key: str) -> list[Curve]:
    """Return a curve of each run: one value of each step."""
    return [_curve(place, run.steps, lambda step: number(step.record, key)) for place, run in enumerate(runs)]


def _curve(run: int, events: Sequence[Event], value: Callable[[Any], float | None]) -> Curve:
    points = [
        Point(at.end, at.seconds, found, at.number if isinstance(at, Epoch) else None)
        for at in events
        if (found := value(at)) is not None
    ]
    return Curve(run, thinned(points))


def _stepped(runs: Sequence[Run], value: Callable[[Run, Epoch], float | None]) -> list[Curve]:
    """Return a curve of each run that is constant from the begin of an epoch to its end."""
    curves = []
    for place, run in enumerate(runs):
        points, end, seconds = [], 0, 0.0
        for epoch in run.epochs:
            if (found := value(run, epoch)) is not None:
                points.append(Point(end, seconds, found, epoch.number))
                points.append(Point(epoch.end, epoch.seconds, found, epoch.number))
            end, seconds = epoch.end, epoch.seconds
        curves.append(Curve(place, thinned(points, 2 * MOST_POINTS), stepped=True))
    return curves


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most ``most`` points: means over equally many successive points.

    >>> [each.value for each in thinned([Point(end, 0.0, end) for end in (1, 2, 3, 4, 5)], most=3)]
    [1.5, 3.5, 5.0]
    """
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // most)
    parts = [points[place : place + size] for place in range(0, len(points), size)]
    return [
        Point(*(sum(getattr(each, key) for each in part) / len(part) for key in ("end", "seconds", "value")))
        for part in parts
    ]


def boundaries(run: Run) -> list[tuple[Phase, Point]]:
    """Return where phases after the first one begin."""
    begun = [phase for phase in run.phases if phase.begin is not None]
    ends = {epoch.phase: epoch for epoch in run.epochs}  # the last of each
    return [
        (after, Point(ends[before.number].end, ends[before.number].seconds, 0.0))
        for before, after in pairwise(begun)
        if before.number in ends
    ]


def goal_of(run: Run, metric: str) -> float | None:
    """Return the target of a run, if it is one of this metric."""
    target = mapping(run.config.get("target"))
    if text(target.get("metric")) != metric:
        return None
    at_least = number(target, "at_least")
    return number(target, "at_most") if at_least is None else at_least
