"""Arrays in host memory and on a GPU: which module made an array, and copies to host memory.

NumPy's functions on a CuPy array are CuPy's (``np.abs``, ``np.concatenate``, …): most of commlib is written
with them and runs on both. Code that allocates an array asks :func:`module_of` for the module to use.
CuPy is never imported here: whoever made a CuPy array has imported it.
"""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib.errors import InvalidArgument

Array = npt.NDArray[Any]


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
    return array.get() if is_on_gpu(array) else array  # type: ignore[no-any-return]


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
