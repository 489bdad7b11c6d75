"""HiTopKComm: dense inside the node, a share of each shard between nodes (its section 3.2, algorithm 2)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from commlib.density import entries
from commlib.reducers.base import Outcome, SparseReducer, gather_messages
from commlib.topology import Topology
from commlib.vectors import Float32, total
from commlib.wire.fp32 import Fp32


class HiTopK(SparseReducer):
    """Reduce-scatter in the node, top-k of the shard, all-gather on each stream, all-gather in the node.

    Local rank ``j`` of every node owns shard ``j``, ``d/n`` entries, and its residual: a node adds up before
    it selects, so what is dropped stays with the shard's owner. Uneven nodes share as many shards as the
    smallest node has ranks; the ranks beyond contribute and receive, and own nothing.
    """

    def __init__(self, topology: Topology, size: int, **settings: Any) -> None:
        super().__init__(topology, size, **settings)
        self._bounds = topology.shard_bounds(size)
        low, high = map(int, self._bounds[topology.local_rank : topology.local_rank + 2])
        self._shard = slice(low, high)
        self._k = entries(self.density, high - low)  # k̃ = ρ·d/n
        self._residual = np.zeros(high - low, np.float32)
        # The sum of the nodes' entries is final: it travels inside the node without loss.
        self._lossless = Fp32()

    def _reduce(self, gradient: Float32) -> Outcome:
        topology, seconds = self.topology, self.seconds
        owns_shard = topology.local_rank < topology.streams

        # Step 1: g_ij = Σ_q g_iq over the shard of local rank j (equation 4).
        with seconds.measure("intra"):
            accumulated = topology.node.reduce_scatter(gradient, self._bounds)
        accumulated += self._residual

        # Step 2: κ, ι = MSTopK(g_ij, ρ·d/n) (equation 5).
        selected, finite = self.select(accumulated, self._k)
        message = self.codec.encode(selected)

        # Step 3: all-gather on stream j, and add: g_ij = Σ_p TopK(g_pj, ρ·d/n) (equation 6).
        with seconds.measure("inter"):
            lengths = self.agree(finite, len(message))
            if lengths is None:
                return Outcome(None)
            messages = [message]
            if owns_shard:
                peers = [node[topology.local_rank] for node in topology.nodes]
                messages = gather_messages(topology.stream, message, lengths[peers, 0])
        with seconds.measure("combine"):
            decoded = [self.codec.decode(each, len(accumulated)) for each in messages]
            shard = total(decoded).divided_by(topology.world.size)
            message = self._lossless.encode(shard)

        # Step 4: all-gather the shards inside the node, only what was selected.
        with seconds.measure("intra"):
            finite = bool(np.isfinite(shard.values).all())  # finite parts may add up to an infinity
            shards = topology.node.agree([len(message), shard.entries, finite])
            if not shards[:, 2].all():
                return Outcome(None)
            messages = gather_messages(topology.node, message, shards[:, 0])
        with seconds.measure("combine"):
            mean = np.zeros(self.size, np.float32)
            for low, high, each in zip(self._bounds[:-1], self._bounds[1:], messages, strict=True):
                self._lossless.decode(each, int(high - low)).add_to(mean[low:high])
            decoded[topology.node_index if owns_shard else 0].subtract_from(accumulated)
            self._residual = accumulated
        return Outcome(mean, selected.entries, int(shards[:, 1].sum()))

    @property
    def residual(self) -> Float32:
        """See :attr:`Reducer.residual`: non-zero only within the own shard."""
        residual = super().residual
        residual[self._shard] += self._residual
        return residual

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Reducer.state_dict`."""
        return super().state_dict() | {"shard": self._residual.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Reducer.load_state_dict`."""
        super().load_state_dict(state)
        self._residual = state["shard"].copy()
