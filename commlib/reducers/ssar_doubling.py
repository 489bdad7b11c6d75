"""SparCML's recursive doubling on sparse vectors (SSAR_Recursive_double)."""

from collections.abc import Sequence

from commlib.cost import Cost, Group, LinkSeconds, Step, by_link, sparse_bytes, sum_bytes, union
from commlib.network import Link
from commlib.reducers.messages import exchange_message, receive_message
from commlib.reducers.sparse import SelectingReducer
from commlib.topology import LinkBytes
from commlib.vectors import SparseVector
from commlib.wire import Message
from commlib.work import Work


def _traffic(step: Step, rank: int) -> LinkBytes:
    """At most ``2ᵗ·k`` entries in round ``t``, never more than dense.

    SparCML's bounds: between ``k·log₂ P`` entries (equal indices everywhere) and ``(P − 1)·k`` (disjoint).
    """
    k, ranks, size = step.most_selected(step.size), step.ranks, step.size
    within = 1 << (ranks.bit_length() - 1)
    if rank >= within:
        return by_link(step.nodes, rank, {rank - within: step.message(k, size)})
    to_each = {rank + within: sum_bytes(step.codec, k, ranks, size)}
    for exponent in range(within.bit_length() - 1):
        distance = 1 << exponent
        first = rank & ~(distance - 1)
        group = sum(1 + (each + within < ranks) for each in range(first, first + distance))
        to_each[rank ^ distance] = step.message(min(size, group * k), size)
    return by_link(step.nodes, rank, to_each)


def _seconds(step: Step) -> LinkSeconds:
    """``log₂ P·α + Σₜ 2·|Kₜ|·β``, ``|Kₜ|`` entries of ``2ᵗ`` ranks (SparCML, 5.3.1).

    Beyond a power of two, one hop before and one after, with the whole sum.
    """
    world = step.world
    within = 1 << (world.size.bit_length() - 1)
    beyond = world.size - within
    hops = []  # distance, bytes, and how many ranks of a node send through its card
    for exponent in range(within.bit_length() - 1):
        held = union((1 << exponent) + min(1 << exponent, beyond), step.k, step.size)
        hops.append((1 << exponent, step.message(held, step.size), world.ranks))
    if beyond:
        whole, senders = round(union(world.size, step.k, step.size)), min(beyond, world.ranks)
        hops.insert(0, (within, step.message(step.k, step.size), senders))
        hops.append((within, sparse_bytes(whole, step.size), senders))
    return step.on_slowest_link(_seconds_of(hops, world))


def _seconds_of(hops: Sequence[tuple[int, int, int]], world: Group) -> float:
    """Return the seconds of hops; one inside a node begins when all its ranks have ended the one before."""
    seconds, beyond = 0.0, list[tuple[int, int]]()
    for distance, message_bytes, senders in hops:
        if distance < world.ranks or world.nodes == 1:
            seconds += _through_cards(beyond, world.network.inter) + world.hop(distance, message_bytes)
            beyond = []
        else:
            beyond.append((message_bytes, senders * world.sharing))
    return seconds + _through_cards(beyond, world.network.inter)


def _through_cards(hops: Sequence[tuple[int, int]], link: Link) -> float:
    """Return the seconds of hops between nodes: the bytes of a message, and how many ranks of a node send.

    They take turns at its card, in the same order in each hop: either the last one waits for the others once,
    where messages are the longest, or the card is busy all the time.
    """
    if not hops:
        return 0.0
    alone = sum(link.seconds(message_bytes) for message_bytes, _ in hops)
    waits = max((senders - 1) * message_bytes for message_bytes, senders in hops)
    busy = sum(senders * message_bytes for message_bytes, senders in hops)
    return max(alone + waits * link.beta, link.seconds(busy))


def _work(step: Step) -> Work:
    """Select; add up the entries of ``2ᵗ`` ranks in every round ``t``."""
    rounds = range((step.world.size - 1).bit_length())
    messages = Work(messages=len(rounds))
    merged = sum(2 * union(1 << each, step.k, step.size) for each in rounds)
    doubling = Work(entry=merged, coded=merged / 2) + step.rounding(merged / 2)
    return step.selecting(step.size, step.k) + messages + doubling + step.placing_sum()


class SSARDoubling(SelectingReducer):
    """In round ``t`` ranks ``2ᵗ`` apart exchange and add all they have, dense once δ is passed.

    Where ``P`` is no power of two, each rank beyond hands its entries to one within before, and gets the
    result after. Addition commutes, also to the bit: both partners of a round hold the same sum.
    """

    cost = Cost(_traffic, _seconds, _work, is_exact=False)

    def _combine(self, selected: SparseVector) -> SparseVector:
        comm = self.comm
        within = 1 << (comm.size.bit_length() - 1)  # the largest power of two that is not above P
        partner = comm.rank ^ within
        with self.measure(self.link):
            if comm.rank >= within:
                comm.send_message(self.encode(selected), partner).wait()
                return self.lossless.decode(receive_message(comm, partner, self.workspace), self.length)
            combined = selected
            if partner < comm.size:
                combined = self._add(self.encode(selected), receive_message(comm, partner, self.workspace))
            distance = 1
            while distance < within:
                combined = self._round(combined, distance)
                distance *= 2
            if partner < comm.size:
                comm.send_message(self.lossless.encode(combined), partner).wait()
        return combined

    def _round(self, combined: SparseVector, distance: int) -> SparseVector:
        """Return the sum of the two groups of ``distance`` ranks that meet in this round."""
        comm, partner = self.comm, self.comm.rank ^ distance
        # All ranks of a group encode the same sum: one of them keeps the rounding error.
        own = self.encode(combined, keeps=comm.rank % distance == 0)
        return self._add(own, exchange_message(comm, own, partner, partner, self.workspace))

    def _add(self, first: Message, second: Message) -> SparseVector:
        with self.measure("combine"):
            return self.sum_sparse([self.codec.decode(message, self.length) for message in (first, second)])
