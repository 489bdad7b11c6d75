"""Memory of gradients: aligned vectors, and workspaces whose arrays every step uses again."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib.arrays import module_of
from commlib.entries import Float32

Room = Callable[[str, int, Any], npt.NDArray[Any]]  # (name, length, dtype) -> array, as Workspace.get

ALIGNMENT_BYTES = 64  # TensorFlow uses an array at such an address without a copy
ROW_MULTIPLE = 4  # entries: rows of such lengths all begin where a GPU loads four entries at once


def empty(size: int, arrays: ModuleType = np) -> Float32:
    """Return ``size`` uninitialized float32 values, at an address that is a multiple of ``ALIGNMENT_BYTES``.

    ``arrays``: the module to make it with, NumPy or CuPy.
    """
    if arrays is not np:
        return arrays.empty(size, np.float32)  # type: ignore[no-any-return]
    item = np.dtype(np.float32).itemsize
    vector = np.empty(size + ALIGNMENT_BYTES // item, np.float32)
    first = -vector.ctypes.data % ALIGNMENT_BYTES // item
    return vector[first : first + size]


def copy_of(vector: Float32) -> Float32:
    """Return a copy of a vector, aligned as :func:`empty` aligns it."""
    copy = empty(len(vector), module_of(vector))
    copy[...] = vector
    return copy


def zeros(size: int, arrays: ModuleType = np) -> Float32:
    """Return ``size`` zeros, aligned as :func:`empty` aligns them.

    ``np.zeros`` costs five times as much: a page fault every 4 KiB.
    """
    vector = empty(size, arrays)  # in huge pages, where the system has them
    vector.fill(0)
    return vector


def new_array(name: str, length: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialized array of ``length`` entries: the ``Room`` of calls without a workspace."""
    return np.empty(length, dtype)


class Workspace:
    """Arrays by name, each allocated once and again only where it is too short.

    What ``get`` returned is valid until the next ``get`` of that name. CuPy's own memory pool reuses freed
    memory, and knows which stream still reads it: on a GPU every call returns a new array.
    """

    def __init__(self, arrays: ModuleType = np) -> None:
        self._arrays = arrays
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}
        self._latest: dict[str, tuple[int, npt.DTypeLike, npt.NDArray[Any]]] = {}  # most steps want the same

    def get(self, name: str, length: int, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """Return a contiguous uninitialized array of ``length``, aligned as :func:`empty` aligns it."""
        if self._arrays is not np:
            return self._arrays.empty(length, dtype)  # type: ignore[no-any-return]
        latest = self._latest.get(name)
        if latest is not None and latest[0] == length and latest[1] is dtype:
            return latest[2]
        length_bytes = length * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < length_bytes:
            spare = 0 if buffer is None else length_bytes // 4  # what has grown once will grow again
            buffer = self._buffers[name] = empty(-(-(length_bytes + spare) // 4)).view(np.uint8)
        array = buffer[:length_bytes].view(dtype)
        self._latest[name] = length, dtype, array
        return array
