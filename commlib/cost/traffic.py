"""Pieces of the closed forms of what one rank sends in one step, in payload bytes."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from commlib.topology import LinkBytes
from commlib.vectors import VALUE_BYTES, delta, index_dtype, partition
from commlib.wire import Codec

Nodes = Sequence[Sequence[int]]


def sparse_bytes(count: int, size: int, value_bytes: int = VALUE_BYTES) -> int:
    """Return the bytes of ``count`` entries of a vector of ``size``: index and value each, dense past δ."""
    if count >= delta(size, value_bytes):
        return size * value_bytes
    return count * (index_dtype(size).itemsize + value_bytes)


def sum_bytes(codec: Codec, k: int, ranks: int, size: int) -> int:
    """Return the most that a lossless message of the sum of ``ranks`` messages of ``k`` entries takes.

    A dense message makes the sum dense: few bits a value are dense from few entries on.
    """
    most = min(size, ranks * k)
    is_dense = codec.message_bytes(most, size) == codec.message_bytes(size, size)
    return size * VALUE_BYTES if is_dense else sparse_bytes(most, size)


def ring_bytes(size: int, ranks: int, rank: int, right: int) -> int:
    """Return the bytes that a rank passes on in a ring all-reduce: ``2·d·(ranks − 1)/ranks`` values.

    It passes on all parts but its own to be added up, and all but its right neighbour's afterwards.
    """
    lengths = partition_lengths(size, ranks)
    return VALUE_BYTES * (2 * size - lengths[rank] - lengths[right])


def other_messages_bytes(lengths: Sequence[int], rank: int, message_bytes: Callable[[int], int]) -> int:
    """Return the bytes that a rank passes on in a ring all-gather: all messages but its right neighbour's.

    ``lengths``: of the parts, each of which travels in ``message_bytes(length)``.
    """
    right = (rank + 1) % len(lengths)
    return sum(message_bytes(length) for place, length in enumerate(lengths) if place != right)


def by_link(nodes: Nodes, rank: int, to_each: Mapping[int, int]) -> LinkBytes:
    """Return the sums of the bytes to each other rank, by link; ranks that do not exist get nothing."""
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
