"""What reducers share that add up inside the node, dense, before they select."""

import numpy as np

from commlib.reducers.base import Outcome
from commlib.reducers.messages import gather_messages
from commlib.reducers.sparse import SelectingReducer
from commlib.topology import Topology
from commlib.vectors import Float32, Index, SparseVector


class ShardReducer(SelectingReducer):
    """Reduce-scatter in the node, select from the shard, combine on the stream, all-gather in the node.

    Local rank ``j`` of every node owns shard ``j``, ``d/n`` entries, and its residual: a node adds up before
    it selects, so what is dropped stays with the shard's owner. Uneven nodes share as many shards as the
    smallest node has ranks; the ranks beyond contribute and receive, and own nothing.
    """

    def _join(self, topology: Topology) -> tuple[int, int]:
        """See :meth:`SelectingReducer._join`."""
        local_rank = topology.local_rank
        self.comm = topology.stream
        self.peers = sorted(node[local_rank] for node in topology.nodes if local_rank < len(node))
        self.link = "inter"
        self._shard_bounds = topology.shard_bounds(self.size)
        low, high = self._shard_bounds[local_rank : local_rank + 2]
        return int(low), int(high)

    def _collect(self, gradient: Float32) -> Float32:
        """Return ``g_ij = Σ_q g_iq``, this rank's shard of the node's sum (HiTopKComm, equation 4)."""
        with self.measure("intra"):
            return self.topology.node.reduce_scatter(gradient, self._shard_bounds, self.workspace)

    def sent_indices(self, mean: Float32) -> Index:
        """Return the places that were applied: a node selects together, and only owners know their part."""
        return np.flatnonzero(mean) if self.topology.world.size > 1 else super().sent_indices(mean)

    def _spread(self, combined: SparseVector, selected: int) -> Outcome:
        """All-gather the shards inside the node, only what was selected."""
        node, world = self.topology.node, self.topology.world
        shard = combined.divided_by(world.size, out=combined.values)
        if node.size == 1:
            return self._spread_alone(shard, selected)
        message = self.encode(shard, codec=self.lossless)
        with self.measure("intra"):
            # Finite parts may add up to an infinity: every node holds the same shards, and sees it.
            shards = node.allgather_ints([len(message), shard.nnz, shard.is_finite])
            if not shards[:, 2].all():
                return Outcome(None)
            messages = gather_messages(node, message, shards[:, 0], self.workspace)
        with self.measure("combine"):
            bounds = [int(bound) for bound in self._shard_bounds]
            self.step_mean.write(
                [
                    (low, self.lossless.decode(each, high - low))
                    for low, high, each in zip(bounds[:-1], bounds[1:], messages, strict=True)
                ]
            )
        return Outcome(self.step_mean.array, selected, int(shards[:, 1].sum()))

    def _spread_alone(self, shard: SparseVector, selected: int) -> Outcome:
        """Make the mean of the only shard: a node of one rank has nobody to gather from."""
        if not shard.is_finite:
            return Outcome(None)
        with self.measure("combine"):
            self.step_mean.write([(0, shard)])
        return Outcome(self.step_mean.array, selected, shard.nnz)
