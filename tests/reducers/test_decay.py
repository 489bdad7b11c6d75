"""Residual decay: what is left, what is forgotten, what is refused; the promises have cases with it."""

import numpy as np
import pytest

from commlib import InvalidArgument, Topology, make_reducer
from commlib.reducers.report import Forgotten
from commlib.reducers.residual import decayed
from commlib.transport import simulated
from tests.exchanges import whole_exchange
from tests.gpu.fake_cupy import FakeCuPy


def test_a_residual_is_halved_before_a_gradient_is_added():
    def body(comm):
        reducer = make_reducer("allgather", Topology(comm), size=3, density=1 / 3, decay=0.5)
        seen = []
        for gradient in ([8, 4, 2], [0, 1, 1.5], [0, 0, 0]):
            mean = reducer.reduce(np.float32(gradient) * (1 + 2 * comm.rank))
            seen.append((mean.tolist(), reducer.residual.tolist(), reducer.last.forgotten))
        return seen

    first, second = simulated.run(body, 2)
    assert first == [
        ([16, 0, 0], [0, 4, 2], Forgotten(0, 0)),
        ([0, 6, 0], [0, 0, 2.5], Forgotten(5**0.5, 3)),
        ([0, 0, 2.5], [0, 0, 0], Forgotten(1.25, 1.25)),
    ]
    assert second[1] == ([0, 6, 0], [0, 0, 7.5], Forgotten(45**0.5, 9))


def test_the_report_of_buckets_has_what_all_of_them_forgot():
    def body(comm):
        buckets = whole_exchange("allgather", Topology(comm), [2, 3], density=0.1, decay=0.75)
        buckets.reduce(np.float32([-16, 9, 12, 20, -8]))
        buckets.reduce(np.zeros(5, np.float32))
        return buckets.last.forgotten

    # a quarter of 0, 9, 12, 0 and -8
    assert simulated.run(body, 2) == [Forgotten(pytest.approx(17 / 4), 13 / 4)] * 2


@pytest.mark.parametrize("size", [1, 16, 1000])
def test_the_gpu_forgets_what_the_cpu_does(size):
    residual = np.random.default_rng(size).standard_t(2, size).astype(np.float32)
    kept = np.empty_like(residual)
    expected = decayed(residual, 0.9, out=kept)
    assert expected.norm == pytest.approx(np.linalg.norm(residual.astype(np.float64) - kept), rel=1e-12)
    cupy = FakeCuPy()
    found_kept = cupy.empty(size, np.float32)
    found = decayed(cupy.asarray(residual), 0.9, out=found_kept)
    assert (found.norm, found.sum) == pytest.approx((expected.norm, expected.sum), rel=1e-12)
    assert found_kept.get().tobytes() == kept.tobytes()


@pytest.mark.parametrize("bad", [0, -0.5, 1.5, float("nan"), True, "0.9", None])
def test_a_decay_that_is_none_is_refused(bad):
    def body(comm):
        with pytest.raises(InvalidArgument) as caught:
            make_reducer("hitopk", Topology(comm), size=10, decay=bad)
        return str(caught.value)

    assert simulated.run(body, 2) == [f"decay: expected a number in (0, 1], got {bad!r}"] * 2
