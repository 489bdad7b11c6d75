"""Memory for batches that is used again: no pages to touch again, and none written while somebody reads."""

import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64  # bytes: from here on TensorFlow takes an array as it is


class Buffers:
    """Arrays of one shape and dtype, lent to whoever takes one.

    An array comes back when nobody refers to it any more, nor to a part of it. As many exist as were in use
    at the same time.
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.bytes = int(np.prod(shape)) * self.dtype.itemsize
        self._free: deque[memoryview] = deque()  # appending and popping are atomic: no lock in a finalizer

    def take(self) -> npt.NDArray[Any]:
        """Return an array that nobody else has, with anything in it."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = self._allocate()
        array = np.frombuffer(memory, self.dtype)  # owner of all its views: none is left when it goes
        weakref.finalize(array, self._free.append, memory)
        return array.reshape(self.shape)

    def _allocate(self) -> memoryview:
        unaligned = np.empty(self.bytes + ALIGNMENT, np.uint8)
        start = -unaligned.ctypes.data % ALIGNMENT
        return unaligned[start : start + self.bytes].data
