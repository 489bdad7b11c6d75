"""What the kernels run on, and the memory they work in.

Everything that touches a device goes through an :class:`Engine`, so that the same wrappers run on CuPy and,
in the tests, on a processor that runs the very same kernels thread by thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from commlib.errors import InvalidArgument
from commlib.gpu.errors import OutOfDeviceMemory

# What an engine's ``empty`` returns: a CuPy array, say. One dimension, with size, dtype, nbytes and slices.
Array: TypeAlias = Any

THREADS = 256  # of a block, where the kernel does not say otherwise
WARPS = THREADS // 32
BLOCKS_PER_MULTIPROCESSOR = 5  # RESIDENT in kernels/common.cu
ENTRIES: dict[str, "np.dtype[Any]"] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),  # its bits
}


@dataclass(frozen=True)
class Source:
    """A file of kernels, for vectors of ``entry`` (a key of ``ENTRIES``) and indices of so many bits."""

    name: str
    entry: str = "float32"
    index_bits: int = 32

    @property
    def text(self) -> str:
        """Return the CUDA C of the file, with what all files share before it."""
        folder = files("commlib.gpu") / "kernels"
        return "\n".join((folder / f"{name}.cu").read_text("utf-8") for name in ("common", self.name))

    @property
    def macros(self) -> tuple[str, ...]:
        """Return the names to define."""
        return (f"ENTRY_{self.entry.upper()}", *(["INDEX_64"] if self.index_bits == 64 else []))


class Engine(ABC):
    """A device and its current stream: memory, and kernels that run one after the other.

    Only ``to_host`` waits for them.
    """

    multiprocessors: int

    @abstractmethod
    def empty(self, size: int, dtype: npt.DTypeLike) -> Array:
        """Return a new array of whatever values, aligned to 64 bytes; too large a one raises MemoryError."""

    @abstractmethod
    def clear(self, array: Array) -> None:
        """Set all bytes to zero."""

    @abstractmethod
    def launch(
        self, source: Source, kernel: str, blocks: int, *arguments: Any, threads: int = THREADS
    ) -> None:
        """Start a kernel.

        ``arguments``: arrays, ``None`` for a pointer to nothing, and NumPy scalars, of just the types that
        the kernel declares.
        """

    def prepare(
        self, source: Source, kernel: str, blocks: int, *fixed: Any, threads: int = THREADS
    ) -> Callable[..., None]:
        """Return what starts a kernel: its arguments are those of the call, then the ``fixed`` ones.

        For kernels of few microseconds, of which the host has to start several in as many: what does not
        change from call to call is looked at once. A call wants ``current``.
        """

        def start(*changing: Any) -> None:
            self.launch(source, kernel, blocks, *changing, *fixed, threads=threads)

        return start

    def current(self) -> AbstractContextManager[Any]:
        """Return the context in which prepared kernels start on this device."""
        return nullcontext()

    @abstractmethod
    def from_host(self, array: npt.NDArray[Any]) -> Array:
        """Return a copy on the device."""

    @abstractmethod
    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """Return a copy on the host, once everything before it has run."""

    @abstractmethod
    def address(self, array: Array) -> int:
        """Return where the array begins."""

    def aligned(self, *arrays: Array, entries: int = 4) -> np.int32:
        """Return, as a kernel's argument, whether all arrays begin at a multiple of so many entries."""
        return np.int32(all(self.address(each) % (entries * each.dtype.itemsize) == 0 for each in arrays))


class Buffers:
    """The device memory of one plan: each buffer is made when first asked for, kept, and used again.

    Whoever calls the plan again overwrites what is in them, so one plan belongs to one stream.
    """

    def __init__(self, engine: Engine, owner: str) -> None:
        self._engine, self._owner = engine, owner
        self._held: dict[str, Array] = {}

    @property
    def bytes(self) -> int:
        """Return how much is held."""
        return sum(each.nbytes for each in self._held.values())

    def get(self, name: str, size: int, dtype: npt.DTypeLike) -> Array:
        """Return ``size`` entries of the buffer, which grows where it is shorter."""
        held = self._held.get(name)
        if held is None or held.size < size:
            self._held.pop(name, None)  # first, so that the old one need not fit beside the new one
            with self._naming(name, size * np.dtype(dtype).itemsize):
                held = self._held[name] = self._engine.empty(size, dtype)
        return held[:size]

    def put(self, name: str, table: npt.NDArray[Any]) -> Array:
        """Return a copy of what lies on the host, kept as the buffer of this name."""
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
    """Return the blocks of a kernel whose threads go on in strides of the grid: ``threads`` at most."""
    return max(1, min(-(-threads // THREADS), engine.multiprocessors * BLOCKS_PER_MULTIPROCESSOR))


def check_entries(name: str, array: Array, size: int, kinds: Sequence["np.dtype[Any]"]) -> None:
    """Raise ``InvalidArgument`` unless ``array`` is ``size`` contiguous entries of one of ``kinds``."""
    if array.ndim != 1 or array.size != size or not _is_one_of(kinds, array.dtype):
        expected = " or ".join(map(str, kinds))
        raise InvalidArgument(
            f"{name}: expected {expected} of shape ({size},), got {array.dtype} {tuple(array.shape)}"
        )
    if array.size > 1 and array.strides[0] != array.dtype.itemsize:
        raise InvalidArgument(
            f"{name}: expected contiguous entries, got a stride of {array.strides[0]} bytes"
        )


def _is_one_of(kinds: Sequence["np.dtype[Any]"], found: Any) -> bool:
    # bfloat16 comes as ml_dtypes' or, from CuPy, as its bits.
    return found in kinds or (str(found) == "bfloat16" and ENTRIES["bfloat16"] in kinds)
