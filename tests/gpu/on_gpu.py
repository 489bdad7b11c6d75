"""The tests of the CPU on a GPU: ranks whose arrays lie there, for bodies that know NumPy's alone."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from commlib import Network, make_reducer
from commlib.gpu import codecs, scatter, selection
from commlib.gpu.engine import Array, Engine, Source
from commlib.transport import nccl, simulated
from commlib.transport.base import Request
from tests.gpu.emulator.engine import COMPILER, EmulatedEngine
from tests.gpu.fake_cupy import FakeCuPy, installed, ndarray


class EngineOfFakeCuPy(Engine):
    """Runs kernels on arrays of the fake CuPy, on its current stream."""

    def __init__(self, cupy: FakeCuPy) -> None:
        self._cupy, self._emulated = cupy, EmulatedEngine(seed=1)
        self.multiprocessors = self._emulated.multiprocessors

    def empty(self, size: int, dtype: Any) -> Array:
        return ndarray(self._cupy, self._emulated.empty(size, dtype))

    def clear(self, array: Array) -> None:
        array.fill(0)

    def launch(self, source: Source, kernel: str, blocks: int, *arguments: Any, **options: Any) -> None:
        arrays = [each for each in arguments if isinstance(each, ndarray)]
        memory = [each.memory for each in arrays]
        self._cupy.stream.launch([*memory, *self._named_in(source, arrays)], memory)
        given = [each.host if isinstance(each, ndarray) else each for each in arguments]
        self._emulated.launch(source, kernel, blocks, *given, **options)

    def _named_in(self, source: Source, arrays: Sequence[Array]) -> list[Any]:
        """Return the memory of the vectors whose addresses are in the table of a kernel of sums."""
        if source.name != "scatter":
            return []
        words = [word for each in arrays if each.dtype == np.uint64 for word in each.host.tolist()]
        return self._cupy.memories_at(words)

    def from_host(self, array: Any) -> Array:
        return self._cupy.asarray(array)

    def to_host(self, array: Array) -> Any:
        return array.get()

    def address(self, array: Array) -> int:
        return int(array.host.ctypes.data)


@contextmanager
def kernels_for(cupy: FakeCuPy) -> Iterator[None]:
    """Let the emulator run all kernels for a fake CuPy inside the block."""
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    engine, modules = EngineOfFakeCuPy(cupy), (codecs, scatter, selection)
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "current_engine", lambda: engine)
        yield


class GPURanks:
    """Runs ``function(comm)`` as ``tests.conftest.Ranks`` does, on ranks that have a fake GPU each.

    ``between``: as of ``nccl.world``. ``wrap``: what is made of each communicator before it is handed on.
    """

    def __init__(
        self, size: int, between: str = "nccl", wrap: Callable[[Any], Any] = lambda comm: comm
    ) -> None:
        self.size, self._between, self._wrap = size, between, wrap
        self.cupy = FakeCuPy()

    def run(
        self,
        function: Callable[[Any], Any],
        ranks_per_node: int | Sequence[int] | None = None,
        network: Network | None = None,
    ) -> list[Any]:
        self.cupy = cupy = FakeCuPy()

        def body(comm: Any) -> Any:
            cupy.nccl.speaks_as(comm)
            return function(self._wrap(nccl.over(comm, between=self._between)))

        with installed(cupy), kernels_for(cupy):
            results = simulated.run(body, self.size, ranks_per_node, network)
        cupy.nccl.expect_progress()
        return results


def to_gpu(value: Any, cupy: Any) -> Any:
    """Return arrays as those of the GPU: values of an array, or of several in a list."""
    if isinstance(value, (list, tuple)):
        return [to_gpu(each, cupy) for each in value]
    return cupy.asarray(value) if isinstance(value, np.ndarray) else value


class Delivered(Request):
    """A message that is copied to the array of the host once it is there."""

    def __init__(self, request: Request, array: Any, host: Any) -> None:
        self._request, self._array, self._host = request, array, host

    def wait(self) -> None:
        self._request.wait()
        self._host[...] = self._array.get()


class FromHost:
    """A communicator of a GPU that is handed arrays of the host: they are copied there, and back."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._cupy = comm, comm.arrays

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def split(self, color: int) -> "FromHost":
        return FromHost(self._comm.split(color))

    def send(self, array: Any, destination: int) -> Request:
        return self._comm.send(to_gpu(array, self._cupy), destination)

    def receive(self, array: Any, source: int) -> Request:
        there = to_gpu(array, self._cupy)
        return Delivered(self._comm.receive(there, source), there, array)

    def exchange(self, outgoing: Any, incoming: Any) -> None:
        there = to_gpu(incoming, self._cupy)
        self._comm.exchange(to_gpu(outgoing, self._cupy), there)
        bring_back(there, incoming)

    def allgather(self, own: Any, parts: Any) -> None:
        there = to_gpu(parts, self._cupy)
        self._comm.allgather(to_gpu(own, self._cupy), there)
        bring_back(there, parts)

    def reduce_scatter(self, vector: Any, bounds: Any) -> Any:
        return self._comm.reduce_scatter(to_gpu(vector, self._cupy), bounds).get()


def bring_back(arrays: Sequence[Any], hosts: Sequence[Any]) -> None:
    for array, host in zip(arrays, hosts, strict=True):
        host[...] = array.get()


class ReducerFromHost:
    """A reducer on a GPU that is handed gradients of the host; means and residuals are copied back."""

    def __init__(self, reducer: Any) -> None:
        self.reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)

    def reduce(self, gradient: Any) -> Any:
        reducer = self.reducer
        mean = reducer.reduce(to_gpu(gradient, reducer.arrays))
        assert type(mean).__module__ == "cupy"
        return mean.get()

    @property
    def residual(self) -> Any:
        return self.reducer.residual.get()


def make_reducer_from_host(*args: Any, **options: Any) -> ReducerFromHost:
    return ReducerFromHost(make_reducer(*args, **options))


def bodies_of(module: Any, fixture: str, without: Sequence[str] = ()) -> dict[str, Callable[..., None]]:
    """Return the tests of a module that take ``ranks``, with those of ``fixture`` instead."""
    missing = [name for name in without if name not in vars(module)]
    assert not missing, f"no such tests: {missing}"
    return {
        name: with_fixture(body, fixture)
        for name, body in vars(module).items()
        if name.startswith("test_") and name not in without and "ranks" in inspect.signature(body).parameters
    }


def with_fixture(body: Callable[..., None], fixture: str) -> Callable[..., None]:
    signature = inspect.signature(body)

    @functools.wraps(body)
    def test(**arguments: Any) -> None:
        body(ranks=arguments.pop(fixture), **arguments)

    del test.__wrapped__  # type: ignore[attr-defined]
    names = [fixture if name == "ranks" else name for name in signature.parameters]
    test.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    )
    return test
