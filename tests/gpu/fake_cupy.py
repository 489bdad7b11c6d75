"""CuPy without a GPU: its arrays are in host memory, and everything else about them is as strict.

Nothing becomes a NumPy array unless it is asked for, nor a NumPy array one of these. Where CuPy computes with
float32, denormals are zeros: it compiles all its kernels with ``-ftz=true``. Work is done at once, but every
array remembers on which stream, and who uses it on another one without having waited for that is told:
``Race``. ``FakeCuPy`` stands for the module; ``installed`` puts it where ``import cupy`` finds it.
"""

import ctypes
import functools
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.gpu.fake_nccl import FakeNccl

# Their results are as long as what is found in the arrays: who calls them waits for the GPU.
WAITING = {"flatnonzero", "nonzero", "argwhere"}
# Functions of NumPy that CuPy has, too, and that commlib uses.
FUNCTIONS = {
    *("abs", "absolute", "add", "all", "any", "clip", "concatenate", "count_nonzero", "cumsum", "diff"),
    *("divide", "equal", "greater", "greater_equal", "invert", "isfinite", "isin", "isnan", "less"),
    *("less_equal", "bitwise_or", "bitwise_and", "logical_and", "logical_or", "maximum", "max", "min"),
    *("minimum", "multiply", "negative", "not_equal", "partition", "searchsorted", "sort", "argsort"),
    *("split", "subtract", "sum", "true_divide", "where", "flatnonzero", "nonzero", "rint"),
}
# Of these, what move entries and do not compute with them.
MOVING = {"concatenate", "split", "flatnonzero", "nonzero"}
ALIGNMENT_BYTES = 512
MAKERS = ("empty", "zeros", "full", "arange")
FLAGS = ("c_contiguous", "f_contiguous", "owndata")  # of CuPy's arrays


class Race(AssertionError):
    """A stream uses what another one may not have finished with."""


class Memory:
    """What one allocation holds, and up to where the streams that used it had come by then."""

    def __init__(self) -> None:
        self.written: dict[int, int] = {}
        self.read: dict[int, int] = {}


