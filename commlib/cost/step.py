"""What a step is, as the cost model sees it: the ranks that exchange, and the entries that they hold."""

from dataclasses import dataclass

from commlib.density import entries
from commlib.network import Link, Network
from commlib.wire import Codec, ValueCodec

HEADER_BYTES = 8


@dataclass(frozen=True)
class Group:
    """Ranks that exchange with each other: ``nodes`` of ``ranks`` each, and how many such groups there are.

    ``sharing``: groups like this one that use the nodes' cards at the same time.
    """

    nodes: int
    ranks: int
    network: Network
    sharing: int = 1

    @property
    def size(self) -> int:
        """Return how many ranks the group has."""
        return self.nodes * self.ranks

    @property
    def slowest(self) -> Link:
        """Return the link that a meeting or a ring of the group waits for."""
        return self.network.link(is_inter=self.nodes > 1)

    def allgather_ints(self, integers: int) -> float:
        """Return the seconds in which all learn ``integers`` of each, or each gives each one of them."""
        return self.slowest.agreement_seconds(self.size, integers)

    def exchange(self, message_bytes: float) -> float:
        """Return the seconds in which each sends such a message to each: ``(P − 1)·(α + b·β)`` on one link.

        Between nodes either the port of each rank or the card of each node is what takes longest.
        """
        if message_bytes == 0:
            return 0.0
        intra, inter = self.network.intra, self.network.inter
        inside = (self.ranks - 1) * intra.seconds(message_bytes)
        beyond = self.size - self.ranks
        into_card = inter.incast if self.nodes > 2 else 1.0
        through_port = beyond * (inter.alpha + message_bytes * inter.beta * into_card)
        at_once = beyond * self.ranks * self.sharing
        through_card = inter.alpha + at_once * message_bytes * inter.beta * into_card
        return max(inside, through_port, through_card if beyond else 0.0)

    def ring(self, message_bytes: float) -> float:
        """Return the seconds in which such a message of each goes round: ``(P − 1)·(α + b·β)``.

        Groups that share the cards take turns: one sends while the message of another is on its way.
        """
        if message_bytes == 0:
            return 0.0
        hops, link = self.size - 1, self.slowest
        sharing = self.sharing if self.nodes > 1 else 1
        through_card = link.alpha + hops * sharing * message_bytes * link.beta if hops else 0.0
        return max(hops * link.seconds(message_bytes), through_card)

    def hop(self, distance: int, message_bytes: float) -> float:
        """Return the seconds of a message and its header to the rank ``distance`` beyond."""
        link = self.network.link(is_inter=distance >= self.ranks and self.nodes > 1)
        return 2 * link.alpha + (HEADER_BYTES + message_bytes) * link.beta


@dataclass(frozen=True)
class Step:
    """What is to be reduced: ``size`` entries at ``density`` on the ranks of ``world``.

    ``streams``: of ranks that exchange between nodes, as many as the smallest node has ranks.
    """

    world: Group
    size: int
    density: float
    streams: int
    codec: Codec
    sums: ValueCodec

    @property
    def k(self) -> int:
        """Return the entries that a rank selects from its whole gradient."""
        return entries(self.density, self.size)

    @property
    def node(self) -> Group:
        """Return the ranks of one node."""
        return Group(1, self.world.ranks, self.world.network)

    @property
    def stream(self) -> Group:
        """Return one rank of every node; the other streams share the cards."""
        return Group(self.world.nodes, 1, self.world.network, sharing=self.streams)

    @property
    def shard(self) -> float:
        """Return the entries of a rank's shard, ``d/n``."""
        return self.size / self.streams

    def message(self, count: float, size: float) -> int:
        """Return the bytes of ``count`` entries of ``size``."""
        return self.codec.message_bytes(round(count), round(size))

    def synchronize_step(self, values: int = 0) -> float:
        """Return the seconds of the agreement that the step counts, and on ``values`` more integers."""
        return self.world.allgather_ints(2 + values)


def union(ranks: int, k: float, size: float) -> float:
    """Return the entries of the sum of ``ranks`` selections: ``d·(1 − (1 − k/d)ᴾ)`` (SparCML, B.1).

    >>> union(2, 50, 100)
    75.0
    """
    return size * (1 - (1 - k / size) ** ranks) if size else 0.0
