"""2D-torus all-reduce: dense in both directions (HiTopKComm's 2DTAR, section 5.3; Mikami et al. 2018)."""

from typing import ClassVar

import numpy as np

from commlib.cost import Cost, LinkSeconds, Step, Work, ring_bytes, shards
from commlib.reducers.base import Reducer
from commlib.reducers.dense import make_mean
from commlib.reducers.report import Outcome
from commlib.topology import LinkBytes, Topology
from commlib.transport.base import Ring
from commlib.vectors import VALUE_BYTES, Float32, partition


def _traffic(step: Step, rank: int) -> LinkBytes:
    """``2·(d/n)·(m − 1)/m`` values between nodes, ``2·d·(n − 1)/n`` inside."""
    local_rank, lengths, stream = shards(step.nodes, rank, step.size)
    place = stream.index(rank)
    inter = ring_bytes(lengths[local_rank], len(stream), place, (place + 1) % len(stream))
    right = lengths[(local_rank + 1) % len(lengths)]
    return LinkBytes(VALUE_BYTES * (2 * step.size - lengths[local_rank] - right), inter)


def _seconds(step: Step) -> LinkSeconds:
    """``(n − 1)·(α + d/n·β)`` twice inside, ``(m − 1)·(α + d/(n·m)·β)`` twice between (HiTopKComm, 5.3)."""
    between = step.stream.ring(VALUE_BYTES * step.shard / step.world.nodes, rounds=2)
    return step.scatter + step.node.ring(VALUE_BYTES * step.shard), between


def _work(step: Step) -> Work:
    """Add up the node's shards, then what ``dense`` does on the stream."""
    nodes = step.world.nodes
    return step.summing_shards() + Work(add=step.shard * (nodes + 1) / nodes)


class Torus2D(Reducer):
    """Reduce-scatter in the node, ring all-reduce of the shard on each stream, all-gather in the node.

    Between nodes ``2·(d/n)·(m − 1)/m`` values a rank, where ``dense`` sends about ``n`` times as many. Uneven
    nodes share as many shards as the smallest node has ranks.
    """

    sparse: ClassVar[bool] = False
    cost = Cost(_traffic, _seconds, _work, is_exact=True)

    def __init__(self, topology: Topology, size: int) -> None:
        super().__init__(topology, size)
        self._bounds = topology.shard_bounds(size)
        low, high = self._bounds[topology.local_rank : topology.local_rank + 2]
        self._slices = partition(int(high - low), topology.stream.size)
        self._ring = Ring(topology.stream, range(topology.stream.size))
        pairs = zip(self._bounds[:-1], np.diff(self._bounds), strict=True)
        firsts = [low + partition(int(length), len(topology.nodes))[:-1] for low, length in pairs if length]
        self._first_entries = self.arrays.asarray(
            np.unique(np.concatenate(firsts))
        )  # of the slices of all shards

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
            make_mean(parts[topology.stream.rank], topology.world.size)
        with self.measure("inter"):
            self._ring.allgather(parts)
        with self.measure("intra"):
            topology.node.allgather(own_shard, shards)
        if np.isnan(mean[self._first_entries]).any():
            return Outcome(None)
        return Outcome(mean, selected=self.size, applied=self.size)
