"""Out of memory on a GPU: the message names what the reducer holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from commlib.arrays import is_on_gpu
from commlib.gpu.errors import OutOfDeviceMemory


@contextmanager
def memory_errors(owner: Any) -> Iterator[None]:
    """Raise ``OutOfDeviceMemory`` for an array that did not fit on the GPU, with the arrays of ``owner``.

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
