"""A GPU through CuPy: compiles the kernels, caches the binaries in the user's folder, and launches them."""

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib.errors import GpuUnavailable, InvalidArgument, OutOfDeviceMemory
from commlib.folders import user_cache
from commlib.gpu.engine import THREADS, Array, Engine, Source

DIGEST_BYTES = hashlib.sha256().digest_size


def _cached(key: bytes, make: Callable[[], bytes]) -> bytes:
    """Return the bytes that ``make`` returned for this key, kept in the user's cache folder if there is one.

    They are made again where they are damaged, or only half written as yet. Errors of the disk are ignored.
    """
    try:
        path = user_cache() / "kernels" / f"{hashlib.sha256(key).hexdigest()}.cubin"
    except InvalidArgument:  # no home
        return make()
    with suppress(OSError):
        digest, content = (whole := path.read_bytes())[:DIGEST_BYTES], whole[DIGEST_BYTES:]
        if digest == hashlib.sha256(content).digest():
            return content
    content = make()
    with suppress(OSError):  # compiling again next time costs seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hashlib.sha256(content).digest() + content)
    return content


OLDEST = (7, 0)  # compute capability: since then the lanes of a warp are scheduled independently


class CuPyEngine(Engine):
    """A device through CuPy; kernels run on CuPy's current stream. Get one from :func:`current_engine`."""

    def __init__(self, device: int) -> None:
        self._cupy = _import_cupy()
        self._modules: dict[Source, Any] = {}
        self._functions: dict[tuple[Source, str], Any] = {}
        self._device = self._cupy.cuda.Device(device)
        attributes = self._cupy.cuda.runtime.getDeviceProperties(device)
        self._capability = attributes["major"], attributes["minor"]
        if self._capability < OLDEST:
            name = attributes["name"].decode()
            found, needed = (".".join(map(str, each)) for each in (self._capability, OLDEST))
            raise GpuUnavailable(f"{name}: expected compute capability {needed} or more, got {found}")
        self.multiprocessors = attributes["multiProcessorCount"]

    def empty(self, size: int, dtype: npt.DTypeLike) -> Array:
        with self._device, _memory_errors():
            return self._cupy.empty(size, dtype)

    def clear(self, array: Array) -> None:
        if array.nbytes:
            array.data.memset_async(0, array.nbytes)

    def launch(
        self, source: Source, kernel: str, blocks: int, *arguments: Any, threads: int = THREADS
    ) -> None:
        """See :meth:`Engine.launch`; a module's first kernel compiles it (seconds, cached on disk)."""
        given = tuple(np.uintp(0) if argument is None else argument for argument in arguments)
        with self._device:
            self._function(source, kernel)((blocks,), (threads,), given)

    def prepare(
        self, source: Source, kernel: str, blocks: int, *fixed: Any, threads: int = THREADS
    ) -> Callable[..., None]:
        with self._device:
            function = self._function(source, kernel).ptr
        shape = blocks, 1, 1, threads, 1, 1, 0  # the last: bytes of dynamic shared memory
        start = partial(self._cupy.cuda.driver.launchKernel, function, *shape)
        return _Prepared(start, self._cupy.cuda.get_current_stream, fixed)

    def current(self) -> AbstractContextManager[Any]:
        return self._device

    def from_host(self, array: npt.NDArray[Any]) -> Array:
        with self._device, _memory_errors():
            return self._cupy.asarray(array)

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        return array.get()

    def address(self, array: Array) -> int:
        return int(array.data.ptr)

    def _function(self, source: Source, kernel: str) -> Any:
        if (source, kernel) not in self._functions:
            self._functions[source, kernel] = self._module(source).get_function(kernel)
        return self._functions[source, kernel]

    def _module(self, source: Source) -> Any:
        if source not in self._modules:
            refused = self._cupy.cuda.compiler.CompileException  # an NVRTC that does not know this GPU
            try:
                self._modules[source] = self._compiled(source)
            except (ImportError, RuntimeError, OSError, refused) as error:  # NVRTC is loaded only now
                if _is_out_of_memory(error):
                    raise OutOfDeviceMemory(f"the kernels of {source.name} do not fit: {error}") from error
                raise GpuUnavailable(f"CuPy cannot compile kernels: {error}; {_REMEDY}") from error
        return self._modules[source]

    def _compiled(self, source: Source) -> Any:
        """Return the module of a source; binaries are cached in the user's folder.

        Not as a RawModule: CuPy compiles those with denormal numbers flushed to zero. Here products and sums
        are rounded one by one, as on the CPU.
        """
        compiler = self._cupy.cuda.compiler
        options = ("-std=c++14", "--fmad=false", *(f"-D{macro}" for macro in source.macros))
        versions = self._cupy.__version__, self._cupy.cuda.nvrtc.getVersion()

        def compile_source() -> bytes:
            binary = compiler.compile_using_nvrtc(source.text, options)[0]
            return binary.encode() if isinstance(binary, str) else bytes(binary)  # PTX for newer GPUs

        module = self._cupy.cuda.function.Module()
        key = repr((source.text, options, self._capability, versions)).encode()
        module.load(_cached(key, compile_source))
        return module


class _Prepared:
    """A kernel with its arguments laid out for the driver; a call writes the changing ones, which come first.

    CuPy's own launch converts every argument in each call, which takes longer than many kernels.
    """

    def __init__(
        self, start: Callable[..., None], current_stream: Callable[[], Any], fixed: Sequence[Any]
    ) -> None:
        self._start, self._current_stream = start, current_stream
        self._fixed = fixed  # keeps the arrays alive
        self._words: Any = None
        self._pointers: Any = None

    def __call__(self, *changing: Any) -> None:
        if self._words is None:
            self._lay_out(changing)
        words = self._words
        for position, argument in enumerate(changing):
            words[position] = _word_of(argument)
        self._start(self._current_stream().ptr, ctypes.addressof(self._pointers), 0)

    def _lay_out(self, changing: Sequence[Any]) -> None:
        given = [*map(_word_of, changing), *map(_word_of, self._fixed)]
        self._words = (ctypes.c_uint64 * len(given))(*given)
        first = ctypes.addressof(self._words)
        self._pointers = (ctypes.c_void_p * len(given))(*range(first, first + 8 * len(given), 8))


def _word_of(argument: Any) -> int:
    """Return an argument's bytes as a number: an array's address, 0 for none, a NumPy scalar's own."""
    if argument is None:
        return 0
    if isinstance(argument, np.generic):
        return int.from_bytes(argument.tobytes(), "little")
    return int(argument.data.ptr)


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, MemoryError) or "MemoryAllocation" in text or "OUT_OF_MEMORY" in text


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Raise MemoryError for the errors of CuPy's allocators when memory is short."""
    try:
        yield
    except RuntimeError as error:
        if _is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        raise


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
    """Return the engine of a device, by default CuPy's current one; one engine per device.

    Raises ``GpuUnavailable`` where there is no CuPy, no CUDA, no GPU, or one older than Volta.
    """
    return _engine(_import_cupy().cuda.Device().id if device is None else device)


_engine = cache(CuPyEngine)
