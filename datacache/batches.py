"""Whole batches, assembled ahead by threads of their own."""

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

    ``counts``: which of the samples are to be counted; the others only fill the batch up.
    """

    images: npt.NDArray[Any]
    labels: npt.NDArray[np.int64]
    ids: Ids
    counts: Flags


@dataclass(frozen=True)
class BatchSpec:
    """What a batch is to be made of. ``epoch`` and ``seed``: what the crop draws from, beside the ids."""

    ids: Ids
    counts: Flags
    epoch: int = 0
    seed: int = 0


class BatchBuilder:
    """Makes batches of one size: reads the samples, crops them into memory that is used again."""

    def __init__(self, levels: Levels, labels: npt.NDArray[np.int64], crop: Crop, channels: int) -> None:
        self._levels, self._labels, self._crop = levels, labels, crop
        self._side = (crop.input_size, crop.input_size, channels)
        self._pools: dict[tuple[tuple[int, ...], str], Buffers] = {}

    def make(self, spec: BatchSpec) -> Batch:
        """Return the batch; threads may call it at the same time."""
        samples = PackedImages.of(self._levels.read(spec.ids), self._pixels)
        images = self._buffers((len(spec.ids), *self._side), self._crop.dtype).take()
        self._crop.apply(samples, spec.ids, spec.epoch, spec.seed, images)
        return Batch(images, self._labels[spec.ids], spec.ids, spec.counts)

    def _pixels(self, size: int) -> npt.NDArray[np.uint8]:
        """Return memory for ``size`` bytes, of few different lengths, so that it can be used again."""
        return self._buffers((1 << (size - 1).bit_length(),), "uint8").take()

    def _buffers(self, shape: tuple[int, ...], dtype: str) -> Buffers:
        return self._pools.setdefault((shape, dtype), Buffers(shape, dtype))


def prefetched(
    function: Callable[[Item], Result], items: Iterable[Item], *, threads: int, prefetch: int
) -> Iterator[Result]:
    """Return ``function(item)`` in the order of ``items``, up to ``prefetch`` of them computed ahead.

    The first of these are begun at once, before anybody asks. An exception is raised where its result would
    have come. What is under way ends when nobody asks any more.

    >>> list(prefetched(lambda number: 2 * number, range(5), threads=2, prefetch=3))
    [0, 2, 4, 6, 8]
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="datacache")
    waiting = iter(items)
    futures = deque(pool.submit(function, item) for item in islice(waiting, prefetch))
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
