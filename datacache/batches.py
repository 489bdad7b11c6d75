"""Batches: what they hold, how their arrays are made, and how they are built ahead by threads.

The arrays' memory is used again, as used memory needs no new pages; an array is not overwritten while
anything refers to it.
"""

import math
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from datacache.order import Flags, Ids

Item = TypeVar("Item")
Result = TypeVar("Result")
Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]
Sample = npt.NDArray[np.uint8]
ALIGNMENT = 64  # bytes: TensorFlow uses such arrays without a copy


@dataclass(frozen=True)
class BatchSpec:
    """The samples of a batch, and where it is: step ``step`` of ``epoch``, on ``rank`` of ``world_size``.

    ``counts``: which samples count; the others only pad the batch. ``seed``: of the order.
    """

    ids: Ids
    counts: Flags
    epoch: int
    step: int
    rank: int
    world_size: int
    seed: int


class Pools:
    """Reusable memory for the arrays of batches, by shape and dtype; it grows to the most in use at once."""

    def __init__(self) -> None:
        # Appending and popping are atomic: no lock in a finalizer.
        self._free: defaultdict[tuple[tuple[int, ...], str], deque[memoryview]] = defaultdict(deque)

    def take(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return an unused array with arbitrary contents; it is reused when no view refers to it any more."""
        free = self._free[shape, dtype]
        try:
            memory = free.pop()
        except IndexError:
            size = math.prod(shape) * np.dtype(dtype).itemsize
            unaligned = np.empty(size + ALIGNMENT, np.uint8)
            start = -unaligned.ctypes.data % ALIGNMENT
            memory = unaligned[start : start + size].data
        array = np.frombuffer(memory, dtype)  # the base of all views: it lives as long as any of them
        weakref.finalize(array, free.append, memory)
        return array.reshape(shape)

    def take_bytes(self, size: int) -> Array:
        """Return ``size`` bytes of an array whose length is a power of two, so that others use it, too."""
        return self.take((1 << (size - 1).bit_length(),), "uint8")[:size]


class Collation(ABC):
    """Makes the arrays of a batch of its samples."""

    @abstractmethod
    def arrays(self, samples: Sequence[Sample], labels: Ids, spec: BatchSpec, pools: Pools) -> Arrays:
        """Return the arrays of a batch, each with one row per example that the network sees.

        ``samples`` and ``labels``: in the order of ``spec.ids``; samples are as the preprocessing made them,
        and must not be modified. The result depends only on samples, labels and ``spec``. Any number of
        threads may call this method.
        """


@dataclass(frozen=True)
class Batch:
    """The arrays that a collation has made, and the ids of their samples.

    ``counts``: which samples count; the others only pad the batch.
    """

    arrays: Arrays
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

    def results() -> Iterator[Result]:
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

    return results()
