"""Dense all-reduce: every entry, every step. The baseline that the others are measured against."""

from typing import ClassVar

import numpy as np

from commlib.reducers.base import Reducer
from commlib.reducers.report import Outcome
from commlib.topology import Topology
from commlib.transport.base import Ring
from commlib.vectors import Float32, is_finite, partition


class Dense(Reducer):
    """A ring: ``P − 1`` hops that add up, ``P − 1`` that hand round; ``2·d·(P − 1)/P`` values a rank.

    The ring goes through one node after the other: ``m`` of its ``P`` links lie between nodes. Each part is
    added up in the order of the ring, so the sum does not depend on MPI's choice of algorithm.
    """

    sparse: ClassVar[bool] = False

    def __init__(self, topology: Topology, size: int) -> None:
        super().__init__(topology, size)
        self._ring = Ring(topology.world, [rank for node in topology.nodes for rank in node])
        self._bounds = partition(size, topology.world.size)

    def _reduce(self, gradient: Float32) -> Outcome:
        ring, link = self._ring, self.topology.slowest_link
        mean = self.step_mean.overwrite()
        parts = np.split(mean, self._bounds[1:-1])
        with self.measure(link):
            ring.reduce_scatter(np.split(gradient, self._bounds[1:-1]), parts)
        with self.measure("combine"):
            complete = parts[self.topology.world.rank]
            complete /= np.float32(self.topology.world.size)
            finite = is_finite(complete)
        if self.synchronize_step(finite) is None:
            return Outcome(None)
        with self.measure(link):
            ring.allgather(parts)
        return Outcome(mean, selected=self.size, applied=self.size)
