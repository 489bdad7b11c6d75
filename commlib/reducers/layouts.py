"""Layouts: a rank reduces its whole gradient with all ranks, or a shard of it with the shard's owners."""

from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import numpy as np

from commlib.arrays import Workspace
from commlib.reducers.mean import AnyMeanBuffer
from commlib.reducers.messages import gather_messages, swap_messages
from commlib.reducers.report import Outcome
from commlib.topology import Topology
from commlib.transport.base import Ring
from commlib.vectors import SparseVector, is_one_non_finite, non_finite
from commlib.wire import Codec, Message


class Sender(Protocol):
    """What a layout uses of its reducer."""

    topology: Topology
    arrays: Any
    kernels: Any
    workspace: Workspace
    codec: Codec
    lossless: Codec
    returns_mean: bool

    def measure(self, stage: str) -> AbstractContextManager[None]:
        """See ``Reducer.measure``."""

    def encode(
        self, vector: SparseVector, at: int = 0, *, codec: Codec | None = None, keeps: bool = True
    ) -> Message:
        """See ``ResidualReducer.encode``."""


class Flat:
    """The flat layout: every rank selects from its whole gradient, and all ranks combine their selections.

    ``comm``: the ranks that combine, ``ring`` their order in rings, ``is_spread`` whether each is on a node
    of its own; ``link``: the stage that their exchange counts as. ``low``, ``length``: the range of entries
    that this rank selects from. ``of_node``: whether what a rank selects is its whole node's.
    ``takes_entries``: whether ``collect`` takes a ``SparseVector``, and returns it, also where a selector
    then picks some of its entries.
    """

    of_node: ClassVar[bool] = False
    takes_entries: ClassVar[bool] = True

    def __init__(self, topology: Topology, size: int) -> None:
        self.comm = topology.world
        self.ring = Ring(self.comm, [rank for node in topology.nodes for rank in node])
        self.is_spread = len(topology.nodes) == self.comm.size
        self.link = topology.slowest_link
        self.low, self.length = 0, size

    def collect(self, reducer: Sender, gradient: Any) -> Any:
        """Return the vector of ``length`` entries that this rank selects from."""
        return gradient

    def spread(
        self, reducer: Sender, combined: SparseVector, selected: int, buffer: AnyMeanBuffer
    ) -> Outcome:
        """Return the mean, which ``combined`` is or is the sum for, or none if it is not finite."""
        with reducer.measure("combine"):
            if not _to_mean(reducer, combined):  # on all ranks: they hold the same sum
                return Outcome(None)
            written = buffer.scatter([(0, combined)])
        return Outcome(written, selected, combined.nnz)


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
        self.ring, self.is_spread = Ring(self.comm, range(self.comm.size)), True
        self.link = "inter"
        self.bounds = topology.shard_bounds(size)
        self.low = int(self.bounds[local_rank])
        self.length = int(self.bounds[local_rank + 1]) - self.low
        self._lows, self._sizes = self.bounds[:-1].tolist(), np.diff(self.bounds).tolist()

    def collect(self, reducer: Sender, gradient: Any) -> Any:
        """Return ``g_ij = Σ_q g_iq``, this rank's shard of the node's sum (HiTopKComm, equation 4)."""
        if isinstance(gradient, SparseVector):
            return self._add_up_entries(reducer, gradient)
        with reducer.measure("intra"):
            return reducer.topology.node.reduce_scatter(gradient, self.bounds, reducer.workspace)

    def _add_up_entries(self, reducer: Sender, gradient: SparseVector) -> SparseVector:
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
            total: SparseVector = reducer.kernels.sum_sparse(
                [reducer.codec.decode(message, self.length) for message in received],
                dense=lambda size: workspace.get("shard", size),
                allocate=lambda name, length, dtype: workspace.get(f"shard's {name}", length, dtype),
            )
        return total

    def spread(
        self, reducer: Sender, combined: SparseVector, selected: int, buffer: AnyMeanBuffer
    ) -> Outcome:
        """All-gather the selected entries of the shards inside the node."""
        node = reducer.topology.node
        if node.size == 1:
            return super().spread(reducer, combined, selected, buffer)
        if not _to_mean(reducer, combined):  # on all owners of this shard: all nodes get the NaN
            combined = non_finite(self.length, reducer.arrays)
        message = reducer.encode(combined, codec=reducer.lossless)
        with reducer.measure("intra"):
            messages = gather_messages(node, message, reducer.workspace)
        with reducer.measure("combine"):
            decoded = list(map(reducer.lossless.decode, messages, self._sizes))
            if is_one_non_finite(decoded):
                return Outcome(None)
            mean = buffer.scatter(list(zip(self._lows, decoded, strict=True)))
        return Outcome(mean, selected, sum(each.nnz for each in decoded))


def _to_mean(reducer: Sender, combined: SparseVector) -> bool:
    """Make the mean of all ranks of a sum, in place, if it is not one yet; return whether it is finite."""
    if reducer.returns_mean:
        return not is_one_non_finite([combined])
    return combined.divide(reducer.topology.world.size)
