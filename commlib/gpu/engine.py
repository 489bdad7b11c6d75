"""The interface of devices that run the kernels, and the buffers of plans.

All access to a device goes through an :class:`Engine`, so that the same wrappers run on CuPy and, in tests,
on an emulator that runs the same kernels thread by thread on the CPU.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from commlib.errors import InvalidArgument, OutOfDeviceMemory

# What an engine's ``empty`` returns, such as a CuPy array of one dimension, with size, dtype and slices.
Array: TypeAlias = Any

THREADS = 256  # of a block, by default
WARPS = THREADS // 32
BLOCKS_PER_MULTIPROCESSOR = 5  # RESIDENT in kernels/common.cu


@dataclass(frozen=True)
class Source:
    """A file of kernels, for indices of that many bits."""

    name: str
    index_bits: int = 32

    @property
    def text(self) -> str:
        """The CUDA C of the file, after that of ``common.cu``."""
        folder = files("commlib.gpu") / "kernels"
        return "\n".join((folder / f"{name}.cu").read_text("utf-8") for name in ("common", self.name))

    @property
    def macros(self) -> tuple[str, ...]:
        return ("INDEX_64",) if self.index_bits == 64 else ()


class Engine(ABC):
    """A device and its current stream: memory, and kernels that run one after the other.

    Only ``to_host`` waits for them.
    """

    multiprocessors: int

    @abstractmethod
    def empty(self, size: int, dtype: npt.DTypeLike) -> Array:
        """Return a new uninitialized array, aligned to 64 bytes; raises MemoryError if it does not fit."""

    @abstractmethod
    def clear(self, array: Array) -> None:
        """Set all bytes to zero."""

    @abstractmethod
    def launch(
        self, source: Source, kernel: str, blocks: int, *arguments: Any, threads: int = THREADS
    ) -> None:
        """Start a kernel.

        ``arguments``: arrays, ``None`` for a null pointer, and NumPy scalars, of exactly the types that the
        kernel declares.
        """

    def prepare(
        self, source: Source, kernel: str, blocks: int, *fixed: Any, threads: int = THREADS
    ) -> Callable[..., None]:
        """Return a function that starts a kernel with the call's arguments, then the ``fixed`` ones.

        For kernels of a few microseconds, of which the host starts several in a row: the fixed arguments are
        converted once. Calls need the context ``current``.
        """
        return lambda *changing: self.launch(source, kernel, blocks, *changing, *fixed, threads=threads)

    def current(self) -> AbstractContextManager[Any]:
        """Return the context in which prepared kernels start on this device."""
        return nullcontext()

    @abstractmethod
    def from_host(self, array: npt.NDArray[Any]) -> Array:
        """Return a copy on the device."""

    @abstractmethod
    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """Return a copy on the host, after all earlier work."""

    @abstractmethod
    def address(self, array: Array) -> int:
        """Return where the array begins."""

    def aligned(self, *arrays: Array) -> np.int32:
        """Return, as a kernel's argument, whether all arrays are aligned to four of their entries."""
        return np.int32(all(self.address(each) % (4 * each.dtype.itemsize) == 0 for each in arrays))


class Buffers:
    """The device memory of one plan: each buffer is allocated at its first use and reused.

    The next call of the plan overwrites the buffers, so one plan belongs to one stream.
    """

    def __init__(self, engine: Engine, owner: str) -> None:
        self._engine, self._owner = engine, owner
        self._held: dict[str, Array] = {}

    def get(self, name: str, size: int, dtype: npt.DTypeLike) -> Array:
        """Return the first ``size`` entries of the buffer, which grows if it is shorter."""
        held = self._held.get(name)
        if held is None or held.size < size:
            self._held.pop(name, None)  # first, so that both need not fit at the same time
            with self._naming(name, size * np.dtype(dtype).itemsize):
                held = self._held[name] = self._engine.empty(size, dtype)
        return held[:size]

    def put(self, name: str, table: npt.NDArray[Any]) -> Array:
        """Copy an array of the host to the buffer of this name, and return that."""
        self._held.pop(name, None)
        with self._naming(name, table.nbytes):
            self._held[name] = self._engine.from_host(table)
        return self._held[name]

    @contextmanager
    def _naming(self, name: str, asked: int) -> Iterator[None]:
        try:
            yield
        except MemoryError as error:
            held = ", ".join(f"{key} {each.nbytes:,}" for key, each in self._held.items()) or "nothing"
            text = f"{asked:,} bytes for {name} do not fit; held, in bytes: {held}"
            raise OutOfDeviceMemory(f"{self._owner}: {text}") from error


@dataclass(frozen=True)
class Ranges:
    """Consecutive items, ``per_warp`` for each warp of ``blocks`` blocks, in order."""

    per_warp: int
    blocks: int

    @classmethod
    def of(cls, items: int, engine: Engine) -> "Ranges":
        """Return ranges of whole multiples of 32 items, of as many warps as keep the device busy."""
        most = engine.multiprocessors * BLOCKS_PER_MULTIPROCESSOR * WARPS
        per_warp = max(1, -(-items // (32 * most))) * 32
        return cls(per_warp, max(1, -(-items // (per_warp * WARPS))))

    @property
    def warps(self) -> int:
        """Return how many warps there are, those without items included."""
        return self.blocks * WARPS

    @property
    def tallies(self) -> int:
        """Return how many tallies there are for one number of each warp: those of the blocks come after."""
        return self.warps + self.blocks


def blocks_for(threads: int, engine: Engine) -> int:
    """Return the blocks of a kernel with a grid-stride loop over ``threads`` items."""
    return max(1, min(-(-threads // THREADS), engine.multiprocessors * BLOCKS_PER_MULTIPROCESSOR))


def check_entries(name: str, array: Array, size: int, kind: npt.DTypeLike = np.float32) -> None:
    """Raise ``InvalidArgument`` unless ``array`` is ``size`` contiguous entries of one kind."""
    if array.ndim != 1 or array.size != size or array.dtype != kind:
        found = f"{array.dtype} {tuple(array.shape)}"
        raise InvalidArgument(f"{name}: expected {np.dtype(kind)} of shape ({size},), got {found}")
    if array.size > 1 and (stride := array.strides[0]) != array.dtype.itemsize:
        raise InvalidArgument(f"{name}: expected contiguous entries, got a stride of {stride} bytes")
