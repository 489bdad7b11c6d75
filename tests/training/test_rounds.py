"""Rounds of local steps on quadratic losses, where the end of each round is known, by every reducer."""

import numpy as np
import pytest

from commlib.rounds import Schedule
from tests.extent import more
from tests.training.streamed import (
    CASES,
    DILOCO,
    OPTIONS,
    RATE,
    SIZE,
    START,
    Course,
    assert_nothing_is_lost,
    loss_of,
    on_ranks,
)
from training.config.records import Outer

ROUNDS = 5


def trained(ranks, steps, case="dense", outer=None, **others):
    """Return what each rank sees in rounds of so many steps; weights and reports are those of their ends."""
    course = Course(Schedule(steps), ROUNDS * steps, outer or Outer())
    found = on_ranks(ranks, course, CASES[case], **others)
    for rank in found:
        rank.weights, rank.reports = rank.weights[steps - 1 :: steps], rank.reports[steps - 1 :: steps]
    return found


def closed_form(ranks, steps, outer):
    """Return the common weights after each round in float64.

    ``w = c + (1 − η·a)^H·(θ − c)``, and the mean of ``θ − w`` moves ``θ`` as a gradient does.
    """
    common, velocity, seen = START.astype(np.float64), 0.0, []
    for _ in range(ROUNDS):
        means = [
            (1 - (1 - RATE * curvature) ** steps) * (common - minimum)
            for curvature, minimum in map(loss_of, range(ranks))
        ]
        mean = np.mean(means, axis=0)
        velocity = outer.momentum * velocity + mean
        common = common - outer.rate * (mean + outer.momentum * velocity if outer.nesterov else velocity)
        seen.append(common)
    return seen


@pytest.mark.parametrize("steps", [1, 4, 30])
@pytest.mark.parametrize(
    "outer", [Outer(), Outer(**DILOCO), Outer(rate=0.5, momentum=0.8)], ids=["mean", "diloco", "momentum"]
)
def test_rounds_end_where_the_closed_form_says(outer, steps):
    seen = trained(3, steps, outer=outer)[0]
    # float32 rounding of some 150 steps, which momentum adds up
    np.testing.assert_allclose(seen.weights, closed_form(3, steps, outer), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("world_size", [1, 4, *more(2, 3, 5)])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_common_weights_agree_to_the_bit_and_no_difference_is_lost(case, steps, world_size):
    seen = trained(world_size, steps, case)
    for number in range(ROUNDS):
        assert len({rank.weights[number].tobytes() for rank in seen}) == 1
    tolerance = 1e-4
    if "decay" not in CASES[case][1]:
        assert_nothing_is_lost(seen, tolerance)
        return
    # of what is forgotten the sum is known
    forgotten = sum(report.forgotten.sum for rank in seen for report in rank.reports)
    kept = world_size * (START.astype(np.float64) - seen[0].weights[-1]) + sum(rank.residual for rank in seen)
    given = np.sum([rank.differences for rank in seen], dtype=np.float64)
    assert kept.sum() + forgotten == pytest.approx(given, abs=SIZE * tolerance)
    assert (forgotten != 0) == (world_size > 1)


@pytest.mark.parametrize("case", [*OPTIONS, "sparseloco"])
def test_the_round_of_a_rank_that_failed_is_skipped_on_all_ranks(case):
    seen = trained(4, 4, case, Outer(**DILOCO), failed=(2, 5))  # the first step of the second round
    assert [[report.finite for report in rank.reports] for rank in seen] == [
        [True, False, True, True, True]
    ] * 4
    for rank in seen:
        assert rank.weights[1].tobytes() == rank.weights[0].tobytes() == seen[0].weights[0].tobytes()
        assert rank.weights[2].tobytes() == seen[0].weights[2].tobytes() != rank.weights[1].tobytes()
        # the same local steps from the same weights: nothing of the skipped round is left anywhere
        if rank is not seen[2]:
            assert rank.differences[2].tobytes() == rank.differences[1].tobytes()
