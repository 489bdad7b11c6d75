"""Where the time of training steps goes, on one rank and over all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from commlib import Report

OWN_WORK = ("data_wait", "forward_backward", "select")  # what a rank does before it needs the others


@dataclass
class LoopSeconds:
    """Time of a step by what the loop did: one after the other, so that they add up to less than the step.

    ``data_wait``: for the batch. ``forward_backward``: loss and gradient. ``exchange_wait``: for the mean
    gradient; where nothing overlaps, all of the exchange. ``norms``: clipping, and the norms of LARS.
    ``update``: of the weights.
    """

    data_wait: float = 0.0
    forward_backward: float = 0.0
    exchange_wait: float = 0.0
    norms: float = 0.0
    update: float = 0.0


@dataclass(frozen=True)
class StepHyperparameters:
    """The hyperparameters of a step.

    ``round_steps``: of the round that it ends, all ranks exchanging; 0 within a round, 1 without local steps.
    """

    learning_rate: float
    momentum: float | None
    round_steps: int = 1

    def passes(self, steps: int, every: int) -> bool:
        """Return whether a multiple of ``every`` was reached in the round that ends with step ``steps``.

        >>> [StepHyperparameters(0.1, None, round_steps).passes(12, 5) for round_steps in (0, 1, 2, 3)]
        [False, False, False, True]
        """
        return steps // every > (steps - self.round_steps) // every


@dataclass(frozen=True)
class Step:
    """A step of one rank. ``seconds``: since the end of the step before; ``loop``: where they went.

    ``size``: of its batch, in the unit of the task. ``start``: the end of the step before, by the transport's
    clock.
    """

    loss: float
    report: Report
    seconds: float
    loop: LoopSeconds
    size: int = 0
    start: float = 0.0
    hyperparameters: StepHyperparameters = StepHyperparameters(0.0, None)

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Return the seconds of all stages: those of the loop, and those of the reducer."""
        return vars(self.loop) | vars(self.report.seconds)


@dataclass
class StageSums:
    """The stages of some steps of one rank, added up; ``busy`` and ``hidden`` as in its reports."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    busy: float = 0.0
    hidden: float = 0.0

    def add(self, step: Step) -> None:
        """Add a step."""
        self.steps += 1
        for stage, seconds in step.stage_seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.busy += step.report.busy
        self.hidden += step.report.hidden

    @property
    def hidden_share(self) -> float | None:
        """Return which share of the exchange was hidden; ``None`` where none was in the background."""
        return self.hidden / self.busy if self.busy else None


@dataclass(frozen=True)
class Slowest:
    """The rank with the longest own work, by the share ``excess`` longer than that of the mean rank.

    >>> print(Slowest(rank=3, excess=0.12))
    slowest rank 3 (+12%)
    """

    rank: int
    excess: float

    def __str__(self) -> str:
        """Return how it is shown."""
        return f"slowest rank {self.rank} (+{self.excess:.0%})"


@dataclass(frozen=True)
class StageMeans:
    """The stages of steps of all ranks: means over steps and ranks. ``slowest``: ``None`` on one rank."""

    stage_seconds: dict[str, float] = field(default_factory=dict)
    hidden_seconds: float = 0.0
    hidden_share: float | None = None
    slowest: Slowest | None = None


def means_over_ranks(of_ranks: Sequence[StageSums]) -> StageMeans:
    """Return the means of the sums of all ranks, which are in the order of the ranks."""
    steps = sum(each.steps for each in of_ranks)
    if not steps:
        return StageMeans()
    names = next(each.seconds for each in of_ranks if each.steps)
    busy, hidden = sum(each.busy for each in of_ranks), sum(each.hidden for each in of_ranks)
    return StageMeans(
        {name: sum(each.seconds.get(name, 0.0) for each in of_ranks) / steps for name in names},
        hidden / steps,
        StageSums(busy=busy, hidden=hidden).hidden_share,
        _slowest(of_ranks),
    )


def _slowest(of_ranks: Sequence[StageSums]) -> Slowest | None:
    own = [sum(each.seconds.get(stage, 0.0) for stage in OWN_WORK) for each in of_ranks]
    mean = sum(own) / len(own)
    if len(own) == 1 or not mean:
        return None
    return Slowest(own.index(max(own)), max(own) / mean - 1)


def shown(hidden_share: float | None, slowest: Slowest | None) -> str:
    """Return what a line of progress tells of them, each after two spaces.

    >>> shown(0.83, Slowest(rank=3, excess=0.12))
    '  hidden 83%  slowest rank 3 (+12%)'
    """
    hidden = "" if hidden_share is None else f"  hidden {hidden_share:.0%}"
    return hidden if slowest is None else f"{hidden}  {slowest}"
