"""Shards: dense inside the node, an algorithm among the owners of each shard, one on every node."""

from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from commlib.reducers.mean import AnyMeanBuffer
from commlib.reducers.messages import gather_messages, swap_messages
from commlib.reducers.report import Outcome
from commlib.reducers.sparse import Flat, SelectingReducer
from commlib.topology import Topology
from commlib.vectors import SparseVector, is_one_non_finite, non_finite


class Shards(Flat):
    """Reduce-scatter in the node, select from the shard, combine on the stream, all-gather in the node.

    Local rank ``j`` of every node owns shard ``j``, ``d/n`` entries, and its residual: a node adds up before
    it selects, so dropped entries stay with the shard's owner. Uneven nodes share as many shards as the
    smallest node has ranks; the other ranks contribute and receive, and own no shard. A ``SparseVector``
    stays sparse if all entries are sent; else it is made dense.
    """

    of_node: ClassVar[bool] = True
    takes_entries: ClassVar[bool] = False

    def __init__(self, topology: Topology, size: int) -> None:
        local_rank = topology.local_rank
        self.comm = topology.stream
        self.link = "inter"
        self.bounds = topology.shard_bounds(size)
        self.low = int(self.bounds[local_rank])
        self.length = int(self.bounds[local_rank + 1]) - self.low
        self._lows, self._sizes = self.bounds[:-1].tolist(), np.diff(self.bounds).tolist()

    def collect(self, reducer: SelectingReducer, gradient: Any) -> Any:
        """Return ``g_ij = Σ_q g_iq``, this rank's shard of the node's sum (HiTopKComm, equation 4)."""
        if isinstance(gradient, SparseVector):
            return self._add_up_entries(reducer, gradient)
        with reducer.measure("intra"):
            return reducer.topology.node.reduce_scatter(gradient, self.bounds, reducer.workspace)

    def _add_up_entries(self, reducer: SelectingReducer, gradient: SparseVector) -> SparseVector:
        """Return the shard's entries, added up in the order of the node's ranks.

        The sum has arrays of its own, since the algorithm's sums are computed while it is read.
        """
        node, workspace, shards = reducer.topology.node, reducer.workspace, pairwise(self.bounds.tolist())
        if node.size == 1:
            return gradient
        messages = [reducer.encode(gradient.slice(low, high)) for low, high in shards]
        with reducer.measure("intra"):
            received = swap_messages(node, messages, workspace)
        with reducer.measure("combine"):
            return reducer.kernels.sum_sparse(
                [reducer.codec.decode(message, self.length) for message in received],
                dense=lambda size: workspace.get("shard", size),
                allocate=lambda name, length, dtype: workspace.get(f"shard's {name}", length, dtype),
            )

    def spread(
        self, reducer: SelectingReducer, combined: SparseVector, selected: int, buffer: AnyMeanBuffer
    ) -> Outcome:
        """All-gather the selected entries of the shards inside the node."""
        node, world = reducer.topology.node, reducer.topology.world
        if node.size == 1:
            return super().spread(reducer, combined, selected, buffer)
        if combined.is_finite:
            shard = combined.divided_by(world.size, out=combined.values)
        else:  # on all owners of this shard: all nodes get the NaN
            shard = non_finite(self.length, reducer.arrays)
        message = reducer.encode(shard, codec=reducer.lossless)
        with reducer.measure("intra"):
            messages = gather_messages(node, message, reducer.workspace)
        with reducer.measure("combine"):
            decoded = list(map(reducer.lossless.decode, messages, self._sizes))
            if is_one_non_finite(decoded):
                return Outcome(None)
            mean = buffer.scatter(list(zip(self._lows, decoded, strict=True)))
        return Outcome(mean, selected, sum(each.nnz for each in decoded))
