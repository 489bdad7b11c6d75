"""Steps of reducers on the ranks of a communicator: interleaved, on the same gradients, and checked."""

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from statistics import fmean, median, median_low
from typing import TypeVar

from commlib import Communicator, LinkBytes, Reducer, Report
from commlib.reducers import StageSeconds
from commlib.tuning.gradients import Gradients
from training.bench.checks import check_first_step
from training.bench.timing import Seconds

BenchCandidate = TypeVar("BenchCandidate", bound=Hashable)


@dataclass(frozen=True)
class Clock:
    """How the seconds of a step are read on a rank, and combined over the ranks.

    ``closes``: the step ends where all ranks have ended it.
    """

    name: str
    read: Callable[[Communicator], float]
    over_ranks: Callable[[Sequence[float]], float]
    closes: bool
    meaning: str


CLOCKS = {
    clock.name: clock
    for clock in (
        Clock(
            "virtual",
            lambda comm: comm.now(),
            max,
            closes=False,
            meaning="of the messages, as the α-β model predicts, slowest rank",
        ),
        Clock(
            "wall", lambda comm: comm.now(), max, closes=True, meaning="from barrier to barrier, slowest rank"
        ),
        Clock(
            "cpu",
            lambda comm: time.thread_time(),
            fmean,
            closes=False,
            meaning="processor time, mean over ranks",
        ),
    )
}


@dataclass(frozen=True)
class Step:
    """One call of ``reduce`` on one rank."""

    seconds: float
    report: Report


@dataclass(frozen=True)
class Measurement:
    """The steps of one reducer, ``[step][rank]``."""

    steps: Sequence[Sequence[Step]]
    clock: Clock

    @property
    def seconds(self) -> Seconds:
        """Return the seconds of the steps."""
        return Seconds.of([self.clock.over_ranks([rank.seconds for rank in step]) for step in self.steps])

    @property
    def bytes(self) -> LinkBytes:
        """Return the bytes of the rank that sends most between nodes, else inside."""
        busiest = [max(sent, key=lambda each: (each.inter, each.intra)) for sent in self._sent()]
        return _median_bytes(busiest)

    @property
    def bytes_of_all_ranks(self) -> LinkBytes:
        """Return the bytes that all ranks send together."""
        return _median_bytes([sum(sent, LinkBytes()) for sent in self._sent()])

    @property
    def entries(self) -> dict[str, int]:
        """Return the entries selected, on the average rank, and applied."""
        return {name: round(self._over_steps(name, fmean)) for name in ("selected", "applied")}

    @property
    def stages(self) -> dict[str, dict[str, float]]:
        """Return the seconds of each stage by the transport's clock: minimum, mean and maximum over ranks."""
        over: dict[str, Callable[[Sequence[float]], float]] = {"min": min, "mean": fmean, "max": max}
        return {
            stage.name: {name: self._over_steps(f"seconds.{stage.name}", each) for name, each in over.items()}
            for stage in fields(StageSeconds)
        }

    def _sent(self) -> list[list[LinkBytes]]:
        return [[rank.report.traffic.sent for rank in step] for step in self.steps]

    def _over_steps(self, name: str, over_ranks: Callable[[Sequence[float]], float]) -> float:
        read = attrgetter(name)
        return median(over_ranks([read(rank.report) for rank in step]) for step in self.steps)


def _median_bytes(steps: Sequence[LinkBytes]) -> LinkBytes:
    return LinkBytes(*(median_low(getattr(each, link) for each in steps) for link in ("intra", "inter")))


def interleave(
    comm: Communicator,
    reducers: Mapping[BenchCandidate, Reducer],
    gradients: Gradients,
    steps: range,
    clock: Clock,
    *,
    unchecked: Collection[BenchCandidate] = (),
) -> dict[BenchCandidate, Measurement]:
    """Let each reducer reduce the gradient of each step; return the measurements of ``steps``.

    The steps before ``steps.start`` are the warm-up; the result of the very first is checked, but for those
    ``unchecked``. All ranks call it together, and all get the measurements of all ranks.
    """
    taken: dict[BenchCandidate, list[Step]] = {candidate: [] for candidate in reducers}
    for number in range(steps.stop):
        gradient = gradients.of(comm.rank, number)
        for candidate, reducer in reducers.items():
            comm.barrier()
            start = clock.read(comm)
            mean = reducer.reduce(gradient)
            if clock.closes:
                comm.barrier()
            seconds = clock.read(comm) - start
            if number == 0 and candidate not in unchecked:
                check_first_step(str(candidate), comm, reducer, mean, gradients)
            if number in steps:
                assert reducer.last is not None
                taken[candidate].append(Step(seconds, reducer.last))
    reported = {candidate: comm.allgather_objects(own) for candidate, own in taken.items()}
    return {name: Measurement(list(zip(*each, strict=True)), clock) for name, each in reported.items()}
