"""The promises of reducers, for wrapped ones: those whose bodies do not count on gradients that are not lost.

That velocities are not lost is in ``tests/test_wrappers.py``, for every sparse reducer.
"""

import pytest

from commlib import REDUCERS
from tests.reducers.test_promises import (  # noqa: F401 - collected here with the cases below
    check_bytes,
    test_a_bad_number_voids_the_step_on_every_rank_and_changes_nothing,
    test_a_residual_is_flushed_into_the_first_step_of_the_successor,
    test_a_residual_that_cannot_be_flushed_is_refused,
    test_a_restored_reducer_continues_bitwise,
    test_a_state_of_another_reducer_or_world_is_refused,
    test_a_wrong_shape_or_dtype_is_refused,
    test_dense_steps_equal_a_float64_reference,
    test_runs_repeat_bitwise,
    train,
)

# Clipping computes the norm, which is below this one: gradients stay as they are.
WRAPPERS = [{"name": "momentum_correction", "momentum": 0.5}, {"name": "local_clipping", "norm": 1e38}]
CASES = {
    "hitopk": ("hitopk", {"density": 0.05, "wrappers": WRAPPERS}),
    "oktopk": (
        "oktopk",
        {"density": 0.05, "reevaluate_every": 2, "repartition_every": 3, "wrappers": WRAPPERS},
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


way = kind = case


def test_accounting_meets_the_formula(ranks, case):
    name, options = case
    seen = ranks.run(lambda comm: train(comm, name, options, 1000, 2))
    check_bytes(seen, 1000, REDUCERS[name].cost.is_exact and ranks.size > 1)
