"""The curves of runs: what each chart shows, as numbers over steps and seconds."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from training.report.reading import mapping, number, text
from training.report.run import Epoch, Phase, Run
from training.report.texts import METRICS, bytes_shown, percent, plain, shown_by

MOST_POINTS = 240  # of a curve; where there are more, each is the mean of several
MOST_METRICS = 6


@dataclass(frozen=True)
class Point:
    """A point of a curve; ``epoch``: its number in the run, where it is of a whole one."""

    end: float
    seconds: float
    value: float
    epoch: int | None = None


@dataclass(frozen=True)
class Curve:
    """A curve of one run, its number is ``run``. ``label``: what it is besides, where a chart has several.

    ``faint``: drawn behind the others. ``dashed``: what would have been. ``stepped``: its points are the
    begins and ends of epochs, between which nothing changes.
    """

    run: int
    points: Sequence[Point]
    label: str = ""
    faint: bool = False
    dashed: bool = False
    stepped: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart: ``name`` for files, ``title`` for people, ``shown`` writes a value.

    ``goal``: a line across it. ``log``: whether its axis is logarithmic where values are far apart.
    ``from_zero``: whether a linear one begins there.
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
    found = [_loss(runs), *_metrics(runs), _throughput(runs), _rate(runs), *_densities(runs), *_bytes(runs)]
    found.append(_hidden(runs))
    return [each for each in found if any(curve.points for curve in each.curves)]


# ----------------------------------------------------------------------------------------------- the charts


def _of_runs(runs: Sequence[Run], value: Callable[[Epoch], float | None]) -> list[Curve]:
    """Return a curve of each run: what each of its epochs has."""
    return [Curve(place, _of_epochs(run, value)) for place, run in enumerate(runs)]


def _loss(runs: Sequence[Run]) -> Chart:
    steps = [Curve(place, _of_steps(run, "loss"), "rank 0", faint=True) for place, run in enumerate(runs)]
    epochs = _of_runs(runs, lambda epoch: number(epoch.record, "loss"))
    return Chart("loss", "Training loss", [*steps, *epochs], plain)


def _metrics(runs: Sequence[Run]) -> list[Chart]:
    names = dict.fromkeys(name for run in runs for epoch in run.epochs for name in epoch.metrics)
    return [_metric(runs, place, name) for place, name in enumerate(list(names)[:MOST_METRICS], 1)]


def _metric(runs: Sequence[Run], place: int, name: str) -> Chart:
    """Return the chart of a metric; what a task of one's own calls it may be no name for a file."""
    curves = _of_runs(runs, lambda epoch: epoch.metrics.get(name))
    label = METRICS[name].label.capitalize() if name in METRICS else text(name)
    goals = {goal for run in runs if (goal := goal_of(run, name)) is not None}
    goal = goals.pop() if len(goals) == 1 else None
    file = name if name in METRICS else f"metric-{place}"
    return Chart(file, label, curves, shown_by(name), goal)


def _throughput(runs: Sequence[Run]) -> Chart:
    units = {epoch.unit for run in runs for epoch in run.epochs}
    title = f"Throughput, {text(units.pop())} a second" if len(units) == 1 else "Throughput, a second"
    curves = _of_runs(runs, lambda epoch: epoch.throughput)
    return Chart("throughput", title, curves, plain, from_zero=True)


def _rate(runs: Sequence[Run]) -> Chart:
    curves = [Curve(place, _of_steps(run, "learning_rate")) for place, run in enumerate(runs)]
    return Chart("learning-rate", "Learning rate", curves, plain, from_zero=True)


def _densities(runs: Sequence[Run]) -> Iterator[Chart]:
    curves = _stepped(runs, _density)
    if any(point.value < 1 for curve in curves for point in curve.points):
        yield Chart("density", "Density", curves, lambda value: f"{100 * value:.3g} %", log=True)


def _density(run: Run, epoch: Epoch) -> float | None:
    phase = run.phases[epoch.phase]
    return phase.density(epoch.number - phase.epochs[0].number)


def _bytes(runs: Sequence[Run]) -> Iterator[Chart]:
    """Yield what all ranks together send in a step, by link; beside it what the dense reducer would send."""
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


def _hidden(runs: Sequence[Run]) -> Chart:
    curves = _of_runs(runs, lambda epoch: number(epoch.record, "hidden_share"))
    return Chart("hidden", "Share of the exchange hidden behind computing", curves, percent)


# -------------------------------------------------------------------------------------------------- points


def _of_epochs(run: Run, value: Callable[[Epoch], float | None]) -> list[Point]:
    told = [(epoch, value(epoch)) for epoch in run.epochs]
    points = [Point(each.end, each.seconds, found, each.number) for each, found in told if found is not None]
    return thinned(points)


def _stepped(runs: Sequence[Run], value: Callable[[Run, Epoch], float | None]) -> list[Curve]:
    """Return a curve of each run that has the same value from the begin of an epoch to its end."""
    points = [thinned(list(_begins_and_ends(run, value)), 2 * MOST_POINTS) for run in runs]
    return [Curve(place, each, stepped=True) for place, each in enumerate(points)]


def _begins_and_ends(run: Run, value: Callable[[Run, Epoch], float | None]) -> Iterator[Point]:
    end, seconds = 0, 0.0
    for epoch in run.epochs:
        if (found := value(run, epoch)) is not None:
            yield Point(end, seconds, found, epoch.number)
            yield Point(epoch.end, epoch.seconds, found, epoch.number)
        end, seconds = epoch.end, epoch.seconds


def _of_steps(run: Run, key: str) -> list[Point]:
    told = [(step, number(step.record, key)) for step in run.steps]
    return thinned([Point(each.end, each.seconds, found) for each, found in told if found is not None])


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most so many points: means of equally many that follow each other.

    >>> [each.value for each in thinned([Point(end, 0.0, end) for end in (1, 2, 3, 4, 5)], most=3)]
    [1.5, 3.5, 5.0]
    """
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // most)
    parts = [points[place : place + size] for place in range(0, len(points), size)]
    return [
        Point(
            sum(each.end for each in part) / len(part),
            sum(each.seconds for each in part) / len(part),
            sum(each.value for each in part) / len(part),
        )
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
    target = mapping(run.folder.config.get("target"))
    if text(target.get("metric")) != metric:
        return None
    at_least = number(target, "at_least")
    return number(target, "at_most") if at_least is None else at_least
