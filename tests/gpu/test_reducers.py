"""Reducers on arrays of a fake GPU, through a fake NCCL, with the kernels of ``commlib.gpu`` in the emulator.

Every reducer has the bits of the CPU, and some keep the promises of ``test_promises``.
"""

import numpy as np
import pytest

from commlib import InvalidArgument, Topology, make_reducer
from commlib.transport import simulated
from tests.extent import more
from tests.gpu import on_gpu
from tests.gpu.on_gpu import GPURanks, bodies_of, make_reducer_from_host
from tests.reducers import test_promises
from tests.reducers.test_promises import gradient

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


def train(comm, label, make):
    name, *_ = label.split("-")
    reducer = make(name, Topology(comm, ranks_per_node=2), size=SIZE, **CASES[label])
    means = [reducer.reduce(gradient(SIZE, comm.rank, step)) for step in range(STEPS)]
    return [mean.tobytes() for mean in means], reducer.residual.tobytes(), reducer.last.traffic.sent


@pytest.mark.parametrize("label", CASES)
@pytest.mark.parametrize("world_size", [3, *more(2, 4)])
def test_every_bit_and_every_byte_is_that_of_the_cpu(world_size, label):
    found = GPURanks(world_size).run(lambda comm: train(comm, label, make_reducer_from_host))
    assert found == simulated.run(lambda comm: train(comm, label, make_reducer), world_size)


def test_a_step_of_hitopk_copies_no_vector_to_the_host():
    size = 1 << 16
    ranks = GPURanks(4)

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


# ------------------------------------------------------------- promises


NO_ARRAYS_OF_GPUS = ("test_a_wrong_dtype_is_refused",)  # of text and objects


@pytest.fixture(params=[4, *more(1, 2, 3, 6)], ids=lambda size: f"P{size}")
def gpu_ranks(request):
    return GPURanks(request.param)


@pytest.fixture(params=["torus2d", "hitopk"])
def case(request):
    return test_promises.CASES[request.param]


way = kind = case


@pytest.fixture(autouse=True)
def gradients_of_the_host(monkeypatch):
    monkeypatch.setattr(test_promises, "make_reducer", on_gpu.make_reducer_from_host)


globals().update(bodies_of(test_promises, "gpu_ranks", without=NO_ARRAYS_OF_GPUS))


@pytest.mark.parametrize("dtype", [bool, complex])
def test_a_wrong_dtype_is_refused_on_a_gpu(gpu_ranks, dtype):
    def body(comm):
        reducer = make_reducer("hitopk", Topology(comm), size=10)
        with pytest.raises(InvalidArgument, match=f"gradient: expected real numbers, got {np.dtype(dtype)}"):
            reducer.reduce(comm.arrays.zeros(10, dtype))
        return reducer.steps

    assert gpu_ranks.run(body) == [0] * gpu_ranks.size
