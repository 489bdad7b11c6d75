"""What reducers share that add up inside the node, dense, before they select."""

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from commlib.arrays import to_host
from commlib.reducers.base import Outcome
from commlib.reducers.messages import gather_messages
from commlib.reducers.passenger import NUMBER_BYTES
from commlib.reducers.sparse import SelectingReducer
from commlib.topology import Topology
from commlib.vectors import Float32, Index, SparseVector
from commlib.wire import Message


class ShardReducer(SelectingReducer):
    """Reduce-scatter in the node, select from the shard, combine on the stream, all-gather in the node.

    Local rank ``j`` of every node owns shard ``j``, ``d/n`` entries, and its residual: a node adds up before
    it selects, so what is dropped stays with the shard's owner. Uneven nodes share as many shards as the
    smallest node has ranks; the ranks beyond contribute and receive, and own nothing.

    A passenger's numbers are about shards, and each follows the entries of its shard in the same message.
    """

    carries: ClassVar[bool] = True

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
        lengths = shards[:, 0]
        message, lengths_with_numbers = self._append_numbers(message, lengths, shard)
        with self.measure("intra"):
            messages = gather_messages(node, message, lengths_with_numbers, self.workspace)
        with self.measure("combine"):
            received = zip(self._parts(), messages, lengths, strict=True)
            self.step_mean.write(
                [
                    (low, self.lossless.decode(each[:length], high - low))
                    for (low, high), each, length in received
                ]
            )
        applied = int(shards[:, 1].sum())
        if self._carriage is None:
            return Outcome(self.step_mean.array, selected, applied)
        tails = [to_host(each[length:].copy()) for each, length in zip(messages, lengths, strict=True)]
        return Outcome(self.step_mean.array, selected, applied, [tail.view(np.float64) for tail in tails])

    def _spread_alone(self, shard: SparseVector, selected: int) -> Outcome:
        """Make the mean of the only shard: a node of one rank has nobody to gather from."""
        if not shard.is_finite:
            return Outcome(None)
        with self.measure("combine"):
            numbers = [] if self._carriage is None else [self._carriage.load(0, shard)]
            self.step_mean.write([(0, shard)])
        return Outcome(self.step_mean.array, selected, shard.nnz, numbers)

    def _append_numbers(
        self, message: Message, lengths: npt.NDArray[np.int64], shard: SparseVector
    ) -> tuple[Message, npt.NDArray[np.int64]]:
        """Return the message and the lengths of all, with the passenger's numbers at the end of each."""
        carriage = self._carriage
        if carriage is None:
            return message, lengths
        with self.measure("combine"):
            numbers = carriage.load(self.topology.local_rank, shard)
            message = np.concatenate([message, self.arrays.asarray(numbers.view(np.uint8))])
        return message, lengths + NUMBER_BYTES * carriage.counts

    def _parts(self) -> list[tuple[int, int]]:
        bounds = [int(bound) for bound in self._shard_bounds]
        return list(zip(bounds[:-1], bounds[1:], strict=True))
