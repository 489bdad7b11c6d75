"""HiTopKComm: dense inside the node, a share of each shard between nodes (its section 3.2, algorithm 2)."""

from typing import Any

from commlib.arrays import is_on_gpu
from commlib.cost import Cost, LinkSeconds, Step, Work, other_messages_bytes, shards, sum_bytes, union
from commlib.density import entries
from commlib.reducers.allgather import AllGather
from commlib.reducers.hierarchical import Shards
from commlib.reducers.messages import swap_messages
from commlib.topology import LinkBytes, Topology
from commlib.vectors import VALUE_BYTES
from commlib.wire import Message

# Longest message of k entries that goes straight to all nodes: a ring's hops take longer. Longer ones go
# round a ring: if several nodes send to one card at the same time, packets are lost.
DIRECT_BYTES = 1 << 14


def _traffic(step: Step, rank: int) -> LinkBytes:
    """``(m − 1)·ρ·d/n`` entries between nodes (the paper's equation 9).

    Inside (equations 7 and 10) ``(n − 1)/n·d`` values and at most ``(n − 1)·m·ρ·d/n`` entries, fewer where
    nodes selected the same ones.
    """
    local_rank, lengths, _ = shards(step.nodes, rank, step.size)
    own, nodes = lengths[local_rank], len(step.nodes)
    inter = (nodes - 1) * step.message(step.most_selected(own), own)
    gathered = other_messages_bytes(
        lengths, local_rank, lambda each: sum_bytes(step.codec, step.most_selected(each), nodes, each)
    )
    return LinkBytes(VALUE_BYTES * (step.size - own) + gathered, inter)


def _seconds(step: Step) -> LinkSeconds:
    """HiTopKComm's equations 7, 9 and 10, with ``(m − 1)·α`` for the gather between nodes."""
    k = entries(step.density, round(step.shard))
    message = step.message(k, step.shard)
    between = step.stream.exchange(message) if message <= DIRECT_BYTES else step.stream.ring(message)
    return step.hierarchical(between, union(step.world.nodes, k, step.shard))


def _work(step: Step) -> Work:
    """Add up the node's shards and select; add up the entries of every node; gather the shards."""
    k = step.shard * step.density
    gathered = Work(entry=step.world.nodes * k, coded=step.world.nodes * k)
    applied = union(step.world.nodes, k, step.shard) * step.streams
    selected = step.selecting(step.shard, k) + step.rounding(k)
    return step.summing_shards() + selected + gathered + step.placing(applied)


class HiTopK(AllGather):
    """The all-gather of selections, among the owners of each shard.

    1. ``g_ij = Σ_q g_iq``, the reduce-scatter in the node (equation 4): ``Shards.collect``.
    2. ``κ, ι = MSTopK(g_ij, ρ·d/n)`` (equation 5): ``SelectingReducer``, with the shard's residual added.
    3. The all-gather on stream ``j`` and ``g_ij = Σ_p TopK(g_pj)`` (equation 6): ``AllGather._combine``.
    4. The all-gather of the shards in the node: ``Shards.spread``.
    """

    layout_type = Shards
    cost = Cost(_traffic, _seconds, _work, is_exact=True)

    def __init__(self, topology: Topology, size: int, **options: Any) -> None:
        super().__init__(topology, size, **options)
        self._is_direct = self._sends_little()

    def _sends_little(self) -> bool:
        return self.codec.message_bytes(self.k, self.length) <= DIRECT_BYTES

    def _gather(self, message: Message) -> list[Message]:
        """See :meth:`AllGather._gather`: each rank's message goes straight to all others if they are short.

        The decision follows the density of the previous step, which all ranks have compared.
        """
        is_direct, self._is_direct = self._is_direct, self._sends_little()
        if is_on_gpu(message) or not is_direct:
            return super()._gather(message)
        return swap_messages(self.comm, [message] * self.comm.size, self.workspace)
