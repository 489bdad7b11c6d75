"""Coordinate descent: to the optimum that scikit-learn finds, with every reducer, on any ranks."""

import math

import numpy as np
import pytest
from scipy import sparse
from sklearn.linear_model import LogisticRegression

from commlib import Topology
from commlib.transport import simulated
from tests.extent import more
from tests.linear.made import FEATURES, all_rows, rows_of, settings_of, value_of
from training.linear import LinearClassifier
from training.linear.rows import Rows
from training.linear.solvers import CoordinateDescent

GIVEN = {"solver": "coordinate", "coordinates": 7, "l2": 0.01}


def run(ranks, passes, reducer="allgather", **given):
    """Return of each rank its weights, intercept, and the objective before and after each pass."""

    def body(comm):
        solver = CoordinateDescent(
            Topology(comm, ranks_per_node=2),
            rows_of(comm.rank, 40 - comm.rank),
            settings_of(reducer=reducer, **GIVEN, **given),
        )
        values = [solver.value()]
        for _ in range(passes):
            solver.run_pass()
            values.append(solver.value())
        return solver.model.weights.copy(), solver.model.intercept, values

    return simulated.run(body, ranks)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("given", [{}, {"loss": "squared_hinge", "l1": 0.005}, {"l1": 0.01}], ids=str)
def test_every_pass_comes_nearer_to_the_optimum(size, given):
    seen = run(size, 60, **given)
    matrix, labels = all_rows(size, fewer=1)
    settings = settings_of(**GIVEN, **given)
    weights, intercept, values = seen[0]
    assert values[-1] == pytest.approx(value_of(settings, matrix, labels, weights, intercept), rel=1e-5)
    assert all(after <= before + 1e-7 for before, after in zip(values, values[1:], strict=False))
    assert values[-2] - values[-1] < 2e-4
    for _ in range(20):  # it is a minimum: no single weight can be moved to where the objective is less
        moved = weights.copy()
        moved[np.random.default_rng(_).integers(FEATURES)] += 0.05 * (-1) ** _
        assert value_of(settings, matrix, labels, moved, intercept) > values[-1] - 5e-4
    if not given:
        exact = LogisticRegression(C=1 / (0.01 * len(labels)), tol=1e-8, max_iter=1000).fit(matrix, labels)
        least = value_of(settings, matrix, labels, exact.coef_[0], exact.intercept_[0])
        assert least - 1e-6 <= values[-1] < least + 5e-3
    assert all(each[0].tobytes() == weights.tobytes() for each in seen)


def test_rows_without_entries_change_nothing():
    def body(comm):
        rows = Rows.of_matrix(sparse.csr_array((3, 5), dtype=np.float32), [1, -1, 1])
        solver = CoordinateDescent(
            Topology(comm), rows, settings_of(reducer="auto", intercept=False, **GIVEN)
        )
        return solver.run_pass().loss, solver.model.weights.tolist()

    assert simulated.run(body, 2) == [(pytest.approx(math.log(2)), [0] * 5)] * 2


def test_columns_that_are_alike_do_not_overshoot_together():
    labels = np.where(np.arange(10) < 7, 1, -1)
    given = {"coordinates": 20, "l2": 1e-3, "intercept": False, "epochs": 30, "reducer": "dense"}
    own = LinearClassifier("squared_hinge", solver="coordinate", **given).fit(np.ones((10, 20)), labels)
    assert all(after <= before + 1e-6 for before, after in zip(own.losses_, own.losses_[1:], strict=False))
    # of a margin m of all rows the loss is 0.7·(1 − m)² + 0.3·(1 + m)²: 0.84 at its minimum, m = 0.4
    assert own.losses_[0] == 1
    assert own.losses_[-1] == pytest.approx(0.84, abs=1e-4)


def test_the_intercept_is_not_regularized_near_the_optimum():
    matrix = np.random.default_rng(3).standard_normal((40, 3))
    labels = np.where(np.arange(40) < 34, 1, -1)
    own = LinearClassifier(solver="coordinate", l2=1.0, l1=0.1, epochs=200, reducer="dense").fit(
        matrix, labels
    )
    slopes = -labels / (1 + np.exp(labels * own.decision_function(matrix)))
    assert slopes.mean() == pytest.approx(0, abs=1e-4)
    assert own.intercept_[0] > 1


@pytest.mark.parametrize(
    "name", ["dense", "ssar_split", "hitopk", "auto", *more("ssar_doubling", "oktopk", "torus2d")]
)
def test_every_reducer_gives_the_same_model(name):
    (weights, intercept, values), *_ = run(4, 3)
    found, own, others = run(4, 3, reducer=name)[2]
    np.testing.assert_allclose(found, weights, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([own, *others], [intercept, *values], rtol=1e-5)


def test_a_step_sends_the_derivatives_of_a_block():
    def body(comm):
        solver = CoordinateDescent(
            Topology(comm), rows_of(comm.rank), settings_of(reducer="allgather", **GIVEN)
        )
        done = solver.run_pass()
        return done.steps, done.entries, done.sent.intra, len(set(rows_of(comm.rank).matrix.columns.tolist()))

    all_columns = {each for rank in range(3) for each in rows_of(rank).matrix.columns.tolist()}
    for steps, (given, applied), sent, own in simulated.run(body, 3):
        assert steps == math.ceil(math.ceil((len(all_columns) + 1) / 3) / 7)  # one more for the intercept
        assert (given, applied) == (own + 1, len(all_columns) + 1)
        assert sent < 2 * 8 * 3 * (own + 20)
