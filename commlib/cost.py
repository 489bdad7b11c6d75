"""What a step of a reducer costs, in closed form: the bytes that it sends, the seconds, and the computing.

Each reducer declares its own :class:`Cost` in its own file, put together from the pieces of this module and
of :mod:`commlib.work`. :func:`commlib.predict` and :func:`commlib.bytes_sent` evaluate it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from commlib.density import entries
from commlib.entries import ENTRIES_A_LINE
from commlib.network import EAGER_BYTES, PIECES, Link, Network
from commlib.selection import EVERYTHING, selector_class
from commlib.topology import LinkBytes
from commlib.vectors import VALUE_BYTES, delta, index_dtype, partition
from commlib.wire import Codec, make_codec
from commlib.work import Work

# Large entries are clustered: of gradients like those of training the fullest of 16 ranges has nearly all.
CLUSTERED = 16

Nodes = Sequence[Sequence[int]]


def sparse_bytes(count: int, size: int, value_bytes: int = VALUE_BYTES) -> int:
    """Return the bytes of ``count`` entries of a vector of ``size``: index and value each, dense past δ."""
    if count >= delta(size, value_bytes):
        return size * value_bytes
    return count * (index_dtype(size).itemsize + value_bytes)


def sum_bytes(codec: Codec, k: int, ranks: int, size: int) -> int:
    """Return the most bytes of a lossless message with the sum of ``ranks`` messages of ``k`` entries.

    A dense message makes the sum dense: few bits a value are dense from few entries on.
    """
    most = min(size, ranks * k)
    is_dense = codec.message_bytes(most, size) == codec.message_bytes(size, size)
    return size * VALUE_BYTES if is_dense else sparse_bytes(most, size)


def ring_bytes(size: int, ranks: int, rank: int, right: int, value_bytes: int = VALUE_BYTES) -> int:
    """Return the bytes that a rank passes on in a ring all-reduce: ``2·d·(ranks − 1)/ranks`` values.

    It passes on all parts but its own to be added up, and all but its right neighbour's afterwards.
    """
    lengths = partition_lengths(size, ranks)
    return value_bytes * (2 * size - lengths[rank] - lengths[right])


def ring_traffic(nodes: Nodes, rank: int, size: int, value_bytes: int = VALUE_BYTES) -> LinkBytes:
    """Return what a rank sends in a ring all-reduce of ``size`` values, through one node after the other."""
    ring = [each for node in nodes for each in node]
    right = ring[(ring.index(rank) + 1) % len(ring)]
    return by_link(nodes, rank, {right: ring_bytes(size, len(ring), rank, right, value_bytes)})


# The longest part of a vector that is all-reduced by doubling: of longer ones a ring, of more latencies, was
# faster at 0.2 Gbit/s.
DOUBLING_BYTES = 64 << 10


def is_doubled(size: int, ranks: int) -> bool:
    """Return whether ranks on a node each all-reduce so many values by doubling, and not round a ring."""
    return VALUE_BYTES * size <= DOUBLING_BYTES * ranks


def allreduce_traffic(nodes: Nodes, rank: int, size: int) -> LinkBytes:
    """Return what a rank sends where ``ResidualReducer.all_reduce`` adds up ``size`` values.

    By doubling it is all parts but its own to be added up, and then ``P − 1`` parts, as in a ring.
    """
    if len(nodes) != sum(map(len, nodes)) or not is_doubled(size, len(nodes)):
        return ring_traffic(nodes, rank, size)
    ranks = [each for (each,) in nodes]
    lengths, place = partition_lengths(size, len(ranks)), ranks.index(rank)
    counts = (count for _, count in doubling(len(ranks)))
    gathered = sum(lengths[(place + each) % len(ranks)] for count in counts for each in range(count))
    return LinkBytes(inter=VALUE_BYTES * (size - lengths[place] + gathered))


def other_messages_bytes(lengths: Sequence[int], rank: int, message_bytes: Callable[[int], int]) -> int:
    """Return the bytes that a rank passes on in a ring all-gather: all messages but its right neighbour's.

    ``lengths``: of the parts, each of which travels in ``message_bytes(length)``.
    """
    right = (rank + 1) % len(lengths)
    return sum(message_bytes(length) for place, length in enumerate(lengths) if place != right)


LENGTH_BYTES = 4  # ahead of each of the messages that are sent as one


def doubling(ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the distance of each round of Bruck's all-gather, and how many messages a rank sends in it.

    >>> list(doubling(5))
    [(1, 1), (2, 2), (4, 1)]
    """
    return ((1 << each, min(1 << each, ranks - (1 << each))) for each in range((ranks - 1).bit_length()))


