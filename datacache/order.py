"""Which sample is read when: pure functions of seed, epoch and place, so that a run can be repeated.

A global batch is ``world_size · batch_size`` consecutive samples of the epoch's order, and rank ``r`` takes
the ``r``-th part of it: the same global batch comes out at another world size.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


def epoch_order(samples: int, seed: int, epoch: int) -> Ids:
    """Return a permutation of ``samples`` sample ids, equal on every rank and machine.

    >>> epoch_order(5, seed=1, epoch=0)
    array([0, 1, 2, 4, 3])
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return generator.permutation(samples)


def training_ids(order: Ids, rank: int, world_size: int, batch_size: int) -> Iterator[Ids]:
    """Yield the sample ids of each of this rank's batches: as many batches on every rank, all of full size.

    The last ``len(order) mod (world_size · batch_size)`` samples sit this epoch out; the next epoch's order
    leaves out others.

    >>> list(training_ids(np.arange(9), rank=1, world_size=2, batch_size=2))
    [array([2, 3]), array([6, 7])]
    """
    global_batch = world_size * batch_size
    for start in range(0, len(order) - global_batch + 1, global_batch):
        own = start + rank * batch_size
        yield order[own : own + batch_size]


def evaluation_ids(samples: int, rank: int, world_size: int, batch_size: int) -> Iterator[Ids]:
    """Yield the sample ids of each of this rank's batches: over all ranks every sample exactly once.

    Ranks may have one batch more or less than others, and a last batch that is not full.

    >>> [list(evaluation_ids(5, rank, 2, batch_size=2)) for rank in (0, 1)]
    [[array([0, 1])], [array([2, 3]), array([4])]]
    """
    own = np.arange(samples * rank // world_size, samples * (rank + 1) // world_size)
    for start in range(0, len(own), batch_size):
        yield own[start : start + batch_size]
