"""2D-torus all-reduce: dense in both directions (HiTopKComm's 2DTAR, section 5.3; Mikami et al. 2018)."""

from typing import ClassVar

import numpy as np

from commlib.reducers.base import Reducer
from commlib.reducers.report import Outcome
from commlib.topology import Topology
from commlib.transport.base import Ring
from commlib.vectors import Float32, is_finite, partition


class Torus2D(Reducer):
    """Reduce-scatter in the node, ring all-reduce of the shard on each stream, all-gather in the node.

    Between nodes ``2·(d/n)·(m − 1)/m`` values a rank, where ``dense`` sends about ``n`` times as many. Uneven
    nodes share as many shards as the smallest node has ranks.
    """

    sparse: ClassVar[bool] = False

    def __init__(self, topology: Topology, size: int) -> None:
        super().__init__(topology, size)
        self._bounds = topology.shard_bounds(size)
        low, high = self._bounds[topology.local_rank : topology.local_rank + 2]
        self._slices = partition(int(high - low), topology.stream.size)
        self._ring = Ring(topology.stream, range(topology.stream.size))

    def _reduce(self, gradient: Float32) -> Outcome:
        topology = self.topology
        with self.measure("intra"):
            shard = topology.node.reduce_scatter(gradient, self._bounds, self.workspace)
        mean = self.step_mean.overwrite()
        shards = np.split(mean, self._bounds[1:-1])
        # A rank that owns no shard has a stream all the same: of ranks that own none either.
        own_shard = shards[topology.local_rank]
        parts = np.split(own_shard, self._slices[1:-1])
        with self.measure("inter"):
            self._ring.reduce_scatter(np.split(shard, self._slices[1:-1]), parts)
        with self.measure("combine"):
            complete = parts[topology.stream.rank]
            complete /= np.float32(topology.world.size)
            finite = is_finite(complete)
        if self.synchronize_step(finite) is None:
            return Outcome(None)
        with self.measure("inter"):
            self._ring.allgather(parts)
        with self.measure("intra"):
            topology.node.allgather(own_shard, shards)
        return Outcome(mean, selected=self.size, applied=self.size)
