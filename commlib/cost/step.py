"""A step as the cost model sees it: the ranks that exchange, and the entries that they hold.

The papers' equations count what one rank sends over one kind of link; here the ranks of a node share its
card, and every message of ours is counted. How many entries a sum
holds follows from uniformly random selections (SparCML, appendix B.1); real ones overlap and crowd together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from commlib.cost.compute import Work
from commlib.cost.traffic import Nodes, sparse_bytes
from commlib.density import entries
from commlib.network import Link, Network
from commlib.selection import EVERYTHING, selector_class
from commlib.vectors import VALUE_BYTES
from commlib.wire import Codec, make_codec

LinkSeconds = tuple[float, float]  # inside the node, and between nodes


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
        """Return the slowest link of the group, which a ring or a barrier waits for."""
        return self.network.link(is_inter=self.nodes > 1)

    def allgather_ints(self, integers: int) -> float:
        """Return the seconds of an all-gather of ``integers`` of each rank, or of an all-to-all of one."""
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

    def ring(self, message_bytes: float, rounds: int = 1) -> float:
        """Return the seconds in which such a message of each goes round so often: ``(P − 1)·(α + b·β)``.

        Groups that share the cards take turns: one sends while the message of another is on its way.
        """
        if message_bytes == 0:
            return 0.0
        hops, link = rounds * (self.size - 1), self.slowest
        if not hops:
            return 0.0
        sharing = self.sharing if self.nodes > 1 else 1
        turn = message_bytes * link.beta
        return max(hops * (link.alpha + turn) + (sharing - 1) * turn, link.alpha + hops * sharing * turn)

    def hop(self, distance: int, message_bytes: float) -> float:
        """Return the seconds of a message to the rank ``distance`` beyond."""
        return self.network.link(is_inter=distance >= self.ranks and self.nodes > 1).seconds(message_bytes)


@dataclass(frozen=True)
class Step:
    """One step of a reducer: ``size`` entries to reduce on the ranks of ``nodes``.

    ``nodes``: the world ranks of every node, as in ``Topology.nodes``. ``options``: all that the reducer
    takes, with their defaults. Closed forms of seconds take all nodes to be as large as the largest.
    """

    nodes: Nodes
    size: int
    options: Mapping[str, Any]
    network: Network = Network()

    @cached_property
    def world(self) -> Group:
        """Return all ranks."""
        return Group(len(self.nodes), max(map(len, self.nodes)), self.network)

    @cached_property
    def ranks(self) -> int:
        """Return how many ranks there are, also on uneven nodes."""
        return sum(map(len, self.nodes))

    @cached_property
    def streams(self) -> int:
        """Return how many streams exchange between nodes: as many as the smallest node has ranks."""
        return min(map(len, self.nodes))

    @property
    def density(self) -> float:
        """Return the share of the entries that is selected; 1 where the reducer has no such option."""
        return float(self.options.get("density", 1.0))

    @cached_property
    def codec(self) -> Codec:
        """Return the codec of the messages."""
        return make_codec(self.options.get("wire", "fp32"))

    @property
    def k(self) -> int:
        """Return the entries that a rank selects from its whole gradient."""
        return entries(self.density, self.size)

    @property
    def node(self) -> Group:
        """Return the ranks of one node."""
        return Group(1, self.world.ranks, self.network)

    @property
    def stream(self) -> Group:
        """Return one rank of every node; the other streams share the cards."""
        return Group(self.world.nodes, 1, self.network, sharing=self.streams)

    @property
    def shard(self) -> float:
        """Return the entries of a rank's shard, ``d/n``."""
        return self.size / self.streams

    def most_selected(self, size: int) -> int:
        """Return the most entries that the selector may return of ``size``: ``k``, or a multiple of it."""
        selector = self.options.get("selector", "exact")
        at_most = 1 if selector == EVERYTHING else selector_class(selector).at_most
        return min(size, at_most * entries(self.density, size))

    def message(self, count: float, size: float) -> int:
        """Return the bytes of ``count`` entries of ``size``."""
        return self.codec.message_bytes(round(count), round(size))

    def synchronize_step(self, values: int = 0) -> float:
        """Return the seconds of ``Reducer.synchronize_step`` with so many values, where it is called."""
        return self.world.allgather_ints(2 + values)

    def rest_of_comparison(self, seconds: float) -> LinkSeconds:
        """Return what is left of the comparison of settings when ``seconds`` of the step have passed."""
        return self.on_slowest_link(max(0.0, self.world.allgather_ints(1) - seconds))

    def on_slowest_link(self, seconds: float) -> LinkSeconds:
        """Return the seconds of an exchange of all ranks, which the slowest link dictates."""
        return (0.0, seconds) if self.world.nodes > 1 else (seconds, 0.0)

    def hierarchical(self, between: float, applied: float) -> LinkSeconds:
        """Return the seconds of a reduce-scatter inside, ``between``, and an all-gather inside.

        ``applied``: entries of each shard's sum.
        """
        return self.scatter + self.node.ring(sparse_bytes(round(applied), round(self.shard))), between

    @property
    def scatter(self) -> float:
        """Return the seconds of the reduce-scatter inside the node."""
        return self.node.exchange(VALUE_BYTES * self.shard)

    def summing_shards(self) -> Work:
        """Return the work to add up the shards of the node's other ranks."""
        return Work(add=self.shard * (self.streams - 1))

    def selecting(self, size: float, k: float) -> Work:
        """Return the work to select; with a decay, that of a residual is a pass of its own."""
        decays = self.options.get("decay", 1.0) != 1
        return Work.selecting(size, k) + Work(add=size if decays else 0.0)

    def rounding(self, k: float) -> Work:
        """Return the work to find what a lossy codec rounded away of ``k`` entries, and to keep it."""
        return Work() if self.codec.lossless else Work(coded=k, place=2 * k)

    def placing(self, applied: float) -> Work:
        """Return the work to fill a dense vector with zeros and write the entries of the result to it."""
        return Work(fill=self.size, place=applied)

    def placing_sum(self) -> Work:
        """Return the work of ``placing`` for the sum of what all ranks selected."""
        return self.placing(union(self.world.size, self.k, self.size))


def union(ranks: int, k: float, size: float) -> float:
    """Return the entries of the sum of ``ranks`` selections: ``d·(1 − (1 − k/d)ᴾ)`` (SparCML, B.1).

    >>> union(2, 50, 100)
    75.0
    """
    return size * (1 - (1 - k / size) ** ranks) if size else 0.0
