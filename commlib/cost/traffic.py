"""What each reducer sends, in closed form. The accounting of every call is held to these formulas.

``nodes`` are the world ranks of every node, as in ``Topology.nodes``; all results are payload bytes that one
rank sends in one call. ``k`` is the most that the selector returns: twice as much for ``reused`` and
``gaussian``, which makes an upper bound of what is exact for others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from commlib.density import entries
from commlib.errors import look_up
from commlib.selection import SELECTORS
from commlib.topology import LinkBytes
from commlib.vectors import VALUE_BYTES, delta, index_dtype, partition
from commlib.wire import VALUE_CODECS, make_codec

Nodes = Sequence[Sequence[int]]


def sparse_bytes(count: int, size: int, value_bytes: int = VALUE_BYTES) -> int:
    """Return the bytes of ``count`` entries of a vector of ``size``: index and value each, dense past δ."""
    if count >= delta(size, value_bytes):
        return size * value_bytes
    return count * (index_dtype(size).itemsize + value_bytes)


def dense(nodes: Nodes, rank: int, size: int) -> LinkBytes:
    """Return the bytes sent by ``dense``, exact: ``2·d·(P − 1)/P`` values where ``P`` divides ``d``.

    All of them go to the next rank of a ring that passes through one node after the other: between nodes for
    the last rank of each node, inside for the others.
    """
    ring = [each for node in nodes for each in node]
    right = ring[(ring.index(rank) + 1) % len(ring)]
    return _by_link(nodes, rank, {right: _ring_bytes(size, len(ring), rank, right)})


def _ring_bytes(size: int, ranks: int, rank: int, right: int) -> int:
    """Return what a rank hands on: all parts but its own to be added up, all but its neighbour's after."""
    lengths = np.diff(partition(size, ranks))
    return VALUE_BYTES * (2 * size - int(lengths[rank]) - int(lengths[right]))


def torus2d(nodes: Nodes, rank: int, size: int) -> LinkBytes:
    """Return the bytes sent by ``torus2d``, exact: ``2·(d/n)·(m − 1)/m`` values between nodes."""
    node, local_rank, shards = _shards(nodes, rank, size)
    stream = [each[local_rank] for each in nodes if len(each) > local_rank]
    place = stream.index(rank)
    inter = _ring_bytes(shards[local_rank], len(stream), place, (place + 1) % len(stream))
    right = shards[(local_rank + 1) % len(node)]
    return LinkBytes(VALUE_BYTES * (2 * size - shards[local_rank] - right), inter)


def allgather(
    nodes: Nodes, rank: int, size: int, density: float, wire: str = "fp32", selector: str = "mstopk"
) -> LinkBytes:
    """Return the bytes sent by ``allgather``, exact: ``(P − 1)·k`` entries, to the next rank of a ring."""
    message = make_codec(wire).message_bytes(_selected(density, size, selector), size)
    world_size = sum(map(len, nodes))
    return _by_link(nodes, rank, {(rank + 1) % world_size: (world_size - 1) * message})


def gtopk(
    nodes: Nodes, rank: int, size: int, density: float, wire: str = "fp32", selector: str = "mstopk"
) -> LinkBytes:
    """Return the bytes sent by ``gtopk``, exact: ``k`` entries to the parent in the tree and to each child.

    That is at most ``k·⌈log₂ P⌉`` entries, on the root.
    """
    k = _selected(density, size, selector)
    to_parent, to_child = make_codec(wire).message_bytes(k, size), sparse_bytes(k, size)
    rounds = range(sum(map(len, nodes)).bit_length())
    lowest_bit = rank & -rank if rank else 1 << len(rounds)
    to_each = {rank + (1 << each): to_child for each in rounds if 1 << each < lowest_bit}
    if rank:
        to_each[rank - lowest_bit] = to_parent
    return _by_link(nodes, rank, to_each)


