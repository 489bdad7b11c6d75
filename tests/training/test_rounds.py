"""Rounds of local steps on quadratic losses, where the end of each round is known, by every reducer."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from commlib import Topology, make_reducer
from commlib.reducers import REDUCERS
from commlib.rounds import OuterSgd, Rounds
from commlib.transport import simulated
from tests.extent import more
from training.config.records import Outer

SIZE, ROUNDS, RATE = 60, 5, 0.1
ALL = slice(0, SIZE)
START = np.random.default_rng(3).standard_normal(SIZE).astype(np.float32)


def loss_of(rank):
    """Return curvatures ``a`` and minima ``c`` of the loss ``Σ a/2·(w − c)²`` of a rank."""
    random = np.random.default_rng((7, rank))
    return random.uniform(0.2, 2.0, SIZE), random.standard_normal(SIZE)


@dataclass
class Seen:
    """What a rank sees: common weights after each round, its differences, what is held back or forgotten."""

    common: list = field(default_factory=list)
    differences: list = field(default_factory=list)
    finite: list = field(default_factory=list)
    forgotten: float = 0.0
    residual: object = None


class Vector:
    """The weights of a replica."""

    def __init__(self, values):
        self.values = np.array(values)

    def read(self, fragment=slice(None)):
        return self.values[fragment].copy()

    def write(self, vector, fragment=slice(None)):
        self.values[fragment] = vector


def trained(comm, reducer, options, steps, *, outer=None, spoilt=None):
    """Make rounds of local steps of gradient descent; ``spoilt``: rank and round of one that fails."""
    curvatures, minima = (each.astype(np.float32) for each in loss_of(comm.rank))
    reducer = make_reducer(reducer, Topology(comm), SIZE, **options)
    seen = Seen()

    def submit(fragment, difference):
        seen.differences.append(difference)

    def wait(fragment):
        mean = reducer.reduce(seen.differences[-1]).copy()
        seen.forgotten += reducer.last.forgotten.sum
        return mean, reducer.last

    outer = outer or Outer()
    rounds = Rounds(OuterSgd(outer.rate, outer.momentum, nesterov=outer.nesterov), submit, wait)
    weights = Vector(START)
    for number in range(ROUNDS):
        rounds.begin(weights.read())
        for _ in range(steps):
            weights.values -= np.float32(RATE) * curvatures * (weights.values - minima)
        rounds.failed = spoilt == (comm.rank, number)
        report = rounds.end_step(weights, ALL, arrives=True)
        seen.common.append(weights.read())
        seen.finite.append(report.finite)
    seen.residual = np.array(reducer.residual)
    return seen


def on_ranks(ranks, reducer="dense", options=None, steps=4, **others):
    """Return what each of so many ranks sees, on nodes of two."""
    layout = [2] * (ranks // 2) + [1] * (ranks % 2)
    return simulated.run(lambda comm: trained(comm, reducer, options or {}, steps, **others), ranks, layout)


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


# ----------------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("steps", [1, 4, 30])
@pytest.mark.parametrize(
    "outer",
    [
        Outer(),
        Outer(rate=0.7, momentum=0.9, nesterov=True),  # DiLoCo
        Outer(rate=0.5, momentum=0.8),
    ],
    ids=["mean", "nesterov", "momentum"],
)
def test_rounds_end_where_the_closed_form_says(outer, steps):
    seen = on_ranks(3, steps=steps, outer=outer)[0]
    # float32 rounding of some 150 steps, which momentum adds up
    np.testing.assert_allclose(seen.common, closed_form(3, steps, outer), rtol=2e-5, atol=2e-5)


# -------------------------------------------------------------------------------------- every reducer

OPTIONS = {name: {} if name in ("dense", "torus2d") else {"density": 0.1} for name in REDUCERS}
OPTIONS["arctopk"]["row"] = 16
DECAYED = {name: {**options, "decay": 0.95} for name, options in OPTIONS.items() if options}
BUCKETS = {"name": "bucketed", "bucket": 16}
OTHERS = {
    "sparseloco": ("hitopk", {"density": 1 / 4, "selector": BUCKETS, "wire": "gap+lloyd2", "decay": 0.95}),
    "dense, four bits": ("dense", {"values": "hadamard4"}),
    "torus2d, four bits": ("torus2d", {"values": "qsgd4"}),
    "oktopk, half precision": ("oktopk", {"density": 0.1, "wire": "gap+fp16"}),
}
CASES = (
    {name: (name, options) for name, options in OPTIONS.items()}
    | {f"{name}, decay": (name, options) for name, options in DECAYED.items()}
    | OTHERS
)


@pytest.mark.parametrize("world_size", [1, 4, *more(2, 3, 5)])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_common_weights_agree_to_the_bit_and_no_difference_is_lost(case, steps, world_size):
    seen = on_ranks(world_size, *CASES[case], steps)
    for number in range(ROUNDS):
        assert len({rank.common[number].tobytes() for rank in seen}) == 1
    moved = START.astype(np.float64) - seen[0].common[-1]
    given = np.sum([rank.differences for rank in seen], axis=(0, 1), dtype=np.float64)
    held_back = np.sum([rank.residual for rank in seen], axis=0, dtype=np.float64)
    # float32 rounding of sums of a few rounds' differences, each below 10
    tolerance = 1e-4
    if "decay" in CASES[case][1]:  # of what is forgotten the sum is known
        forgotten = sum(rank.forgotten for rank in seen)
        total = world_size * moved.sum() + held_back.sum() + forgotten
        assert total == pytest.approx(given.sum(), abs=SIZE * tolerance)
        assert (forgotten != 0) == (world_size > 1)
    else:
        np.testing.assert_allclose(world_size * moved + held_back, given, atol=tolerance)


# --------------------------------------------------------------------------------- rounds that fail


@pytest.mark.parametrize("name", [*OPTIONS, "sparseloco"])
def test_the_round_of_a_rank_that_failed_is_skipped_on_all_ranks(name):
    reducer, options = CASES[name]
    outer = Outer(rate=0.7, momentum=0.9, nesterov=True)
    seen = on_ranks(4, reducer, options, outer=outer, spoilt=(2, 1))
    assert [rank.finite for rank in seen] == [[True, False, True, True, True]] * 4
    for rank in seen:
        assert rank.common[1].tobytes() == rank.common[0].tobytes() == seen[0].common[0].tobytes()
        assert rank.common[2].tobytes() == seen[0].common[2].tobytes() != rank.common[1].tobytes()
        # the same local steps from the same weights: nothing of the skipped round is left anywhere
        if rank is not seen[2]:
            assert rank.differences[2].tobytes() == rank.differences[1].tobytes()
