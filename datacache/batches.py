"""Batches, built ahead by threads."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from datacache.augmentation import Crop, PackedImages
from datacache.buffers import Buffers
from datacache.levels import Levels
from datacache.order import Flags, Ids

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Batch:
    """Inputs of shape ``(samples, input_size, input_size, channels)``, their labels, and their ids.

    ``counts``: which samples count; the others only pad the batch.
    """

    images: npt.NDArray[Any]
    labels: npt.NDArray[np.int64]
    ids: Ids
    counts: Flags


@dataclass(frozen=True)
class BatchSpec:
    """The samples of a batch. ``epoch`` and ``seed``: with the ids, the seed of random crops."""

    ids: Ids
    counts: Flags
    epoch: int = 0
    seed: int = 0


class BatchBuilder:
    """Builds batches: reads the samples and crops them into reused buffers."""

    def __init__(self, levels: Levels, labels: npt.NDArray[np.int64], crop: Crop, channels: int) -> None:
        self._levels, self._labels, self._crop = levels, labels, crop
        self._side = (crop.input_size, crop.input_size, channels)
        self._pools: dict[tuple[tuple[int, ...], str], Buffers] = {}

    def make(self, spec: BatchSpec) -> Batch:
        """Return a batch; any number of threads may call it."""
        samples = PackedImages.of(self._levels.read(spec.ids), self._pixels)
        images = self._buffers((len(spec.ids), *self._side), self._crop.dtype).take()
        self._crop.apply(samples, spec.ids, spec.epoch, spec.seed, images)
        return Batch(images, self._labels[spec.ids], spec.ids, spec.counts)

    def _pixels(self, size: int) -> npt.NDArray[np.uint8]:
        """Return a buffer of ``size`` bytes or more; lengths are powers of two, so buffers are reused."""
        return self._buffers((1 << (size - 1).bit_length(),), "uint8").take()

    def _buffers(self, shape: tuple[int, ...], dtype: str) -> Buffers:
        return self._pools.setdefault((shape, dtype), Buffers(shape, dtype))


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
