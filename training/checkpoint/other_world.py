"""The residuals of a checkpoint for another number of ranks: who takes over whose."""

from collections.abc import Callable

import numpy as np

from commlib.vectors import Float32


def taken_over(world_size: int, rank: int, size: int) -> range:
    """Return the ranks of the earlier world of ``world_size`` whose state ``rank`` of ``size`` takes over.

    >>> [list(taken_over(5, rank, 2)) for rank in range(2)]
    [[0, 2, 4], [1, 3]]
    >>> [list(taken_over(2, rank, 3)) for rank in range(3)]
    [[0], [1], []]
    """
    return range(rank, world_size, size)


def merged(
    residual_of: Callable[[int], Float32], length: int, *, world_size: int, rank: int, size: int
) -> Float32:
    """Return the residual of ``rank`` in a world of ``size``: the sum of the residuals that it takes over.

    ``residual_of(rank)`` returns a vector of shape ``(length,)`` for a rank of the earlier world of
    ``world_size``, and is called for one rank after another, in order. The sum is computed in float64 and
    rounded once; a rank that takes over none gets zeros. The sum over all ranks is preserved to this
    rounding.
    """
    ranks = taken_over(world_size, rank, size)
    if len(ranks) == 1:
        return np.array(residual_of(rank), np.float32)
    total = np.zeros(length, np.float64)
    for each in ranks:
        total += residual_of(each)
    return total.astype(np.float32)
