"""Reducers with the kernels themselves: those of ``commlib.gpu``, run by the emulator, behind a fake NCCL."""

from contextlib import contextmanager

import numpy as np
import pytest

from commlib import SparseVector, Topology, kernels, make_reducer
from commlib.gpu.engine import Engine
from commlib.kernels import kernels_of
from commlib.transport import simulated
from commlib.vectors import partition, sum_sparse
from tests.extent import more
from tests.gpu.emulator.engine import COMPILER, EmulatedEngine
from tests.gpu.fake_cupy import ndarray
from tests.gpu.fake_kernels import unwrapped, wrapped
from tests.gpu.on_gpu import FromHost, GPURanks, make_reducer_from_host
from tests.gpu.test_scatter import rows_of
from tests.reducers.test_promises import gradient

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
SIZE, STEPS = 3001, 3
CASES = {
    "dense": {},
    "torus2d": {},
    **{
        f"{name}-{wire}": {"density": 0.05, "wire": wire}
        for name in ("allgather", "hitopk")
        for wire in ("fp32", "gap+fp16")
    },
    "hitopk-bitmap+qsgd4": {"density": 0.05, "wire": "bitmap+qsgd4"},
    "hitopk-past-delta": {"density": 0.7},
    "hioktopk": {"density": 0.05, "reevaluate_every": 2},
    "oktopk": {"density": 0.05, "wire": "bf16"},
    "hitopk-dgc": {"density": 0.05, "selector": "dgc"},
    "hitopk-bucketed": {"density": 0.05, "selector": "bucketed"},
    "gtopk": {"density": 0.05},
    "ssar_doubling": {"density": 0.3},
    "ssar_split": {"density": 0.05, "wire": "gap+qsgd2"},
    "dsar_split": {"density": 0.05, "sums": "qsgd8"},
}


class EngineOfFakeCuPy(Engine):
    """Runs kernels on arrays of the fake CuPy, on its current stream."""

    def __init__(self, cupy):
        self._cupy, self._emulated = cupy, EmulatedEngine(seed=1)
        self.multiprocessors = self._emulated.multiprocessors

    def empty(self, size, dtype):
        return ndarray(self._cupy, self._emulated.empty(size, dtype))

    def clear(self, array):
        array.fill(0)

    def launch(self, source, kernel, blocks, *arguments, **options):
        arrays = [each for each in arguments if isinstance(each, ndarray)]
        memory = [each.memory for each in arrays]
        self._cupy.stream.launch([*memory, *self._named_in(source, arrays)], memory)
        given = [each.host if isinstance(each, ndarray) else each for each in arguments]
        self._emulated.launch(source, kernel, blocks, *given, **options)

    def _named_in(self, source, arrays):
        """What a kernel of sums reads without being given it: its table says where that lies."""
        if source.name != "scatter":
            return []
        words = [word for each in arrays if each.dtype == np.uint64 for word in each.host.tolist()]
        return self._cupy.memories_at(words)

    def from_host(self, array):
        return self._cupy.asarray(array)

    def to_host(self, array):
        return array.get()

    def address(self, array):
        return array.host.ctypes.data


@contextmanager
def engine_for(cupy):
    before, engine = kernels.current_engine, EngineOfFakeCuPy(cupy)
    kernels.current_engine = lambda: engine
    try:
        yield
    finally:
        kernels.current_engine = before


def train(comm, label, make):
    name, *_ = label.split("-")
    reducer = make(name, Topology(comm, ranks_per_node=2), size=SIZE, **CASES[label])
    means = [reducer.reduce(gradient(SIZE, comm.rank, step)) for step in range(STEPS)]
    return [mean.tobytes() for mean in means], reducer.residual.tobytes(), reducer.last.traffic.sent


@pytest.mark.parametrize("label", CASES)
@pytest.mark.parametrize("world_size", [3, *more(2, 4)])
def test_every_bit_and_every_byte_is_that_of_the_cpu(world_size, label):
    on_gpu = GPURanks(world_size, engine=engine_for).run(
        lambda comm: train(comm, label, make_reducer_from_host)
    )
    assert on_gpu == simulated.run(lambda comm: train(comm, label, make_reducer), world_size)


@pytest.mark.parametrize("world_size", [3, *more(2, 6)])
def test_parts_are_added_up_as_on_the_cpu(world_size):
    def body(comm):
        bounds = partition(1001, comm.size)
        return comm.reduce_scatter(rows_of(1001, comm.size)[comm.rank], bounds).tobytes()

    on_gpu = GPURanks(world_size, wrap=FromHost, engine=engine_for).run(body)
    assert on_gpu == simulated.run(body, world_size)


def vector_of(size, entries, rank):
    """``entries`` of them in a row, from the place that is the rank's; all of the vector is a dense one."""
    values = (np.arange(entries) + 10 * rank + 1).astype(np.float32)
    indices = None if entries == size else np.arange(rank, rank + entries, dtype=np.int32)
    return SparseVector(size, indices, values)


@pytest.mark.parametrize("entries", [(30, 0, 40), (0, 0), (300, 0, 400), (30, 1000, 40)])
def test_sums_are_sparse_or_dense_as_on_the_cpu(entries):
    vectors = [vector_of(1000, each, rank) for rank, each in enumerate(entries)]

    def body(comm):
        summed = unwrapped(
            kernels_of(comm.arrays).sum_sparse([wrapped(vector, comm.arrays) for vector in vectors])
        )
        return summed.is_dense, summed.indices_or_range.tobytes(), summed.values.tobytes()

    here = sum_sparse(vectors)
    expected = here.is_dense, here.indices_or_range.tobytes(), here.values.tobytes()
    assert GPURanks(1, engine=engine_for).run(body) == [expected]


def test_a_step_of_hitopk_copies_no_vector_to_the_host():
    size = 1 << 16
    ranks = GPURanks(4, engine=engine_for)

    def body(comm):
        reducer = make_reducer("hitopk", Topology(comm, ranks_per_node=2), size=size, density=0.01)
        given = comm.arrays.asarray(gradient(size, comm.rank, 0))
        comm.barrier()
        if comm.rank == 0:
            comm.arrays.copied_to_host.clear()
        comm.barrier()
        reducer.reduce(given)

    ranks.run(body)
    # How many were selected, if all is finite; how many of the indices of a stream are distinct; whether the
    # sums of this rank's shard are finite, and whether those of the others are.
    assert sorted(set(ranks.cupy.copied_to_host)) == [1, 8, 16]
    assert len(ranks.cupy.copied_to_host) == 4 * 4
