"""Errors of the GPU path.

::

    CommlibError
    ├── GpuUnavailable     no CuPy, no CUDA libraries, no device, or one that is too old
    └── OutOfDeviceMemory  a buffer that does not fit (also a MemoryError)
"""

from commlib.errors import CommlibError


class GpuUnavailable(CommlibError):
    """Something that the GPU path needs is missing; the message says what, and how to install it."""


class OutOfDeviceMemory(CommlibError, MemoryError):
    """A buffer that does not fit on the device; the message names its size and the buffers held."""