class Stream:
    """A queue of work. ``seen``: how far this stream knows each of them to be, its own included."""

    def __init__(
        self,
        cupy: "FakeCuPy",
        null: bool = False,
        non_blocking: bool = False,
        ptds: bool = False,
        priority: int | None = None,
    ) -> None:
        self.ptr = cupy.next_address()
        cupy.streams[self.ptr] = self
        self.seen: defaultdict[int, int] = defaultdict(int)
        self._cupy = cupy

    def launch(self, reads: list[Memory], writes: list[Memory]) -> None:
        """Note work that reads and writes memory, and raise ``Race`` where it may come too early."""
        self.learn(self._cupy.host_seen())
        for memory in reads:
            self._expect(memory.written, "reads what another stream writes")
        for memory in writes:
            self._expect(memory.written, "overwrites what another stream writes")
            self._expect(memory.read, "overwrites what another stream reads")
        self.seen[self.ptr] += 1
        for memory in reads:
            memory.read[self.ptr] = self.seen[self.ptr]
        for memory in writes:
            memory.written, memory.read = {self.ptr: self.seen[self.ptr]}, {}

    def _expect(self, marks: dict[int, int], what: str) -> None:
        for stream, mark in marks.items():
            if self.seen[stream] < mark:
                raise Race(f"stream {self.ptr} {what}: {stream} at {mark}, known until {self.seen[stream]}")

    def learn(self, seen: dict[int, int]) -> None:
        for stream, mark in seen.items():
            self.seen[stream] = max(self.seen[stream], mark)

    def record(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        self.learn(self._cupy.host_seen())
        event.seen = dict(self.seen)
        return event

    def wait_event(self, event: "Event") -> None:
        self.learn(event.seen)

    def synchronize(self) -> None:
        self._cupy.wait_for(self)

    def use(self) -> "Stream":
        self._cupy.local.stream = self
        return self

    def __enter__(self) -> "Stream":
        self._before = self._cupy.stream
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        self._before.use()


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.seen: dict[int, int] = {}


class Pointer:
    """The address of an array, as NCCL and copies take it."""

    def __init__(self, array: "ndarray") -> None:
        self.ptr = array.host.ctypes.data
        self._array = array

    def copy_to_host_async(self, mem: int, size: int, stream: Stream | None = None) -> None:
        (stream or self._array.cupy.stream).launch([self._array.memory], [])
        self._move(mem, self.ptr, size)
        self._array.cupy.copied_to_host.append(size)

    def copy_from_host_async(self, mem: int, size: int, stream: Stream | None = None) -> None:
        (stream or self._array.cupy.stream).launch([], [self._array.memory])
        self._move(self.ptr, mem, size)

    def _move(self, into: int, mem: int, size: int) -> None:
        assert type(into) is type(mem) is int, "addresses"
        assert 0 <= size <= self._array.nbytes
        ctypes.memmove(into, mem, size)


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):  # noqa: N801 - as CuPy has it
    """An array that only the functions of its module may touch. ``host``: what it holds."""

    __module__ = "cupy"

    def __init__(self, cupy: "FakeCuPy", host: np.ndarray, memory: Memory | None = None) -> None:
        self.cupy, self.host = cupy, host
        self.memory = memory or Memory()
        cupy.register(self)

    dtype = property(lambda self: self.host.dtype)
    shape = property(lambda self: self.host.shape)
    size = property(lambda self: self.host.size)
    ndim = property(lambda self: self.host.ndim)
    nbytes = property(lambda self: self.host.nbytes)
    itemsize = property(lambda self: self.host.itemsize)
    strides = property(lambda self: self.host.strides)
    flags = property(lambda self: SimpleNamespace(**{name: getattr(self.host.flags, name) for name in FLAGS}))
    data = property(Pointer)

    def __dlpack__(
        self, *, stream: int | None = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        """Return a capsule of the memory; ``-1``: whoever asks for it waits himself."""
        if stream != -1:
            raise NotImplementedError("tests know one way")
        missed = {mark: self.cupy.host_seen()[mark] for mark in self.memory.written}
        if any(missed[mark] < self.memory.written[mark] for mark in missed):
            raise Race("given away before it is complete")
        return self.host.__dlpack__()

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or ufunc.__name__ not in FUNCTIONS:
            return NotImplemented
        if "out" in options:
            (options["out"],) = options["out"]
        return self.cupy.call(ufunc.__name__, *inputs, **options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        if function.__name__ not in FUNCTIONS:
            return NotImplemented
        return self.cupy.call(function.__name__, *args, **options)

    def __getattr__(self, name: str) -> Any:
        """Return a method of NumPy's arrays that CuPy's have, too."""
        if name in ("all", "any", "copy"):
            return lambda: self._method(name)
        if name in ("max", "min", "sum"):
            return lambda: self.cupy.apply(lambda host: getattr(without_denormals(host), name)(), self)
        if name in ("item", "tolist", "tobytes"):
            return getattr(self.get(), name)
        raise AttributeError(name)

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def _method(self, name: str, *args: Any, **options: Any) -> Any:
        return self.cupy.apply(lambda host, *more: getattr(host, name)(*more, **options), self, *args)

    def _part(self, host: np.ndarray) -> "ndarray":
        return ndarray(self.cupy, host, self.memory)

    def view(self, dtype: Any) -> "ndarray":
        wide = np.dtype(dtype).itemsize
        if self.size and self.host.ctypes.data % wide:
            raise AssertionError(f"a GPU reads {dtype} only from multiples of {wide}")
        return self._part(self.host.view(dtype))

    def reshape(self, *shape: Any) -> "ndarray":
        assert self.host.flags.c_contiguous
        return self._part(self.host.reshape(*shape))

    def astype(self, dtype: Any, copy: bool = True) -> "ndarray":
        return self if not copy and self.dtype == dtype else self._method("astype", dtype)

    def fill(self, value: float) -> None:
        self[...] = value

    def get(self) -> np.ndarray:
        self.cupy.read(self)
        return self.host.copy()

    def __len__(self) -> int:
        return len(self.host)

    def __iter__(self) -> Iterator["ndarray"]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> "ndarray":
        if isinstance(key, ndarray):
            if key.dtype == bool:
                self.cupy.read(key)  # how many there are
            return self.cupy.apply(lambda host, key: host[key], self, key)
        expect_no_host_arrays([key])
        part = self.host[key]
        # A single entry is an array without dimensions, not a number.
        return self._part(self.host[key, ...] if not isinstance(part, np.ndarray) else part)

    def __setitem__(self, key: Any, value: Any) -> None:
        expect_no_host_arrays([key, value])
        inputs = [each for each in (key, value) if isinstance(each, ndarray)]
        self.cupy.stream.launch([each.memory for each in inputs], [self.memory])
        self.host[unwrapped(key)] = unwrapped(value)

    def __repr__(self) -> str:
        return f"fake cupy {self.host!r}"


def unwrapped(value: Any) -> Any:
    if isinstance(value, ndarray):
        return value.host
    if isinstance(value, (list, tuple)):
        return type(value)(map(unwrapped, value))
    return value


def arrays_in(values: Any) -> Iterator[ndarray]:
    for value in values:
        if isinstance(value, ndarray):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from arrays_in(value)


def expect_no_host_arrays(values: Any) -> None:
    for value in values:
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError(f"Unsupported type {type(value)}")
        if isinstance(value, (list, tuple)):
            expect_no_host_arrays(value)


class Device:
    """A GPU. Ranks are threads here: one that enters the device of another goes on as that rank.

    So it is on real ranks, whose threads share the default stream of their process.
    """

    def __init__(self, cupy: "FakeCuPy", number: int | None = None) -> None:
        self.id = getattr(cupy.local, "device", 0) if number is None else number
        self._cupy = cupy
        self._here = cupy.rank_here()

    pci_bus_id = property(lambda self: f"0000:0{self.id}:00.0")

    def use(self) -> None:
        """Make it the current one of this thread."""
        self._cupy.local.device = self.id

    def synchronize(self) -> None:
        for stream in self._cupy.streams.values():
            self._cupy.wait_for(stream)

    def __enter__(self) -> "Device":
        self._before = self._cupy.rank_here()
        self._cupy.go(self._here)
        return self

    def __exit__(self, *_: object) -> None:
        self._cupy.go(self._before)


class FakeCuPy(ModuleType):
    """The module. ``copied_to_host``: bytes of every copy there, each of which waits for the GPU.

    ``gpus``: of each machine.
    """

    float32, int32, int64, uint8 = np.float32, np.int32, np.int64, np.uint8

    def __init__(self, gpus: int = 1_000) -> None:
        super().__init__("cupy")
        self.__path__: list[str] = []
        self.ndarray = ndarray
        self.copied_to_host: list[int] = []
        self.local: Any = threading.local()
        self._addresses = iter(range(1 << 60, 1 << 61))
        self._alive: dict[int, Memory] = {}
        self.streams: dict[int, Stream] = {}
        self.cuda = cuda = ModuleType("cupy.cuda")
        cuda.__path__ = []  # type: ignore[attr-defined]
        self.nccl = cuda.nccl = FakeNccl(self)  # type: ignore[attr-defined]
        cuda.Device = functools.partial(Device, self)  # type: ignore[attr-defined]
        cuda.Event = Event  # type: ignore[attr-defined]
        cuda.Stream = functools.partial(Stream, self)  # type: ignore[attr-defined]
        cuda.get_current_stream = lambda: self.stream  # type: ignore[attr-defined]
        cuda.alloc_pinned_memory = pinned_memory  # type: ignore[attr-defined]
        cuda.runtime = ModuleType("cupy.cuda.runtime")  # type: ignore[attr-defined]
        cuda.runtime.getDeviceCount = lambda: gpus  # type: ignore[attr-defined]
        cuda.runtime.getDeviceProperties = lambda number: {"name": b"A GPU"}  # type: ignore[attr-defined]
        cuda.runtime.runtimeGetVersion = lambda: 12_090  # type: ignore[attr-defined]
        for name in MAKERS:
            setattr(self, name, functools.partial(self.make, getattr(np, name)))
        for name in FUNCTIONS:
            setattr(self, name, functools.partial(self.call, name))

    def next_address(self) -> int:
        return next(self._addresses)

    # ------------------------------------------------------------- streams and the host

    @property
    def stream(self) -> Stream:
        """The current stream of this thread."""
        if not hasattr(self.local, "stream"):
            self.local.stream = Stream(self)
        return self.local.stream

    def rank_here(self) -> tuple[Any, Any, Any]:
        """Return what makes a thread the rank that it is."""
        return self.stream, self.host_seen(), getattr(self.nccl.local, "comm", None)

    def go(self, place: tuple[Any, Any, Any]) -> None:
        """Let this thread be the rank of a place that ``rank_here`` has returned."""
        self.local.stream, self.local.seen, comm = place
        self.nccl.speaks_as(comm)

    def host_seen(self) -> defaultdict[int, int]:
        """How far this thread knows each stream to be, having waited for it."""
        if not hasattr(self.local, "seen"):
            self.local.seen = defaultdict(int)
        return self.local.seen

    def wait_for(self, stream: Stream) -> None:
        seen = self.host_seen()
        for each, mark in stream.seen.items():
            seen[each] = max(seen[each], mark)

    def read(self, array: ndarray) -> None:
        """Let the host read an array: on the current stream, and waiting for it."""
        self.stream.launch([array.memory], [])
        self.wait_for(self.stream)
        self.copied_to_host.append(array.nbytes)

    # ------------------------------------------------------------- arrays

    def register(self, array: ndarray) -> None:
        """Remember whose memory is at an address, for NCCL, which is given addresses."""
        if array.size:  # an empty one ends where another may begin
            self._alive[array.host.ctypes.data] = array.memory

    def memory_at(self, address: int) -> Memory:
        return self._alive[address]

    def memories_at(self, words: list[int]) -> list[Memory]:
        """Return what begins at those of the words that are addresses."""
        return [self._alive[word] for word in words if word in self._alive]

    def make(self, maker: Any, *args: Any, **options: Any) -> ndarray:
        array = ndarray(self, aligned(maker(*args, **options)))
        self.stream.launch([], [array.memory])
        return array

    def asarray(self, value: Any, dtype: Any = None) -> ndarray:
        if isinstance(value, ndarray):
            return value if dtype is None else value.astype(dtype, copy=False)
        return self.make(lambda: np.array(value, dtype))

    def array(self, value: Any, dtype: Any = None) -> ndarray:
        return self.asarray(value, dtype).copy()

    def ascontiguousarray(self, value: ndarray, dtype: Any = None) -> ndarray:
        return self.asarray(value, dtype)

    def from_dlpack(self, capsule: Any) -> ndarray:
        host = np.from_dlpack(Capsule(capsule))  # read-only, which an array of CuPy never is
        memory = (ctypes.c_ubyte * host.nbytes).from_address(host.ctypes.data)
        memory.owner = host
        return ndarray(self, np.ndarray(host.shape, host.dtype, memory))

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call NumPy's function of this name on what the arrays hold."""
        if name in WAITING:
            for array in arrays_in(args):
                self.read(array)
        if name == "split":
            return [args[0]._part(part) for part in np.split(args[0].host, *args[1:])]
        function = getattr(np, name) if name in MOVING else computing(getattr(np, name))
        return self.apply(function, *args, **options)

    def apply(self, function: Any, *args: Any, **options: Any) -> Any:
        """Do work on the current stream, and return what comes out as arrays of this module."""
        expect_no_host_arrays(args)
        out = options.get("out")
        writes = [] if out is None else [out.memory]
        self.stream.launch([array.memory for array in arrays_in([*args, *options.values()])], writes)
        result = function(*map(unwrapped, args), **{key: unwrapped(value) for key, value in options.items()})
        if out is not None:
            return out
        if isinstance(result, tuple):
            return tuple(self._made(each) for each in result)
        return self._made(result)

    def _made(self, result: Any) -> ndarray:
        array = ndarray(self, aligned(np.array(result)))
        self.stream.launch([], [array.memory])
        return array


def computing(function: Any) -> Any:
    """Return a function of NumPy for which denormals are zeros, in what it is given and what it returns."""

    def compute(*args: Any, **options: Any) -> Any:
        result = function(*map(without_denormals, args), **options)
        if "out" in options:
            options["out"][...] = without_denormals(options["out"])
        return without_denormals(result)

    return compute


def without_denormals(value: Any) -> Any:
    """Return an array with signed zeros for denormals where it is one of float32; else what was given."""
    if not isinstance(value, (np.ndarray, np.float32)) or value.dtype != np.float32:
        return value
    with np.errstate(all="ignore"):
        return np.where(np.abs(value) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), value), value)


def pinned_memory(size: int) -> bytearray:
    """Return host memory of at least so many bytes, as much as a pool keeps together."""
    return bytearray(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


def aligned(array: np.ndarray) -> np.ndarray:
    """Return a copy at an address as CuPy's are; who takes one over may count on that."""
    memory = np.empty(array.nbytes + ALIGNMENT_BYTES, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT_BYTES
    copy = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Capsule:
    """What NumPy takes a capsule of DLPack from."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@contextmanager
def installed(cupy: FakeCuPy) -> Iterator[FakeCuPy]:
    """Let ``import cupy`` find the module inside the block."""
    names = {"cupy": cupy, "cupy.cuda": cupy.cuda, "cupy.cuda.nccl": cupy.nccl}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in names.items():
            patch.setitem(sys.modules, name, module)
        yield cupy
