"""Numba's compiler with the options of all kernels."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a kernel that runs without the GIL; cached on disk if a cache folder can be written."""
    try:
        kernel: Any = njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither the package nor a cache folder of the user can be written
        kernel = njit(nogil=True)(function)
    return kernel  # type: ignore[no-any-return]
