"""Gradient descent on sparse rows: as with dense vectors in float64, with every reducer, on any ranks."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.memory import Meter, MeteredCommunicator, traced
from commlib import REDUCERS, SparseVector, Topology
from commlib.reducers import SelectingReducer
from commlib.transport import simulated
from tests.extent import dealt, more
from tests.linear.made import FEATURES, VALUES, matrix_of, rows_of, settings_of, trained, value_of
from training.linear.config import LearningRate
from training.linear.kernels import LOSSES, value_and_slope
from training.linear.rows import Rows
from training.linear.solver import Diverged, Model
from training.linear.solvers import SGD, Gradients, Rates

SENDING_ALL = [name for name, kind in REDUCERS.items() if issubclass(kind, SelectingReducer)]
LAYOUTS = [[1], [2, 2], [3, 2], *more([1, 1], [3], [1] * 4, [4, 3], [4, 4])]
PENALTIES = [
    *({"l2": 0.02}, {"l2": 0.0, "l1": 0.01}, {"l2": 0.02, "l1": 0.01}, {"l2": 0.0, "intercept": False}),
    # each step leaves a thousandth of the weights: no float32 has all these factors
    {"l2": 1.998, "l1": 0.01},
]
PASSES = 3
# weights are float32, of a magnitude up to 4, and about 20 steps round each of them
ROUNDED = {"rtol": 1e-5, "atol": 3e-6}


def counts(layout):
    """Ranks have unequal numbers of rows."""
    return [40 - 3 * rank for rank in range(sum(layout))]


def run(layout, settings, passes=PASSES):
    """Return of each rank its weights, intercept, the objective and the losses of passes."""

    def body(comm):
        sgd = SGD(Topology(comm), rows_of(comm.rank, counts(layout)[comm.rank]), settings)
        losses = [sgd.run_pass().loss for _ in range(passes)]
        found = sgd.value(), sgd.model.penalty()
        return sgd.model.weights.copy(), sgd.model.intercept, found[0], losses

    return simulated.run(body, sum(layout), layout)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_their_slopes(loss):
    for label in (-1.0, 1.0):
        for margin in np.linspace(-40, 40, 81) + 0.13:
            expected = VALUES[loss](label * margin)
            found, slope = value_and_slope(LOSSES[loss], margin, label)
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-300)
            near = (VALUES[loss](label * (margin + 1e-6)) - VALUES[loss](label * (margin - 1e-6))) / 2e-6
            assert slope == pytest.approx(near, rel=1e-6, abs=1e-7)


@pytest.mark.pairs(lambda layout, loss, penalty: layout != [1] or dealt(penalty, PENALTIES, loss, LOSSES))
@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", [[1], [3, 2]], ids=str)
def test_steps_are_those_of_dense_vectors_in_float64(layout, loss, penalty):
    settings = settings_of(loss=loss, reducer="ssar_split", **penalty)
    parts = [matrix_of(rank, rows) for rank, rows in enumerate(counts(layout))]
    expected, intercept = trained(settings, parts, PASSES)
    for weights, own, found, _ in run(layout, settings):
        np.testing.assert_allclose(weights, expected, **ROUNDED)
        assert own == pytest.approx(intercept, rel=1e-5, abs=1e-6)
        rows = sum(len(labels) for _, labels in parts)
        losses = [value_of(settings_of(loss=loss, l2=0), *part, expected, intercept) for part in parts]
        mean = sum(len(labels) * each for (_, labels), each in zip(parts, losses, strict=True)) / rows
        penalties = value_of(settings, np.zeros((1, FEATURES)), np.ones(1), expected, 1e9)
        assert found == pytest.approx(mean + penalties, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["torus2d", *SENDING_ALL])
def test_every_reducer_gives_the_model_of_the_dense_one(name, layout):
    given = {"loss": "logistic", "l2": 0.01, "l1": 0.002}
    (weights, intercept, objective, losses), *_ = run(layout, settings_of(**given))
    for each in run(layout, settings_of(**given, reducer=name)):
        np.testing.assert_allclose(each[0], weights, **ROUNDED)
        np.testing.assert_allclose([each[1], each[2], *each[3]], [intercept, objective, *losses], rtol=1e-5)


def test_a_gradient_has_entries_in_the_columns_of_rows_with_a_slope():
    gradients, dense = Gradients(rows_of(0), intercept=True), matrix_of(0)[0].toarray()
    for seed in range(3):  # what one batch leaves behind is not in the next
        rng = np.random.default_rng(seed)
        numbers, slopes = rng.permutation(len(dense))[:9], rng.standard_normal(9)
        slopes[::3] = 0
        found = gradients.of(numbers, slopes, 0.25)
        given = dense[numbers[slopes != 0]]
        assert found.indices.tolist() == [*np.flatnonzero(given.any(axis=0)), FEATURES]
        expected = 0.25 * np.append(slopes @ dense[numbers], slopes.sum())
        np.testing.assert_allclose(found.values, expected[found.indices], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_a_step_with_entries_is_that_with_a_dense_vector_of_them(penalty):
    settings = settings_of(**penalty)
    gradients = Gradients(rows_of(0), intercept=settings.intercept)
    models = [Model(settings, FEATURES) for _ in range(2)]
    rng = np.random.default_rng(1)
    for _ in range(6):
        gradient = gradients.of(rng.permutation(40)[:3], rng.standard_normal(3), 1.0)
        assert 0 < gradient.nnz < gradient.size
        models[0].step(gradient, 0.5)
        models[1].step(SparseVector.trusted(gradient.size, None, gradient.to_dense()), 0.5)
    np.testing.assert_allclose(models[0].weights, models[1].weights, rtol=1e-6, atol=1e-9)
    assert models[0].intercept == models[1].intercept
    assert np.abs(models[0].weights).max() > 0.1


def test_rates_fall_with_a_power_of_the_epochs():
    settings = settings_of(learning_rate={"rate": 0.5, "schedule": "power"})
    parts = [matrix_of(rank, rows) for rank, rows in enumerate(counts([2]))]
    np.testing.assert_allclose(run([2], settings)[0][0], trained(settings, parts, PASSES)[0], **ROUNDED)


def test_each_pass_whose_loss_rises_halves_adaptive_rates():
    settings = settings_of(learning_rate={"rate": 300.0, "schedule": "adaptive"}, loss="hinge", l2=0.0)

    def body(comm):
        sgd = SGD(Topology(comm), rows_of(comm.rank), settings)
        return [sgd.run_pass() for _ in range(12)]

    passes = simulated.run(body, 2)[0]
    rises = [later.loss >= earlier.loss for earlier, later in pairwise(passes)]
    expected = [300 / 2 ** sum(rises[:at]) for at in range(12 - 1)]
    assert [each.rate for each in passes] == [300, *expected]
    assert expected[-1] < 300


def test_adaptive_rates_follow_the_pass_before_not_the_best_one():
    rates, seen = Rates(LearningRate(rate=8.0, factor=0.5)), []
    for loss in (3.0, 5.0, 4.0, 4.0, 3.5):
        rates.adapt(loss)
        seen.append(rates.of_pass(1, 1)[0])
    assert seen == [8, 4, 4, 2, 2]


@pytest.mark.parametrize("reducer", ["dense", "oktopk"])
def test_a_gradient_that_is_not_finite_ends_training_on_all_ranks(reducer):
    def body(comm):
        matrix, labels = matrix_of(comm.rank)
        if comm.rank == 1:
            matrix.data[:], labels[:] = np.finfo(np.float32).max, 1  # 8 rows add up to twice of that
        settings = settings_of(reducer=reducer, loss="squared_hinge", intercept=False)
        sgd = SGD(Topology(comm), Rows.of_matrix(matrix, labels), settings)
        with pytest.raises(Diverged, match="^learning_rate: .* not finite in ") as error:
            for _ in range(3):
                sgd.run_pass()
        return str(error.value)

    assert len(set(simulated.run(body, 3))) == 1


@pytest.mark.parametrize(
    ("rows_on", "message"),
    [
        (lambda rank: rows_of(rank, rows=5 * (rank != 1)), "^rows: .* on each rank, got none on rank 1$"),
        (lambda rank: replace(rows_of(rank), features=10**17), "^features: expected memory for .*, got 100"),
        (lambda rank: rows_of(rank, features=300 + rank), "^rows: .* features on each rank, got 300, 301"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused_on_all_ranks(rows_on, message):
    def body(comm):
        with pytest.raises(ValueError, match=message):
            SGD(Topology(comm), rows_on(comm.rank), settings_of())

    simulated.run(body, 3)


LARGE = 5_000_000
STAY_SPARSE = ["allgather", "ssar_doubling", "ssar_split", "oktopk", "hitopk", "hioktopk"]


@pytest.mark.parametrize("penalty", [{"l2": 1e-3}, {"l1": 1e-3}], ids=str)
@pytest.mark.parametrize("name", [*STAY_SPARSE, "dense"])
def test_no_vector_of_the_models_length_is_made_on_the_way_of_a_step(name, penalty):
    def body(comm):
        meter = Meter()
        topology = Topology(MeteredCommunicator(comm, meter), ranks_per_node=2)
        matrix, labels = matrix_of(comm.rank)
        spread = Rows.of_matrix(matrix, labels, LARGE)
        columns = spread.matrix.columns * (LARGE // FEATURES)
        rows = replace(spread, matrix=spread.matrix._replace(columns=columns))
        sgd = SGD(topology, rows, settings_of(reducer=name, **penalty))
        meter.restart()
        sgd.run_pass()
        with meter.pause():
            return meter.peak

    with traced():
        simulated.run(body, 4)  # loads the kernels, which takes memory, too
        most = max(simulated.run(body, 4))
    # gradients of at most 300 entries, against 20 MB of a dense one
    assert (most < LARGE / 20) == (name != "dense")
    assert most < LARGE / 20 or most > 4 * LARGE