def doubling_bytes(ranks: int, place: int, message_bytes: Callable[[int], int]) -> dict[int, int]:
    """Return what the rank at a place sends to each other place in Bruck's all-gather."""
    return {
        (place - distance) % ranks: sum(
            LENGTH_BYTES + message_bytes((place + each) % ranks) for each in range(count)
        )
        for distance, count in doubling(ranks)
    }


def by_link(nodes: Nodes, rank: int, to_each: Mapping[int, int]) -> LinkBytes:
    """Return the sums of the bytes to each other rank, by link; ranks that do not exist are ignored."""
    own = next(node for node in nodes if rank in node)
    return LinkBytes(
        intra=sum(to_each.get(to, 0) for to in own if to != rank),
        inter=sum(to_each.get(to, 0) for node in nodes if node is not own for to in node),
    )


def partition_lengths(size: int, parts: int) -> list[int]:
    """Return the lengths of the parts of ``commlib.vectors.partition``."""
    return [int(length) for length in np.diff(partition(size, parts))]


def shards(nodes: Nodes, rank: int, size: int) -> tuple[int, list[int], list[int]]:
    """Return a rank's local rank, the lengths of its node's shards by local rank, and its stream's ranks."""
    node = next(node for node in nodes if rank in node)
    streams, local_rank = min(map(len, nodes)), list(node).index(rank)
    lengths = partition_lengths(size, streams) + [0] * (len(node) - streams)
    return local_rank, lengths, [each[local_rank] for each in nodes if len(each) > local_rank]


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
        return self.nodes * self.ranks

    @property
    def slowest(self) -> Link:
        """Return the slowest link of the group, which a ring or a barrier waits for."""
        return self.network.link(is_inter=self.nodes > 1)

    def allgather_ints(self, integers: int) -> float:
        """Return the seconds of an all-gather of ``integers`` of each rank, or of an all-to-all of one."""
        return self.slowest.agreement_seconds(self.size, integers)

    def exchange(self, message_bytes: float) -> float:
        """Return the seconds of an all-to-all of such messages: ``(P − 1)·(α + b·β)`` on one link.

        Between nodes either the port of each rank or the card of each node takes the longest. Where a link
        has a ``gap``, the messages of a rank are on their way together.
        """
        if message_bytes == 0:
            return 0.0
        intra, inter = self.network.intra, self.network.inter
        inside = intra.seconds_at_once(self.ranks - 1, message_bytes) if self.ranks > 1 else 0.0
        beyond = self.size - self.ranks
        if not beyond:
            return inside
        crowded = replace(inter, beta=inter.beta * (inter.incast if self.nodes > 2 else 1.0))
        through_port = crowded.seconds_at_once(beyond, message_bytes)
        through_card = crowded.seconds(beyond * self.ranks * self.sharing * message_bytes)
        return max(inside, through_port, through_card)

    def gather(self, message_bytes: float) -> float:
        """Return the seconds in which all others send such a message to one rank, whose port is never idle.

        Where packets are dropped, others take their place: there is no ``incast``.
        """
        if message_bytes == 0:
            return 0.0
        senders = self.size - self.ranks if self.nodes > 1 else self.ranks - 1
        return self.slowest.seconds_at_once(senders, message_bytes) if senders else 0.0

    def ring(self, message_bytes: float, rounds: int = 1, *, piece_bytes: float = EAGER_BYTES) -> float:
        """Return the seconds of ``rounds`` trips of all messages round a ring, each ``(P − 1)·(α + b·β)``.

        Groups that share the cards take turns: one sends while the message of another is on its way. Where
        the slowest link has a ``gap``, a message waits for that link once per node and round, while the
        messages before and after it travel. Long messages go in pieces, so that a hop begins when the first
        piece of the previous hop has arrived.
        """
        hops, link = rounds * (self.size - 1), self.slowest
        if message_bytes == 0 or not hops:
            return 0.0
        sharing = self.sharing if self.nodes > 1 else 1
        shared = sharing * message_bytes
        slow, whole = hops, link.seconds(hops * shared)
        if link.gap is not None and self.nodes > 1:
            slow, whole = min(hops, rounds * self.nodes), link.seconds_at_once(hops, shared)
        turn = link.seconds(message_bytes)
        if link.gap is not None and message_bytes > piece_bytes:
            at_once = max(message_bytes * link.beta, message_bytes / piece_bytes * link.gap)
            turn = max(link.seconds(piece_bytes), at_once)
        in_turns = (slow - 1) * turn + link.seconds(shared)
        return max(in_turns + (hops - slow) * self.network.intra.seconds(message_bytes), whole)

    def ring_of_messages(self, message_bytes: float, longest: float = 0.0) -> float:
        """Return the seconds of ``ring`` for messages whose lengths only their senders know.

        ``message_bytes``: on average. ``longest``: bytes of the longest one, where they are not alike. A hop
        passes on a message as a whole or, if it is long, in pieces, also on links without a ``gap``.
        """
        hops, most = self.size - 1, max(message_bytes, longest)
        is_cut = self.nodes > 1 and most >= 2 * EAGER_BYTES // PIECES
        piece = EAGER_BYTES // PIECES if is_cut else most
        alike = self.ring(message_bytes, piece_bytes=piece)
        if longest <= message_bytes or not hops:
            return alike
        link, sharing = self.slowest, self.sharing if self.nodes > 1 else 1
        slow = hops if link.gap is None or self.nodes == 1 else min(hops, self.nodes)
        sent = max(link.seconds(sharing * longest), link.alpha + longest / piece * (link.gap or 0.0))
        rest = (slow - 1) * link.seconds(piece) + (hops - slow) * self.network.intra.seconds(piece)
        return max(alike, sent + rest)

    def round(self, distance: int, message_bytes: float) -> float:
        """Return the seconds in which each sends to the rank ``distance`` beyond, through its node's card."""
        senders = min(distance, self.ranks) if self.nodes > 1 else 0
        link = self.network.link(is_inter=bool(senders))
        return link.seconds(message_bytes * max(1, senders) * self.sharing)

    def hop(self, distance: int, message_bytes: float) -> float:
        """Return the seconds of a message to the rank ``distance`` beyond, of each group at the same time."""
        is_inter = distance >= self.ranks and self.nodes > 1
        return self.network.link(is_inter=is_inter).seconds(message_bytes * (self.sharing if is_inter else 1))


