"""Reused memory for batches: no new pages to touch, and no array overwritten while it is in use."""

import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64  # bytes: TensorFlow uses such arrays without a copy


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
