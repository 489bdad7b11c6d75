"""Dense all-reduce: every entry, every step. The baseline that the others are measured against."""

from functools import partial
from typing import ClassVar

import numpy as np

from commlib.cost import Cost, LinkSeconds, Step, Work, ring_traffic
from commlib.reducers.base import Reducer
from commlib.reducers.mean import MeanBuffer
from commlib.reducers.report import Outcome
from commlib.topology import LinkBytes, Topology
from commlib.transport.base import Ring
from commlib.vectors import Float32, is_finite, partition


def _traffic(step: Step, rank: int) -> LinkBytes:
    """``2·d·(P − 1)/P`` values, all to the next rank of the ring: between nodes for a node's last rank."""
    return ring_traffic(step.nodes, rank, step.size)


def _seconds(step: Step) -> LinkSeconds:
    """``2·(P − 1)·(α + d/P·β)``, the ring (gTop-k, equation 5), at the pace of its slowest link."""
    return step.on_slowest_link(step.ring_allreduce(step.size))


def _work(step: Step) -> Work:
    """Add up ``P − 1`` parts of ``P``; divide the last one and test whether it is finite."""
    size = step.world.size
    return Work(add=step.size * (size + 1) / size)


def make_mean(reducer: Reducer, total: Float32) -> None:
    """Divide a piece of the sum by the number of ranks, and mark a piece that is not finite.

    The mark is a NaN in the first entry, which every rank that receives the piece can check.
    """
    with reducer.measure("combine"):
        total /= np.float32(reducer.topology.world.size)
        if not is_finite(total):
            total[0] = np.nan


class Dense(Reducer):
    """A ring: ``P − 1`` hops of reduce-scatter and ``P − 1`` of all-gather; ``2·d·(P − 1)/P`` values a rank.

    The ring goes through one node after the other: ``m`` of its ``P`` links lie between nodes. Each part is
    added up in the order of the ring, so the sum does not depend on MPI's choice of algorithm.
    """

    sparse: ClassVar[bool] = False
    cost = Cost(_traffic, _seconds, _work, is_exact=True)

    def __init__(self, topology: Topology, size: int) -> None:
        super().__init__(topology, size)
        self._ring = Ring(topology.world, [rank for node in topology.nodes for rank in node])
        self._bounds = partition(size, topology.world.size)
        self._first_entries = self.arrays.asarray(self._ring.first_entries(self._bounds))  # of the pieces

    def _reduce(self, gradient: Float32, buffer: MeanBuffer) -> Outcome:
        mean = buffer.dense()
        parts = np.split(gradient, self._bounds[1:-1])
        with self.measure(self.topology.slowest_link):
            self._ring.allreduce(parts, np.split(mean, self._bounds[1:-1]), partial(make_mean, self))
        if np.isnan(mean[self._first_entries]).any():
            return Outcome(None)
        return Outcome(mean, selected=self.size, applied=self.size)
