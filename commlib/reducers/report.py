"""What one call of ``reduce`` did: entries, bytes, and the seconds of each stage."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from commlib.topology import Traffic
from commlib.vectors import Float32, SparseVector


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
class Report:
    """What one call of ``reduce`` did on this rank.

    ``finite``: false when a NaN or an infinity on any rank made all ranks skip the step. ``selected``:
    entries this rank selected; ``applied``: entries of the result, as held on the wire (all ``d`` where
    it was sent dense). ``hidden``: seconds of the step during which the caller went on computing, of
    :class:`commlib.Engine`.
    """

    finite: bool
    selected: int
    applied: int
    traffic: Traffic
    seconds: StageSeconds
    hidden: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What an algorithm returns: the mean, or ``None`` for a skipped step.

    Of a step that was given a ``SparseVector`` it is what ``step_mean.write`` returned.
    """

    mean: Float32 | SparseVector | None
    selected: int = 0
    applied: int = 0


class Stopwatch:
    """Adds up the seconds of the stages of a step. ``now``: the clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.seconds = StageSeconds()
        self._running: list[str] = []  # stages whose bodies are running, the innermost last
        self._charged_until = 0.0

    def restart(self) -> None:
        """Begin a step."""
        self.seconds = StageSeconds()

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the time of the body to ``stage``, without what is measured inside of it."""
        self._charge()
        self._running.append(stage)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def _charge(self) -> None:
        now = self._now()
        if self._running:
            stage = self._running[-1]
            setattr(self.seconds, stage, getattr(self.seconds, stage) + now - self._charged_until)
        self._charged_until = now
