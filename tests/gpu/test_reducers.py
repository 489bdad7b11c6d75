"""The promises of every reducer, on arrays of a GPU: the bodies of the CPU's tests, through a fake NCCL."""

import numpy as np
import pytest

from commlib import REDUCERS, InvalidArgument, Topology, make_reducer
from tests.extent import ALL, more
from tests.gpu import on_gpu
from tests.gpu.on_gpu import GPURanks, bodies_of
from tests.reducers import test_promises

NO_ARRAYS_OF_GPUS = ("test_a_wrong_dtype_is_refused",)  # of text and objects
SAMPLING = ("-dgc", "-gaussian", "-bucketed")  # selectors that nothing here tells from the others
CASES = {
    label: case
    for label, case in test_promises.CASES.items()
    if label in (*REDUCERS, "dsar_split-qsgd8", "ssar_split-all") or (ALL and not label.endswith(SAMPLING))
}
ONE_OF_A_KIND = ("torus2d", "hitopk")


@pytest.fixture(params=[4, *more(1, 2, 3, 6)], ids=lambda size: f"P{size}")
def gpu_ranks(request):
    return GPURanks(request.param)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


way = case


@pytest.fixture(params=ONE_OF_A_KIND)
def kind(request):
    return CASES[request.param]


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
