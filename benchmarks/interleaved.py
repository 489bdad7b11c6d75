"""Calls that all ranks make together: candidates alternate, from barrier to barrier, with cold caches."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from commlib import Communicator, LinkBytes, Topology
from training.bench.checks import WrongResult
from training.bench.timing import WARM_UP_RUNS, Seconds, cache_bytes


@dataclass(frozen=True)
class Call:
    """One call on one rank: seconds from barrier to barrier, of the processor, and bytes of payload sent."""

    wall: float
    cpu: float
    sent: LinkBytes


@dataclass(frozen=True)
class Interleaved:
    """The calls of one candidate, ``[call][rank]``."""

    calls: Sequence[Sequence[Call]]

    @property
    def wall(self) -> Seconds:
        """Return the seconds of a call, from barrier to barrier, on the slowest rank."""
        return Seconds.of([max(rank.wall for rank in call) for call in self.calls])

    @property
    def cpu(self) -> Seconds:
        """Return the processor's seconds in a call, the mean over ranks."""
        return Seconds.of([fmean(rank.cpu for rank in call) for call in self.calls])

    @property
    def cpu_of_busiest(self) -> Seconds:
        """Return the processor's seconds in a call, on the rank that uses most."""
        return Seconds.of([max(rank.cpu for rank in call) for call in self.calls])

    @property
    def bytes(self) -> LinkBytes:
        """Return the bytes, in the last call, of the rank that sends most between nodes, else inside."""
        return max((rank.sent for rank in self.calls[-1]), key=lambda sent: (sent.inter, sent.intra))


def interleave(
    topology: Topology, candidates: Mapping[str, Callable[[], object]], calls: int
) -> dict[str, Interleaved]:
    """Return ``calls`` calls of each candidate, after the first ones, which do not count.

    All ranks call it together, and get the calls of all ranks.
    """
    taken: dict[str, list[Call]] = {name: [] for name in candidates}
    # In training the caches hold other data in between. Else the small part of a rank would stay in them.
    between = np.zeros(2 * cache_bytes() // 4, np.float32)
    for _ in range(WARM_UP_RUNS + calls):
        for name, candidate in candidates.items():
            between += 1
            taken[name].append(_called(topology, candidate))
    world = topology.world
    reported = {name: world.allgather_objects(own[WARM_UP_RUNS:]) for name, own in taken.items()}
    return {name: Interleaved(list(zip(*each, strict=True))) for name, each in reported.items()}


def _called(topology: Topology, candidate: Callable[[], object]) -> Call:
    world, before = topology.world, topology.traffic
    world.barrier()
    start, used = world.now(), time.process_time()
    candidate()
    cpu = time.process_time() - used
    world.barrier()
    return Call(world.now() - start, cpu, (topology.traffic - before).sent)


def raise_if_wrong(comm: Communicator, name: str, problem: str) -> None:
    """Raise :class:`WrongResult` on all ranks where one of them has a problem."""
    if found := next(filter(None, comm.allgather_objects(problem)), ""):
        raise WrongResult(f"{name}: {found}")
