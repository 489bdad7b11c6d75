"""Dense all-reduce: every entry, every step. The baseline that the others are measured against."""

from typing import ClassVar

import numpy as np

from commlib.reducers.base import Outcome, Reducer
from commlib.topology import Topology
from commlib.vectors import Float32, partition


class Dense(Reducer):
    """Reduce-scatter over all ranks, then all-gather: ``2·d·(P − 1)/P`` values sent by each rank.

    Each rank adds up its part in rank order, so the sum does not depend on MPI's choice of algorithm.
    """

    sparse: ClassVar[bool] = False

    def __init__(self, topology: Topology, size: int) -> None:
        super().__init__(topology, size)
        self._bounds = partition(size, topology.world.size)

    def _reduce(self, gradient: Float32) -> Outcome:
        world = self.topology.world
        with self.seconds.measure(self.topology.slowest_link):
            part = world.reduce_scatter(gradient, self._bounds)
        with self.seconds.measure("combine"):
            part /= np.float32(world.size)
            finite = bool(np.isfinite(part).all())
        if self.agree(finite) is None:
            return Outcome(None)
        mean = np.empty(self.size, np.float32)
        with self.seconds.measure(self.topology.slowest_link):
            world.allgather(part, np.split(mean, self._bounds[1:-1]))
        return Outcome(mean, selected=self.size, applied=self.size)
