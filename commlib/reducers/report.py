"""The report of one call of ``reduce``: entries, bytes, and the seconds of each stage."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np

from commlib.topology import Traffic
from commlib.trace import Recorder
from commlib.vectors import Float32, SparseVector

Seconds = TypeVar("Seconds")


@dataclass
class StageSeconds:
    """Time of one call by stage: selection, exchange inside the node, exchange between nodes, addition.

    By the transport's clock: wall time, or on simulated ranks the predicted time of the messages.
    """

    select: float = 0.0
    intra: float = 0.0
    inter: float = 0.0
    combine: float = 0.0


@dataclass(frozen=True)
class Forgotten:
    """What residual decay removed from a rank's residual: the norm and the sum of the removed entries."""

    norm: float = 0.0
    sum: float = 0.0

    def __add__(self, other: "Forgotten") -> "Forgotten":
        """Return the record of two parts of one vector."""
        return Forgotten(math.hypot(self.norm, other.norm), self.sum + other.sum)


@dataclass(frozen=True)
class Report:
    """What one call of ``reduce`` did on this rank.

    ``finite``: false when a NaN or an infinity on any rank made all ranks skip the step. ``selected``:
    entries this rank selected; ``applied``: entries of the result, as held on the wire (all ``d`` where
    it was sent dense). ``busy``: seconds that a thread in the background took for the step, ``hidden``: those
    of them during which the caller went on computing; 0 without overlap. ``flags``: the
    union of all ranks' flags at the start of the step, equal on all ranks, see :class:`commlib.Topology`.
    ``forgotten``: what a ``decay`` below 1 removed from the residual.
    """

    finite: bool
    selected: int
    applied: int
    traffic: Traffic
    seconds: StageSeconds
    busy: float = 0.0
    hidden: float = 0.0
    flags: int = 0
    forgotten: Forgotten = Forgotten()


def merged(reports: Sequence[Report]) -> Report:
    """Return the report of a step from the reports of its buckets, or of its exchanges."""
    seconds = StageSeconds()
    for each in reports:
        for stage in fields(seconds):
            setattr(seconds, stage.name, getattr(seconds, stage.name) + getattr(each.seconds, stage.name))
    finite = all(each.finite for each in reports)
    return Report(
        finite=finite,
        selected=sum(each.selected for each in reports),
        applied=sum(each.applied for each in reports),
        traffic=sum((each.traffic for each in reports), Traffic()),
        seconds=seconds,
        busy=sum(each.busy for each in reports),
        hidden=sum(each.hidden for each in reports),
        flags=int(np.bitwise_or.reduce([each.flags for each in reports])),
        forgotten=sum((each.forgotten for each in reports if finite), Forgotten()),
    )


@dataclass(frozen=True)
class Outcome:
    """What an algorithm returns: the mean, or ``None`` for a skipped step.

    If the gradient was a ``SparseVector``, the mean is the result of ``buffer.scatter``.
    """

    mean: Float32 | SparseVector | None
    selected: int = 0
    applied: int = 0
    forgotten: Forgotten = Forgotten()


class _Body:
    """The context that a stopwatch measures; a context made of a generator takes longer."""

    def __init__(self, stopwatch: "Stopwatch[Any]", stage: str) -> None:
        self._stopwatch, self._stage = stopwatch, stage

    def __enter__(self) -> None:
        self._start = self._stopwatch.enter(self._stage)

    def __exit__(self, *error: object) -> None:
        self._stopwatch.leave(self._start)


class Stopwatch(Generic[Seconds]):
    """Adds up the seconds of the stages of a step. ``now``: the clock; ``zero``: makes the record of a step.

    ``recorder``: gets a span of each stage that is measured, if there is one.
    """

    def __init__(self, now: Callable[[], float], zero: Callable[[], Seconds]) -> None:
        self._now, self._zero = now, zero
        self.seconds = zero()
        self.recorder: Recorder | None = None
        self._running: list[str] = []  # stages whose bodies are running, the innermost last
        self._charged_until = 0.0

    def restart(self) -> None:
        """Begin a step."""
        self.seconds = self._zero()

    def measure(self, stage: str) -> AbstractContextManager[None]:
        """Add the time of the body to ``stage``, without stages measured inside the body."""
        return _Body(self, stage)

    def enter(self, stage: str) -> float:
        """Begin a body of ``stage``; return the time."""
        start = self._charge()
        self._running.append(stage)
        return start

    def leave(self, start: float) -> None:
        """End the innermost body, which began at ``start``."""
        end = self._charge()
        stage = self._running.pop()
        if self.recorder is not None:
            self.recorder.add(stage, start, end)

    def _charge(self) -> float:
        """Add the time since the latest call to the innermost stage; return the time."""
        now = self._now()
        if self._running:
            stage = self._running[-1]
            setattr(self.seconds, stage, getattr(self.seconds, stage) + now - self._charged_until)
        self._charged_until = now
        return now