def ssar_doubling(
    nodes: Nodes, rank: int, size: int, density: float, wire: str = "fp32", selector: str = "mstopk"
) -> LinkBytes:
    """Return what ``ssar_doubling`` sends at most: ``2ᵗ·k`` entries in round ``t``, never above dense.

    SparCML's bounds: between ``k·log₂ P`` entries (equal indices everywhere) and ``(P − 1)·k`` (disjoint).
    """
    k, world_size, codec = _selected(density, size, selector), sum(map(len, nodes)), make_codec(wire)
    within = 1 << (world_size.bit_length() - 1)

    def most(ranks: int) -> int:
        return codec.message_bytes(min(size, ranks * k), size)

    if rank >= within:
        return _by_link(nodes, rank, {rank - within: most(1)})
    to_each = {rank + within: _sums_bytes(wire, k, world_size, size)}
    for exponent in range(within.bit_length() - 1):
        distance = 1 << exponent
        first = rank & ~(distance - 1)
        group = sum(1 + (each + within < world_size) for each in range(first, first + distance))
        to_each[rank ^ distance] = most(group)
    return _by_link(nodes, rank, to_each)


def ssar_split(
    nodes: Nodes, rank: int, size: int, density: float, wire: str = "fp32", selector: str = "mstopk"
) -> LinkBytes:
    """Return what ``ssar_split`` sends at most: ``k`` entries, then the sums of all ranges but one.

    SparCML's bounds: between ``2·k·(P − 1)/P`` entries and ``P·k``.
    """
    k, codec = _selected(density, size, selector), make_codec(wire)
    ranks = sum(map(len, nodes))
    return _split(nodes, rank, size, k, wire, lambda part: codec.message_bytes(min(part, ranks * k), part))


def _split(
    nodes: Nodes, rank: int, size: int, k: int, wire: str, sums_bytes: Callable[[int], int]
) -> LinkBytes:
    """Return at most ``k`` entries to the owner of each range, and what the ring of their sums hands on."""
    lengths = [int(length) for length in np.diff(partition(size, sum(map(len, nodes))))]
    codec, right = make_codec(wire), (rank + 1) % len(lengths)
    to_each = {to: codec.message_bytes(min(k, length), length) for to, length in enumerate(lengths)}
    to_each[right] += _all_but_right(lengths, rank, sums_bytes)
    return _by_link(nodes, rank, to_each)


def dsar_split(
    nodes: Nodes,
    rank: int,
    size: int,
    density: float,
    wire: str = "fp32",
    selector: str = "mstopk",
    sums: str = "fp32",
) -> LinkBytes:
    """Return what ``dsar_split`` sends at most: ``k`` entries, then ``(P − 1)·d/P`` values."""
    k, values = _selected(density, size, selector), look_up(VALUE_CODECS, "codec", sums)()
    return _split(nodes, rank, size, k, wire, values.message_bytes)


def oktopk(
    nodes: Nodes, rank: int, size: int, density: float, wire: str = "fp32", selector: str = "mstopk"
) -> LinkBytes:
    """Return what ``oktopk`` sends at most in a step that re-evaluates the global threshold.

    Ok-Topk's equation 3 puts an ordinary balanced step at most at ``6·k·(P − 1)/P`` words.
    """
    return _oktopk(nodes, rank, entries(density, size), size)


def hitopk(
    nodes: Nodes, rank: int, size: int, density: float, wire: str = "fp32", selector: str = "mstopk"
) -> LinkBytes:
    """Return the bytes sent by ``hitopk``: ``inter`` exact, ``(m − 1)·ρ·d/n`` entries; ``intra`` at most.

    HiTopKComm's equations 7, 9 and 10: inside the node at most ``(n − 1)/n·d`` values and ``(n − 1)·m·ρ·d/n``
    entries, fewer where nodes selected the same ones.
    """
    node, local_rank, shards = _shards(nodes, rank, size)
    own = shards[local_rank]
    inter = (len(nodes) - 1) * make_codec(wire).message_bytes(_selected(density, own, selector), own)
    gathered = _all_but_right(
        shards,
        local_rank,
        lambda each: _sums_bytes(wire, _selected(density, each, selector), len(nodes), each),
    )
    return LinkBytes(VALUE_BYTES * (size - own) + gathered, inter)


