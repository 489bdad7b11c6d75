"""Batches, built ahead by threads."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from datacache.collation import Array, BatchSpec, Collation, Pools
from datacache.levels import Levels
from datacache.order import Flags, Ids

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Batch:
    """The arrays that a collation has made, and the ids of their samples.

    ``counts``: which samples count; the others only pad the batch.
    """

    arrays: tuple[Array, ...]
    ids: Ids
    counts: Flags

    @property
    def images(self) -> Array:
        """The first array: of images, ``(samples, input_size, input_size, channels)``."""
        return self.arrays[0]

    @property
    def labels(self) -> Array:
        """The second array: the labels of images."""
        return self.arrays[1]


class BatchBuilder:
    """Builds batches: reads their samples and collates them."""

    def __init__(self, levels: Levels, labels: npt.NDArray[np.int64], collation: Collation) -> None:
        self._levels, self._labels, self._collation = levels, labels, collation
        self._pools = Pools()

    def make(self, spec: BatchSpec) -> Batch:
        """Return a batch; any number of threads may call it."""
        samples = self._levels.read(spec.ids)
        arrays = self._collation.arrays(samples, self._labels[spec.ids], spec, self._pools)
        return Batch(arrays, spec.ids, spec.counts)


def prefetch(
    function: Callable[[Item], Result], items: Iterable[Item], *, threads: int, depth: int
) -> Iterator[Result]:
    """Return an iterator of ``function(item)`` in the order of ``items``, up to ``depth`` computed ahead.

    The first items start at once, before the first ``next``. An exception is raised in place of its result.
    When the iterator is closed, calls that have begun are finished and the others cancelled.

    >>> list(prefetch(lambda number: 2 * number, range(5), threads=2, depth=3))
    [0, 2, 4, 6, 8]
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="datacache")
    waiting = iter(items)
    futures = deque(pool.submit(function, item) for item in islice(waiting, depth))
    return _results(pool, function, waiting, futures)


def _results(
    pool: ThreadPoolExecutor,
    function: Callable[[Item], Result],
    waiting: Iterator[Item],
    futures: deque[Future[Result]],
) -> Iterator[Result]:
    with pool:
        try:
            for item in waiting:
                futures.append(pool.submit(function, item))
                yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        finally:
            for future in futures:
                future.cancel()
