"""Simulated ranks that do the same thing at once, each in its thread, when rank 0 asks for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.step_seen import StepSeen
from commlib import Communicator, LinkBytes, Report, Topology
from commlib.tensorflow import DistributedGradients

Do = Callable[[int], Any]


@dataclass
class RankTotals:
    """What the reports of a rank add up to: exchanges, entries selected, bytes sent."""

    exchanges: int = 0
    selected: int = 0
    sent: LinkBytes = LinkBytes()

    def add(self, report: Report) -> None:
        """Count an exchange."""
        self.exchanges += 1
        self.selected += report.selected
        self.sent += report.traffic.sent


@dataclass
class Ranks:
    """What the threads of all ranks share: the next thing to do, and each one's gradients."""

    layout: Sequence[int]
    look_every: int
    do: Do | None = None
    results: list[Any] = field(default_factory=list)
    topologies: list[Topology] = field(default_factory=list)
    gradients: list[DistributedGradients] = field(default_factory=list)
    seen: list[StepSeen] = field(default_factory=list)
    totals: list[RankTotals] = field(default_factory=list)

    def __post_init__(self) -> None:
        for each in (self.results, self.topologies, self.gradients):
            each.extend([None] * self.count)  # type: ignore[list-item]  # until a rank puts its own there
        self.totals.extend(RankTotals() for _ in range(self.count))

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(self.layout)

    def all_do(self, do: Do) -> list[Any]:
        """Let each rank do something, and return their results; rank 0 calls it, the others wait for it."""
        self.do = do
        self.take_part(self.topologies[0].world)
        return list(self.results)

    def take_part(self, comm: Communicator) -> bool:
        """Do the next thing; return whether there is another."""
        comm.barrier()
        if self.do is None:
            return False
        self.results[comm.rank] = self.do(comm.rank)
        comm.barrier()
        return True

    def count_exchange(self, reports: Sequence[Report]) -> None:
        """Add the reports of all ranks to their totals."""
        for totals, report in zip(self.totals, reports, strict=True):
            totals.add(report)

    def end(self) -> None:
        """Let the other ranks go."""
        self.do = None
        self.take_part(self.topologies[0].world)
