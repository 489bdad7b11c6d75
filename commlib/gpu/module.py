"""The CUDA kernels, compiled once a device; what launches them, and the memory they work in.

Everything that touches a device goes through an :class:`Engine`, so that the same wrappers run on CuPy and,
in the tests, on a processor that runs the very same kernels thread by thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from commlib.errors import InvalidArgument
from commlib.gpu.errors import GpuUnavailable, OutOfDeviceMemory

# What an engine's ``empty`` returns: a CuPy array, say. One dimension, with size, dtype, nbytes and slices.
Array: TypeAlias = Any

THREADS = 256  # of a block, where the kernel does not say otherwise
WARPS = THREADS // 32
BLOCKS_PER_MULTIPROCESSOR = 8
OLDEST = (7, 0)  # compute capability: from there on the lanes of a warp go on by themselves
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


class CuPyEngine(Engine):
    """A device as CuPy knows it; kernels go to CuPy's current stream. Get one from :func:`current_engine`."""

    def __init__(self, device: int) -> None:
        self._cupy = _import_cupy()
        self._modules: dict[Source, Any] = {}
        self._device = self._cupy.cuda.Device(device)
        attributes = self._cupy.cuda.runtime.getDeviceProperties(device)
        capability = attributes["major"], attributes["minor"]
        if capability < OLDEST:
            name = attributes["name"].decode()
            found, needed = (".".join(map(str, each)) for each in (capability, OLDEST))
            raise GpuUnavailable(f"{name}: expected compute capability {needed} or more, got {found}")
        self.multiprocessors = attributes["multiProcessorCount"]

    def empty(self, size: int, dtype: npt.DTypeLike) -> Array:
        """See :meth:`Engine.empty`; the memory comes from CuPy's pool."""
        with self._device:
            return self._cupy.empty(size, dtype)

    def clear(self, array: Array) -> None:
        """See :meth:`Engine.clear`."""
        if array.nbytes:
            array.data.memset_async(0, array.nbytes)

    def launch(
        self, source: Source, kernel: str, blocks: int, *arguments: Any, threads: int = THREADS
    ) -> None:
        """See :meth:`Engine.launch`; a module's first kernel compiles it (seconds; CuPy keeps it on disk)."""
        given = tuple(np.uintp(0) if argument is None else argument for argument in arguments)
        with self._device:
            self._module(source).get_function(kernel)((blocks,), (threads,), given)

    def from_host(self, array: npt.NDArray[Any]) -> Array:
        """See :meth:`Engine.from_host`."""
        with self._device:
            return self._cupy.asarray(array)

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """See :meth:`Engine.to_host`."""
        host: npt.NDArray[Any] = array.get()
        return host

    def address(self, array: Array) -> int:
        """See :meth:`Engine.address`."""
        return int(array.data.ptr)

    def _module(self, source: Source) -> Any:
        if source not in self._modules:
            # Products and sums are rounded one by one, as on the CPU.
            options = ("-std=c++14", "--fmad=false", *(f"-D{macro}" for macro in source.macros))
            module = self._cupy.RawModule(code=source.text, options=options)
            try:
                module.compile()
            except (ImportError, RuntimeError, OSError) as error:  # NVRTC is loaded only now
                raise GpuUnavailable(f"CuPy cannot compile kernels: {error}; {_REMEDY}") from error
            self._modules[source] = module
        return self._modules[source]


_REMEDY = "pip install 'cloudtrain[gpu]', beside an NVIDIA driver"


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise GpuUnavailable(f"CuPy is not installed or finds no CUDA ({error}); {_REMEDY}") from error
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError) as error:
        raise GpuUnavailable(f"CuPy finds no usable GPU ({error}); {_REMEDY}") from error
    if not devices:
        raise GpuUnavailable(f"CuPy finds no GPU; {_REMEDY}")
    return cupy


def current_engine(device: int | None = None) -> Engine:
    """Return the engine of a device, CuPy's current one where none is named; the same in every call.

    Raises ``GpuUnavailable`` where there is no CuPy, no CUDA, no GPU, or one older than Volta.
    """
    return _engine(_import_cupy().cuda.Device().id if device is None else device)


@cache
def _engine(device: int) -> Engine:
    return CuPyEngine(device)


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
            held = self._held[name] = self._make(name, size, np.dtype(dtype))
        return held[:size]

    def _make(self, name: str, size: int, dtype: "np.dtype[Any]") -> Array:
        try:
            return self._engine.empty(size, dtype)
        except MemoryError as error:
            held = ", ".join(f"{key} {each.nbytes:,}" for key, each in self._held.items()) or "nothing"
            asked = f"{size * dtype.itemsize:,} bytes for {name}"
            raise OutOfDeviceMemory(f"{self._owner}: {asked} do not fit; held, in bytes: {held}") from error


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


def blocks_for(threads: int, engine: Engine) -> int:
    """Return the blocks of a kernel whose threads go on in strides of the grid: ``threads`` at most."""
    return max(1, min(-(-threads // THREADS), engine.multiprocessors * BLOCKS_PER_MULTIPROCESSOR))


def check_entries(name: str, array: Array, size: int, kinds: Sequence["np.dtype[Any]"]) -> None:
    """Raise ``InvalidArgument`` unless ``array`` is ``size`` contiguous entries of one of ``kinds``."""
    # bfloat16 comes as ml_dtypes' or, from CuPy, as its bits.
    found = np.dtype(np.uint16) if str(array.dtype) == "bfloat16" else np.dtype(array.dtype)
    if array.ndim != 1 or array.size != size or found not in kinds:
        expected = " or ".join(map(str, kinds))
        raise InvalidArgument(
            f"{name}: expected {expected} of shape ({size},), got {array.dtype} {tuple(array.shape)}"
        )
    if array.size > 1 and array.strides[0] != array.dtype.itemsize:
        raise InvalidArgument(
            f"{name}: expected contiguous entries, got a stride of {array.strides[0]} bytes"
        )