def hioktopk(
    nodes: Nodes, rank: int, size: int, density: float, wire: str = "fp32", selector: str = "mstopk"
) -> LinkBytes:
    """Return what ``hioktopk`` sends at most: ``oktopk`` on the stream; in the node as ``hitopk``."""
    node, local_rank, shards = _shards(nodes, rank, size)
    own = shards[local_rank]
    k = entries(density, own)
    stream = [each[local_rank] for each in nodes if len(each) > local_rank]
    inter = _oktopk([[place] for place in range(len(stream))], stream.index(rank), k, own).inter
    gathered = _all_but_right(shards, local_rank, lambda each: sparse_bytes(2 * entries(density, each), each))
    return LinkBytes(VALUE_BYTES * (size - own) + gathered, inter)


def _oktopk(nodes: Nodes, rank: int, k: int, size: int) -> LinkBytes:
    """Return the most that Ok-Topk sends of ``size`` entries: split, magnitudes, balance, all-gather.

    A rank selects at most ``2k`` entries between re-evaluations; the regions' sums are at most ``P`` times
    that; at most ``2k`` reach the global threshold.
    """
    world_size = sum(map(len, nodes))
    entry = index_dtype(size).itemsize + VALUE_BYTES
    selected = min(size, 2 * k)
    to_each = dict.fromkeys(range(world_size), 2 * selected * entry)
    to_each[(rank + 1) % world_size] += selected * entry + VALUE_BYTES * min(size, world_size * selected)
    return _by_link(nodes, rank, to_each)


def _selected(density: float, size: int, selector: str) -> int:
    return min(size, look_up(SELECTORS, "selector", selector).at_most * entries(density, size))


def _sums_bytes(wire: str, k: int, ranks: int, size: int) -> int:
    """Return the most that a lossless message of the sum of ``ranks`` messages of ``k`` entries takes.

    A dense message makes the sum dense: few bits a value are dense from few entries on.
    """
    codec = make_codec(wire)
    most = min(size, ranks * k)
    is_dense = codec.message_bytes(most, size) == codec.message_bytes(size, size)
    return size * VALUE_BYTES if is_dense else sparse_bytes(most, size)


def _by_link(nodes: Nodes, rank: int, to_each: Mapping[int, int]) -> LinkBytes:
    """Add up the bytes that go to each other rank that there is, by the link that they go over."""
    own = next(node for node in nodes if rank in node)
    return LinkBytes(
        intra=sum(to_each.get(to, 0) for to in own if to != rank),
        inter=sum(to_each.get(to, 0) for node in nodes if node is not own for to in node),
    )


def _all_but_right(lengths: Sequence[int], rank: int, message_bytes: Callable[[int], int]) -> int:
    """Return what a rank hands on where the messages of all go round a ring: all but its neighbour's."""
    right = (rank + 1) % len(lengths)
    return sum(message_bytes(length) for place, length in enumerate(lengths) if place != right)


def _shards(nodes: Nodes, rank: int, size: int) -> tuple[Sequence[int], int, list[int]]:
    """Return the node of a rank, its local rank, and the lengths of the node's shards by local rank."""
    node = next(node for node in nodes if rank in node)
    streams = min(map(len, nodes))
    lengths = [int(length) for length in np.diff(partition(size, streams))]
    return node, list(node).index(rank), lengths + [0] * (len(node) - streams)


@dataclass(frozen=True)
class Formula:
    """What a reducer sends. ``is_exact``: the bytes between nodes are met, not only a bound."""

    sent: Callable[..., LinkBytes]
    is_exact: bool


FORMULAS: dict[str, Formula] = {
    "dense": Formula(dense, is_exact=True),
    "torus2d": Formula(torus2d, is_exact=True),
    "allgather": Formula(allgather, is_exact=True),
    "gtopk": Formula(gtopk, is_exact=True),
    "ssar_doubling": Formula(ssar_doubling, is_exact=False),
    "ssar_split": Formula(ssar_split, is_exact=False),
    "dsar_split": Formula(dsar_split, is_exact=False),
    "oktopk": Formula(oktopk, is_exact=False),
    "hitopk": Formula(hitopk, is_exact=True),
    "hioktopk": Formula(hioktopk, is_exact=False),
}
