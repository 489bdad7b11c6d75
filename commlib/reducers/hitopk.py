"""HiTopKComm: dense inside the node, a share of each shard between nodes (its section 3.2, algorithm 2)."""

from typing import Any

from commlib.arrays import is_on_gpu
from commlib.cost import Cost, LinkSeconds, Step, by_link
from commlib.reducers.allgather import AllGather
from commlib.reducers.messages import swap_messages
from commlib.topology import LinkBytes, Topology
from commlib.wire import Message

# Longest message of k entries that goes straight to all nodes: a ring's hops take longer. Longer ones go
# round a ring: if several nodes send to one card at the same time, packets are lost.
DIRECT_BYTES = 1 << 14


def _traffic(step: Step, rank: int) -> LinkBytes:
    """``(m − 1)·ρ·d/n`` entries between nodes (the paper's equation 9)."""
    message = step.message(step.most_selected(step.size), step.size)
    if message > DIRECT_BYTES:
        return AllGather.cost.traffic(step, rank)
    return by_link(step.nodes, rank, dict.fromkeys(range(step.ranks), message))


def _seconds(step: Step) -> LinkSeconds:
    """HiTopKComm's equation 9, with ``(m − 1)·α`` for the gather between nodes."""
    message = step.message(step.k, step.size)
    if message > DIRECT_BYTES:
        return AllGather.cost.seconds(step)
    return step.on_slowest_link(step.world.exchange(message))


class HiTopK(AllGather):
    """The all-gather of selections, among the owners of each shard.

    1. ``g_ij = Σ_q g_iq``, the reduce-scatter in the node (equation 4): ``Shards.collect``.
    2. ``κ, ι = MSTopK(g_ij, ρ·d/n)`` (equation 5): ``SelectingReducer``, with the shard's residual added.
    3. The all-gather on stream ``j`` and ``g_ij = Σ_p TopK(g_pj)`` (equation 6): ``AllGather._combine``.
    4. The all-gather of the shards in the node: ``Shards.spread``.
    """

    cost = Cost(_traffic, _seconds, AllGather.cost.work, is_exact=True)

    def __init__(self, topology: Topology, size: int, *, hierarchical: bool = True, **options: Any) -> None:
        super().__init__(topology, size, hierarchical=hierarchical, **options)
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