@dataclass(frozen=True)
class Step:
    """One step of a reducer: ``size`` entries to reduce on the ranks of ``nodes``.

    ``nodes``: the world ranks of every node, as in ``Topology.nodes``. ``options``: all that the reducer
    takes, with their defaults. Closed forms of seconds take all nodes to be as large as the largest.
    ``whole``: for a step on a stream, one rank of every node, the step of all ranks. ``clustered``: large
    entries lie close together, so that one range holds most; bytes are counted as if they were spread evenly.
    ``settled``: thresholds hold for their periods, as in training. If not, residuals grow and more entries
    are sent, as with :class:`commlib.tuning.probe.Gradients`, whose large entries stay where they are.
    """

    nodes: Nodes
    size: int
    options: Mapping[str, Any]
    network: Network = Network()
    whole: "Step | None" = None
    clustered: bool = True
    settled: bool = True

    @cached_property
    def world(self) -> Group:
        sharing = self.whole.streams if self.whole else 1
        return Group(len(self.nodes), max(map(len, self.nodes)), self.network, sharing)

    def of_shard(self, size: int) -> "Step":
        """Return the step of the owners of a shard of ``size`` entries: one rank of every node."""
        nodes = [[place] for place in range(len(self.nodes))]
        return replace(self, nodes=nodes, size=size, whole=self)

    @cached_property
    def ranks(self) -> int:
        """Return how many ranks there are, also on uneven nodes."""
        return sum(map(len, self.nodes))

    @cached_property
    def streams(self) -> int:
        """Return the number of streams between nodes, which is the number of ranks of the smallest node."""
        return min(map(len, self.nodes))

    @property
    def density(self) -> float:
        """Return the share of the entries that is selected; 1 where the reducer has no such option."""
        return float(self.options.get("density", 1.0))

    @cached_property
    def codec(self) -> Codec:
        return make_codec(self.options.get("wire", "fp32"))

    @property
    def k(self) -> int:
        """Return the entries that a rank selects from its whole gradient."""
        return entries(self.density, self.size)

    @property
    def node(self) -> Group:
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

    def fullest(self, selected: float) -> float:
        """Return how many of so many entries are in the fullest of ``P`` equal ranges, which all wait for."""
        share = min(1.0, (CLUSTERED if self.clustered else 1) / self.world.size)
        return min(share * selected, self.size / self.world.size)

    def message(self, count: float, size: float) -> int:
        """Return the bytes of ``count`` entries of ``size``."""
        return self.codec.message_bytes(round(count), round(size))

    def synchronize_step(self, values: int = 0) -> float:
        """Return the seconds of one ``Reducer.synchronize_step`` of ``values`` integers."""
        return self.world.allgather_ints(2 + values)

    def rest_of_comparison(self, seconds: float) -> LinkSeconds:
        """Return the seconds that the comparison of settings lasts beyond the step's ``seconds``.

        All ranks compare, those of a stream while their nodes add up before.
        """
        if self.whole:
            return self.whole.rest_of_comparison(self.whole.scatter + seconds)
        return self.on_slowest_link(max(0.0, self.world.allgather_ints(1) - seconds))

    def after_comparison(self, seconds: float) -> LinkSeconds:
        """Return the seconds of an exchange of all ranks that begins when the settings are compared."""
        intra, inter = self.on_slowest_link(seconds)
        compared_intra, compared_inter = self.rest_of_comparison(0.0)
        return intra + compared_intra, inter + compared_inter

    def on_slowest_link(self, seconds: float) -> LinkSeconds:
        """Return the seconds of an exchange of all ranks, which the slowest link dictates."""
        return (0.0, seconds) if self.world.nodes > 1 else (seconds, 0.0)

    @property
    def scatter(self) -> float:
        """Return the seconds of the reduce-scatter inside the node."""
        return self.node.exchange(VALUE_BYTES * self.shard)

    def summing_shards(self) -> Work:
        """Return the work to add up the shards of the node's other ranks."""
        return Work(add=self.shard * (self.streams - 1))

    def selecting(self, size: float, k: float) -> Work:
        """Return the work to select; a decay of the residual takes one more pass."""
        return Work.selecting(size, k) + Work(add=size * self.decays)

    @property
    def decays(self) -> bool:
        """Return whether the residual is multiplied by a factor in each step."""
        return bool(self.options.get("decay", 1.0) != 1)

    def ring_allreduce(self, values: float) -> float:
        """Return the seconds of a ring all-reduce of so many values among all ranks."""
        return self.world.ring(VALUE_BYTES * values / self.world.size, rounds=2)

    def allreduce(self, values: float) -> float:
        """Return the seconds of ``ResidualReducer.all_reduce`` of so many values."""
        world = self.world
        if world.ranks > 1 or not is_doubled(round(values), world.size):
            return self.ring_allreduce(values)
        part = VALUE_BYTES * values / world.size
        return 2 * sum(world.round(distance, count * part) for distance, count in doubling(world.size))

    def rounding(self, k: float) -> Work:
        """Return the work to find and keep the rounding errors of ``k`` entries in a lossy codec."""
        return Work() if self.codec.lossless else Work(coded=k, place=2 * k)

    def placing(self, applied: float) -> Work:
        """Return the work to write the entries of the result to an array that had those of an earlier one.

        Where they are few, only their places are cleared; on a GPU all are, which takes it little time.
        """
        if applied * ENTRIES_A_LINE < self.size:
            return Work(place=2 * applied)
        return Work(fill=self.size, place=applied)

    def placing_sum(self) -> Work:
        """Return the work of ``placing`` for the sum of all ranks' selections."""
        return self.placing(union(self.world.size, self.k, self.size))


