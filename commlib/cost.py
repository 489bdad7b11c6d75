"""What each reducer sends, in closed form. The accounting of every call is held to these formulas.

``nodes`` are the world ranks of every node, as in ``Topology.nodes``; all results are payload bytes that one
rank sends in one call.
"""

from collections.abc import Callable, Sequence

import numpy as np

from commlib.density import entries
from commlib.topology import LinkBytes
from commlib.vectors import VALUE_BYTES, delta, index_dtype, partition

Nodes = Sequence[Sequence[int]]


def sparse_bytes(count: int, size: int) -> int:
    """Return the bytes of ``count`` entries of a vector of ``size``: index and value each, dense past δ."""
    if count >= delta(size):
        return size * VALUE_BYTES
    return count * (index_dtype(size).itemsize + VALUE_BYTES)


def dense(nodes: Nodes, rank: int, size: int) -> LinkBytes:
    """Return the bytes sent by ``dense``, exact: ``2·d·(P − 1)/P`` values where ``P`` divides ``d``."""
    world_size = sum(map(len, nodes))
    lengths = np.diff(partition(size, world_size))
    neighbours = next(node for node in nodes if rank in node)

    def to(ranks: Sequence[int]) -> int:
        scattered = sum(int(lengths[each]) for each in ranks)
        return VALUE_BYTES * (scattered + len(ranks) * int(lengths[rank]))

    intra = to([each for each in neighbours if each != rank])
    inter = to([each for each in range(world_size) if each not in neighbours])
    return LinkBytes(intra, inter)


def hitopk(nodes: Nodes, rank: int, size: int, density: float) -> LinkBytes:
    """Return the bytes sent by ``hitopk``: ``inter`` exact, ``(m − 1)·ρ·d/n`` entries; ``intra`` at most.

    HiTopKComm's equations 7, 9 and 10: inside the node at most ``(n − 1)/n·d`` values and ``(n − 1)·m·ρ·d/n``
    entries, fewer where nodes selected the same ones.
    """
    node = next(node for node in nodes if rank in node)
    local_rank = list(node).index(rank)
    streams = min(map(len, nodes))
    lengths = [int(length) for length in np.diff(partition(size, streams))] + [0] * (len(node) - streams)
    own = lengths[local_rank]
    k = entries(density, own)
    inter = (len(nodes) - 1) * sparse_bytes(k, own)
    gathered = (len(node) - 1) * sparse_bytes(len(nodes) * k, own)
    return LinkBytes(VALUE_BYTES * (size - own) + gathered, inter)


FORMULAS: dict[str, Callable[..., LinkBytes]] = {
    "dense": dense,
    "hitopk": hitopk,
}
