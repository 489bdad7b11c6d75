"""The promises of reducers, for a gradient in three buckets that a reducer each takes: they count as one."""

import numpy as np
import pytest

from commlib import Topology, make_reducer
from commlib.exchange import bucket_bounds
from commlib.transport import simulated
from tests.exchanges import whole_exchange
from tests.reducers import test_promises
from tests.reducers.test_promises import (  # noqa: F401 - collected here with the cases below
    STEPS,
    gradient,
    test_a_bad_number_voids_the_step_on_every_rank_and_changes_nothing,
    test_a_residual_is_flushed_into_the_first_step_of_the_successor,
    test_a_residual_that_cannot_be_flushed_is_refused,
    test_a_restored_reducer_continues_bitwise,
    test_a_state_of_another_reducer_or_world_is_refused,
    test_dense_steps_equal_a_float64_reference,
    test_finite_numbers_that_add_up_to_an_infinity_void_the_step,
    test_runs_repeat_bitwise,
    test_ties_agree,
)

CORRECTED = {"density": 0.05, "wrappers": [{"name": "momentum_correction", "momentum": 0.5}]}
CASES = {
    "dense": ("dense", {}),
    "oktopk": ("oktopk", {"density": 0.05, "reevaluate_every": 2, "repartition_every": 3}),
    "hitopk": ("hitopk", {"density": 0.05}),
}
ONE_BY_ONE = {
    **CASES,
    "gtopk-fp16": ("gtopk", {"density": 0.05, "wire": "fp16"}),
    "corrected": ("hitopk", CORRECTED),
}


def in_buckets(name, topology, size, **options):
    """Return buckets of about one, five and four tenths of the entries."""
    bounds = [0, size // 10, size * 6 // 10, size]
    sizes = [high - low for low, high in zip(bounds[:-1], bounds[1:], strict=True) if high > low]
    return whole_exchange(name, topology, sizes, **options)


@pytest.fixture(autouse=True)
def _buckets(monkeypatch):
    monkeypatch.setattr(test_promises, "make_reducer", in_buckets)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


way = kind = case


@pytest.mark.parametrize("case", ONE_BY_ONE.values(), ids=ONE_BY_ONE)
def test_buckets_give_what_their_reducers_give_one_by_one(ranks, case):
    name, options = case

    def body(comm):
        topology = Topology(comm, ranks_per_node=2)
        buckets = in_buckets(name, topology, 1000, **options)
        parts = [make_reducer(name, topology, reducer.size, **options) for reducer in buckets.reducers]
        for step in range(STEPS):
            given = gradient(1000, comm.rank, step)
            mean = buckets.reduce(given)
            apart = [part.reduce(given[each]) for part, each in zip(parts, buckets.slices, strict=True)]
            assert mean.tobytes() == np.concatenate(apart).tobytes()
            reports = [part.last for part in parts]
            assert buckets.last.selected == sum(each.selected for each in reports)
            assert buckets.last.applied == sum(each.applied for each in reports)
            assert buckets.last.traffic.sent.inter == sum(each.traffic.sent.inter for each in reports)
        assert buckets.residual.tobytes() == np.concatenate([part.residual for part in parts]).tobytes()
        return True

    assert all(ranks.run(body))


def test_the_norms_to_which_buckets_are_clipped_make_up_that_of_the_gradient():
    def body(comm):
        wrappers = [{"name": "local_clipping", "norm": 3.0}]
        buckets = whole_exchange("hitopk", Topology(comm), [90, 910], density=0.1, wrappers=wrappers)
        return [reducer.options.norm for reducer in buckets.reducers]

    (norms,) = simulated.run(body, 1)
    assert norms == pytest.approx([3.0 * 0.09**0.5, 3.0 * 0.91**0.5])
    assert np.linalg.norm(norms) == pytest.approx(3.0)


@pytest.mark.parametrize("sizes", [[7], [1, 1, 1], [10, 300, 20, 30, 5], [1000, 1], [3, 0, 4]])
@pytest.mark.parametrize("most", [4, 40, 140, 4000])
def test_bounds_of_buckets_lie_between_variables_and_only_one_variable_is_too_long(sizes, most):
    ends = np.cumsum([0, *sizes]).tolist()
    bounds = bucket_bounds(sizes, most)
    assert bounds[0] == 0
    assert bounds[-1] == ends[-1]
    assert all(low < high for low, high in zip(bounds[:-1], bounds[1:], strict=True))
    assert set(bounds) <= set(ends)
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        variables = [each for each in ends[1:] if low < each <= high]
        assert 4 * (high - low) <= most or len(set(variables)) == 1
    # from the end: no bucket could take one more variable
    for low, high in zip(bounds[1:-1], bounds[2:], strict=True):
        before = max(each for each in ends if each < low)
        assert 4 * (high - before) > most


def test_a_bucket_has_at_most_half_of_what_is_left_while_that_is_a_mebibyte():
    mebibyte = 1 << 18
    bounds = bucket_bounds([mebibyte // 4] * 160, most_bytes=25 << 20)
    assert [each / mebibyte for each in bounds] == [0, 1.25, 2.5, 5, 10, 20, 40]
    assert bucket_bounds([mebibyte] * 200, most_bytes=25 << 20)[-3:] == [
        150 * mebibyte,
        175 * mebibyte,
        200 * mebibyte,
    ]
    assert bucket_bounds([mebibyte // 4] * 7, most_bytes=25 << 20) == [0, 7 * mebibyte // 4]
