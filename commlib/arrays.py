"""Arrays in host memory and on a GPU: which module made one, and how it gets from the one to the other.

NumPy's functions on a CuPy array are CuPy's (``np.abs``, ``np.concatenate``, …): most of commlib is written
with them and runs on both. What makes an array out of nothing asks here for the module to make it with.
CuPy is never imported here: where one of its arrays is, it has been.
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
    return type(array).__module__.partition(".")[0] == "cupy"


def module_of(array: Any) -> ModuleType:
    """Return the module whose functions make arrays like this one: ``numpy``, or ``cupy``.

    >>> module_of(np.zeros(3)).__name__
    'numpy'
    """
    return sys.modules["cupy"] if is_on_gpu(array) else np


def to_host(array: Any) -> Array:
    """Return ``array`` in host memory: itself where it is there, else a copy, waited for."""
    return array.get() if is_on_gpu(array) else array  # type: ignore[no-any-return]


def finish(arrays: ModuleType) -> None:
    """Wait until the current GPU has done all that it was asked for, where ``arrays`` are CuPy's."""
    if arrays is not np:
        arrays.cuda.Device().synchronize()


def expect_module(name: str, array: Any, arrays: ModuleType) -> None:
    """Raise ``InvalidArgument`` where ``array`` does not lie where those of the module ``arrays`` do.

    It is not copied there in silence: that takes longer than most of what is done with it.
    """
    if is_on_gpu(array) == (arrays is not np):
        return
    if arrays is np:
        raise InvalidArgument(f"{name}: expected an array in host memory, got one of CuPy (see cupy.asnumpy)")
    raise InvalidArgument(f"{name}: expected a CuPy array, got one in host memory (see cupy.asarray)")
