"""Collations, which make the arrays of a batch from its samples, in memory that is used again.

Used memory needs no new pages, and an array is not overwritten while anything refers to it.
"""

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from datacache.order import Flags, Ids

Array = npt.NDArray[Any]
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


class Buffers:
    """A pool of arrays of one shape and dtype.

    An array returns to the pool when neither it nor a view of it is referenced any more. There are as many as
    were in use at the same time.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.bytes = int(np.prod(shape)) * self.dtype.itemsize
        self._free: deque[memoryview] = deque()  # appending and popping are atomic: no lock in a finalizer

    def take(self) -> npt.NDArray[Any]:
        """Return an unused array with arbitrary contents."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = self._allocate()
        array = np.frombuffer(memory, self.dtype)  # the base of all views: it lives as long as any of them
        weakref.finalize(array, self._free.append, memory)
        return array.reshape(self.shape)

    def _allocate(self) -> memoryview:
        unaligned = np.empty(self.bytes + ALIGNMENT, np.uint8)
        start = -unaligned.ctypes.data % ALIGNMENT
        return unaligned[start : start + self.bytes].data


class Pools:
    """Reused memory for the arrays of batches, by shape and dtype."""

    def __init__(self) -> None:
        self._pools: dict[tuple[tuple[int, ...], str], Buffers] = {}

    def take(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return an unused array with arbitrary contents; it is reused when nothing refers to it."""
        return self._pools.setdefault((shape, dtype), Buffers(shape, dtype)).take()


class Collation(ABC):
    """Makes the arrays of a batch of its samples."""

    @abstractmethod
    def arrays(
        self,
        samples: Sequence[npt.NDArray[np.uint8]],
        labels: npt.NDArray[np.int64],
        spec: BatchSpec,
        pools: Pools,
    ) -> tuple[Array, ...]:
        """Return the arrays of a batch, each with a row a sample of the network.

        ``samples`` and ``labels``: in the order of ``spec.ids``; samples are as the preprocessing made them,
        and not to be changed. The result depends only on them and on ``spec``. Any number of threads may call
        it.
        """
