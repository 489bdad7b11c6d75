"""Numba's compiler as the kernels here use it."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a kernel that runs without the GIL, cached on disk where a cache folder can be written.

    Additions keep the order of the source, so the bits are the same on every processor.
    """
    try:
        kernel: Any = njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # neither the package nor a cache folder of the user can be written
        kernel = njit(nogil=True, error_model="numpy")(function)
    return kernel  # type: ignore[no-any-return]