def union(ranks: int, k: float, size: float) -> float:
    """Return the entries of the sum of ``ranks`` selections: ``d·(1 − (1 − k/d)ᴾ)`` (SparCML, B.1).

    >>> union(2, 50, 100)
    75.0
    """
    return size * (1 - (1 - k / size) ** ranks) if size else 0.0


def whole_size(step: Step) -> int:
    """Return the size of the step: entries of a sum that is dense."""
    return step.size


def _of_all(step: Step) -> float:
    """Return the entries of the sum of all ranks' selections."""
    return union(step.world.size, step.k, step.size)


@dataclass(frozen=True)
class Cost:
    """What one step of a reducer costs.

    ``traffic(step, rank)``: payload bytes that a world rank sends: between nodes exact with ``is_exact``, as
    long as the selector returns ``k`` entries and the length of a message depends on their number alone; all
    others are upper bounds. ``seconds(step)``: of the messages of an average step. ``work(step)``: what one
    rank computes. ``applied(step)``: entries of the sum, on average; ``most(step)``: at most, where that is
    not what all ranks together select.
    """

    traffic: Callable[[Step, int], LinkBytes]
    seconds: Callable[[Step], LinkSeconds]
    work: Callable[[Step], Work]
    is_exact: bool
    applied: Callable[[Step], float] = _of_all
    most: Callable[[Step], int] | None = None

    def hierarchical(self) -> "Cost":
        """Return the cost of the same algorithm on shards, dense inside the nodes.

        Between nodes it is that of a step on a stream. Inside, HiTopKComm's equations 7 and 10 hold:
        ``(n − 1)/n·d`` values of the reduce-scatter, and the entries of each other shard's sum.
        """
        return Cost(self._traffic_of_shards, self._seconds_of_shards, self._work_of_shards, self.is_exact)

    def _traffic_of_shards(self, step: Step, rank: int) -> LinkBytes:
        local_rank, lengths, stream = shards(step.nodes, rank, step.size)
        own = lengths[local_rank]
        inter = self.traffic(step.of_shard(own), stream.index(rank)).inter if own else 0
        gathered = other_messages_bytes(lengths, local_rank, lambda each: self._sum_bytes(step, each))
        return LinkBytes(VALUE_BYTES * (step.size - own) + gathered, inter)

    def _sum_bytes(self, step: Step, length: int) -> int:
        """Return the most bytes of the sum of a shard of ``length`` entries."""
        if self.most is not None:
            return sparse_bytes(min(length, self.most(step.of_shard(length))), length) if length else 0
        return sum_bytes(step.codec, step.most_selected(length), len(step.nodes), length)

    def _seconds_of_shards(self, step: Step) -> LinkSeconds:
        shard = step.of_shard(round(step.shard))
        intra, inter = self.seconds(shard)
        gather = step.node.ring_of_messages(sparse_bytes(round(self.applied(shard)), shard.size))
        return step.scatter + intra + gather, inter

    def _work_of_shards(self, step: Step) -> Work:
        shard = step.of_shard(round(step.shard))
        work = step.summing_shards() + self.work(shard)
        if step.world.ranks == 1:  # no other rank of the node waits for the sum
            return work
        return work + shard.placing(self.applied(shard)) * (step.streams - 1) + Work(messages=step.streams)
