"""Reducers on arrays of a fake GPU, through a fake NCCL, with the kernels of ``commlib.gpu`` in the emulator.

Every reducer has the bits of the CPU; ``test_on_a_gpu`` holds them to the promises of ``test_promises``.
"""

import numpy as np
import pytest

from commlib import InvalidArgument, Topology, make_reducer
from commlib.transport import simulated
from tests.gpu.on_gpu import GPURanks, make_reducer_from_host
from tests.reducers.test_promises import gradient

SIZE, STEPS, WORLD_SIZE = 3001, 3, 3
CASES = {
    "dense": {},
    "torus2d": {},
    "allgather": {"density": 0.05, "wire": "gap+fp16"},
    "gtopk": {"density": 0.05},
    "ssar_doubling": {"density": 0.3},
    "ssar_split": {"density": 0.05, "wire": "gap+qsgd2"},
    "dsar_split": {"density": 0.05, "sums": "qsgd8"},
    "oktopk": {"density": 0.05, "wire": "bf16"},
    "hitopk": {"density": 0.05, "wire": "bitmap+qsgd4", "selector": "dgc"},
    "hitopk-past-delta": {"density": 0.7},
    "hioktopk": {"density": 0.05, "reevaluate_every": 2},
}


def train(comm, label, make):
    name, *_ = label.split("-")
    reducer = make(name, Topology(comm, ranks_per_node=2), size=SIZE, **CASES[label])
    means = [reducer.reduce(gradient(SIZE, comm.rank, step)) for step in range(STEPS)]
    return [mean.tobytes() for mean in means], reducer.residual.tobytes(), reducer.last.traffic.sent


@pytest.mark.parametrize("label", CASES)
def test_every_bit_and_every_byte_is_that_of_the_cpu(label):
    found = GPURanks(WORLD_SIZE).run(lambda comm: train(comm, label, make_reducer_from_host))
    assert found == simulated.run(lambda comm: train(comm, label, make_reducer), WORLD_SIZE)


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


@pytest.mark.parametrize("dtype", [bool, complex])
def test_a_wrong_dtype_is_refused_on_a_gpu(dtype):
    def body(comm):
        reducer = make_reducer("hitopk", Topology(comm), size=10)
        with pytest.raises(InvalidArgument, match=f"gradient: expected real numbers, got {np.dtype(dtype)}"):
            reducer.reduce(comm.arrays.zeros(10, dtype))
        return reducer.steps

    assert GPURanks(2).run(body) == [0, 0]


@pytest.mark.parametrize("name", ["exdyna", "spardl", "arctopk", "powersgd"])
def test_a_reducer_without_kernels_for_gpus_is_refused(name):
    def body(comm):
        with pytest.raises(InvalidArgument, match=r"^reducer: \w+ takes arrays in host memory, got a GPU's$"):
            make_reducer(name, Topology(comm), size=10)
        return True

    assert GPURanks(2).run(body) == [True, True]
