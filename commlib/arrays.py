"""Arrays in host memory and on a GPU: their module, copies, aligned vectors, and memory that steps use again.

NumPy's functions on a CuPy array are CuPy's (``np.abs``, ``np.concatenate``, …): most of commlib is written
with them and runs on both. Code that allocates an array asks :func:`module_of` for the module to use.
CuPy is never imported here: whoever made a CuPy array has imported it.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from commlib.errors import InvalidArgument, OutOfDeviceMemory

# Else Numba, where it compiles a kernel, lets colorama write to standard output when the process ends.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
from numba import njit  # noqa: E402

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, **options: Any) -> Function:
    """Compile a kernel that runs without the GIL; cached on disk if a cache folder can be written.

    ``options``: further ones of Numba's ``njit``.
    """
    try:
        return njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # neither the package nor a cache folder of the user can be written
        return njit(nogil=True, **options)(function)


Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]


def is_on_gpu(array: Any) -> bool:
    """Return whether ``array`` is one of CuPy's.

    >>> is_on_gpu(np.zeros(3)), is_on_gpu([0.0])
    (False, False)
    """
    return not isinstance(array, np.ndarray) and type(array).__module__.partition(".")[0] == "cupy"


def module_of(array: Any) -> ModuleType:
    """Return the module whose functions make arrays like this one: ``numpy``, or ``cupy``.

    >>> module_of(np.zeros(3)).__name__
    'numpy'
    """
    return sys.modules["cupy"] if is_on_gpu(array) else np


def to_host(array: Any) -> Array:
    """Return ``array`` in host memory: itself if it is there, else a copy, for which the host waits."""
    return array.get() if is_on_gpu(array) else array


def finish(arrays: ModuleType) -> None:
    """Wait until the current GPU has finished all its work, if ``arrays`` is CuPy."""
    if arrays is not np:
        arrays.cuda.Device().synchronize()


def expect_module(name: str, array: Any, arrays: ModuleType) -> None:
    """Raise ``InvalidArgument`` unless ``array`` is in the memory, host or GPU, of the module ``arrays``.

    It is not copied implicitly: a copy takes longer than most operations on the array.
    """
    if is_on_gpu(array) == (arrays is not np):
        return
    if arrays is np:
        raise InvalidArgument(f"{name}: expected an array in host memory, got one of CuPy (see cupy.asnumpy)")
    raise InvalidArgument(f"{name}: expected a CuPy array, got one in host memory (see cupy.asarray)")


Allocate = Callable[[str, int, Any], npt.NDArray[Any]]  # of (name, length, dtype), as Workspace.get

ALIGNMENT_BYTES = 64  # TensorFlow and JAX use an array at such an address without a copy
ROW_MULTIPLE = 4  # entries: rows of such lengths all begin where a GPU loads four entries at once


def empty(size: int, arrays: ModuleType = np) -> Float32:
    """Return ``size`` uninitialized float32 values, at an address that is a multiple of ``ALIGNMENT_BYTES``.

    ``arrays``: the module to make it with, NumPy or CuPy.
    """
    if arrays is not np:
        return arrays.empty(size, np.float32)
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
    vector.fill(0)  # which reads nothing: the pages are not there yet
    return vector


def clear(vector: Float32) -> None:
    """Set all entries of a contiguous vector to 0.

    In host memory in place, so that it is read: a core fetches what it reads ahead, and what it only writes
    when it writes it, in twice the time (measured).
    """
    if is_on_gpu(vector):
        vector.fill(0)
    else:
        bits = vector.view(np.uint32)
        bits &= np.uint32(0)


def new_array(name: str, length: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialized array of ``length`` entries: the allocator of calls without a workspace."""
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
            return self._arrays.empty(length, dtype)
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


@contextmanager
def memory_errors(owner: Any) -> Iterator[None]:
    """Raise ``OutOfDeviceMemory``, which lists the arrays of ``owner``, if an array does not fit on the GPU.

    ``owner.arrays``: the module of its arrays; a ``MemoryError`` of NumPy is raised as it is.
    """
    try:
        yield
    except MemoryError as error:
        if owner.arrays is np or isinstance(error, OutOfDeviceMemory):
            raise
        held = {name: array.nbytes for name, array in vars(owner).items() if is_on_gpu(array)}
        names = ", ".join(f"{name.strip('_')} {size:,}" for name, size in held.items()) or "nothing"
        text = f"{type(owner).__name__}: {error}; held by it, in bytes: {names}"
        raise OutOfDeviceMemory(text) from error
