"""LARS, LAMB, Muon and the loss scale as Keras sees them, on one process and on simulated ranks."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.transport import simulated
from pto.errors import InvalidArgument
from pto.keras import ADAM, ADAMW, LAMB, LARS, MUON, GivenSquares, LossScale
from pto.norms import Norms
from pto.rules import LossScaling
from tests.extent import more
from tests.pto import reference
from tests.pto.variables import SIZES, applied, same, variables_of

ADAM_OPTIONS = {"beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-6, "weight_decay": 0.1}
CASES = {
    "adam": (
        lambda **options: ADAM(0.01, **ADAM_OPTIONS, **options),
        lambda excluded: reference.Adam(**ADAM_OPTIONS, excluded=excluded),
    ),
    "adamw-frozen": (
        lambda **options: ADAMW(0.01, **ADAM_OPTIONS, freeze_variance=30, **options),
        lambda excluded: reference.Adam(**ADAM_OPTIONS, freeze_variance=30, is_apart=True, excluded=excluded),
    ),
    "lars": (
        lambda **options: LARS(0.5, weight_decay=0.01, epsilon=1e-3, **options),
        lambda excluded: reference.Lars(weight_decay=0.01, epsilon=1e-3, excluded=excluded),
    ),
    "lamb-clipped": (
        lambda **options: LAMB(0.01, 0.8, 0.95, 1e-3, 0.1, 1.5, 3.0, **options),
        lambda excluded: reference.Lamb(
            0.8, 0.95, 1e-3, 0.1, least_norm=1.5, largest_norm=3.0, excluded=excluded
        ),
    ),
}
OPTIMIZERS = pytest.mark.parametrize("make", [make for make, _ in CASES.values()], ids=CASES)


def train(optimizer, weights, gradients, traced=False):
    """The weights after all steps of ``optimizer.apply``, as NumPy arrays."""
    variables = variables_of(weights)
    optimizer.build(variables)
    return applied(optimizer, variables, gradients, traced)


def one(weight, gradient, optimizer, name="kernel"):
    """The variable ``weight`` after one step with ``gradient``."""
    variable = keras.Variable(np.asarray(weight, np.float32), name=name)
    optimizer.build([variable])
    optimizer.apply([tf.constant(gradient, tf.float32)])
    return variable.numpy()


# ------------------------------------------------------------------------------------------ the algorithms


@pytest.mark.parametrize("with_norms", [False, True], ids=["in-graph", "norms"])
@pytest.mark.parametrize("make, expect", CASES.values(), ids=CASES)
def test_an_optimizer_is_the_reference_over_100_steps(make, expect, with_norms):
    weights, gradients = reference.weights_and_gradients(100)
    norms = Norms(SIZES, None) if with_norms else None
    optimizer = make(norms=norms, exclude=reference.EXCLUDED)
    rate = float(optimizer.learning_rate.numpy())
    expected = reference.trained(expect, weights, gradients, [rate] * 100)
    for weight, of_reference in zip(train(optimizer, weights, gradients, traced=True), expected, strict=True):
        assert weight.dtype == np.float32
        # A hundred float32 updates, each rounded to 2⁻²⁴ of weight and velocity.
        scale = np.abs(of_reference).max()
        np.testing.assert_allclose(weight, of_reference, rtol=0, atol=1e-5 * scale)


MATRICES = {  # paths, shapes, rows and columns of those that are matrices
    "tall/kernel": ((17, 5), (17, 5)),
    "wide/kernel": ((3, 40), (3, 40)),
    "conv/kernel": ((3, 3, 4, 6), (36, 6)),
    "depthwise/kernel": ((3, 3, 4, 1), None),  # of one column
    "norm/bias": ((7,), None),
    "scale": ((), None),
    "tokens/embeddings": ((11, 4), None),
    "logits/kernel": ((6, 5), None),
}


def named_variables(weights):
    """Variables with the paths of MATRICES."""
    variables = []
    for path, weight in zip(MATRICES, weights, strict=True):
        scope, _, name = path.rpartition("/")
        with keras.name_scope(scope or "of"):
            variables.append(keras.Variable(weight, dtype="float32", name=name))
    return variables


def of_muon(steps):
    return reference.weights_and_gradients(steps, shapes=[shape for shape, _ in MATRICES.values()])


@pytest.mark.parametrize(
    "options",
    [{"weight_decay": 0.1}, {"scale": "spectral", "nesterov": False, "momentum": 0.8, "beta_2": 0.95}],
    ids=["rms", "spectral"],
)
def test_muon_is_the_reference_over_20_steps(options):
    weights, gradients = of_muon(20)
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([9], [0.02, 0.005])
    optimizer, variables = MUON(schedule, exclude="bias|wide", **options), named_variables(weights)
    optimizer.build(variables)
    apply = tf.function(lambda step: optimizer.apply(step, variables))
    rules = [
        reference.Muon(**options, by_adamw=matrix is None, excluded=path in ("norm/bias", "wide/kernel"))
        for path, (_, matrix) in MATRICES.items()
    ]
    expected = [weight.astype(float) for weight in weights]
    for number, step in enumerate(gradients):
        apply([tf.constant(gradient) for gradient in step])
        rate = 0.02 if number < 10 else 0.005
        expected = [
            rule.moved(weight, gradient.astype(float), rate)
            for rule, weight, gradient in zip(rules, expected, step, strict=True)
        ]
    for variable, of_reference, start in zip(variables, expected, weights, strict=True):
        moved = np.abs(of_reference - start).max()
        assert moved > 0.01
        # Five steps multiply what float32 rounds off of a small singular value by up to 3.4445⁵ = 485.
        np.testing.assert_allclose(variable.numpy(), of_reference, rtol=0, atol=1e-4 * moved)


@pytest.mark.parametrize("how", ["parts", "local", *more("auto")])
def test_matrices_orthogonalised_in_parts_have_the_same_bits_on_all_ranks(how):
    weights, gradients = of_muon(3)
    entries = sum(rows * columns for _, matrix in MATRICES.values() if matrix for rows, columns in [matrix])

    def body(comm, how=how):
        optimizer, variables = MUON(0.02, comm=comm, newton_schulz=how), named_variables(weights)
        optimizer.build(variables)
        before = comm.sent_bytes.sum()
        weights_after = applied(optimizer, variables, gradients, traced=True)
        return weights_after, int(comm.sent_bytes.sum() - before), optimizer.shared.choice.in_parts

    results = simulated.run(body, 3)
    alone, variables = MUON(0.02), named_variables(weights)
    alone.build(variables)
    applied(alone, variables, gradients)
    local = simulated.run(lambda comm: body(comm, "local"), 3)[0][0]
    for of_rank, _, in_parts in results:
        assert same(of_rank, local)
        assert in_parts == (how == "parts")  # the clock of simulated ranks does not count computing
        for weight, variable in zip(of_rank, variables, strict=True):
            np.testing.assert_allclose(weight, variable.numpy(), rtol=0, atol=1e-5)
    # Round a ring, every matrix is sent by two ranks, in each of three steps.
    assert sum(sent for _, sent, _ in results) == (3 * 2 * 4 * entries if how == "parts" else 0)


def test_muon_refuses_what_it_cannot_do():
    with pytest.raises(
        InvalidArgument,
        match=re.escape(
            "adamw: expected a matrix whose path does not match it, for Muon to orthogonalise; got"
        ),
    ):
        MUON().build([keras.Variable([1.0], name="bias"), keras.Variable(np.ones((3, 2)), name="embeddings")])
    with pytest.raises(InvalidArgument, match="how: expected one of auto, parts, local, got"):
        simulated.run(
            lambda comm: MUON(comm=comm, newton_schulz="all").build(named_variables(of_muon(0)[0])), 2
        )


@pytest.mark.parametrize("norms", [None, Norms([2], None)], ids=["in-graph", "norms"])
@pytest.mark.parametrize("make", [LARS, LAMB])
def test_a_nan_is_never_hidden(make, norms):
    assert np.isnan(one([3, 4], [1, np.nan], make(0.5, norms=norms))).all()
    assert np.isnan(one([[3, 4], [5, 6]], [[1, np.nan], [0, 0]], MUON(0.5))).all()


@OPTIMIZERS
def test_gradients_may_come_with_variables_in_another_order_and_as_indexed_slices(make):
    weights, gradients = reference.weights_and_gradients(1)
    expected = train(make(norms=Norms(SIZES, None)), weights, gradients)
    variables, optimizer = variables_of(weights), make(norms=Norms(SIZES, None))
    optimizer.build(variables)
    given = [tf.constant(gradient) for gradient in gradients[0]]
    rows = tf.constant([2, 0, 1, 2])  # row 2 in two halves
    values = tf.gather(given[3], rows) * tf.constant([0.5, 1, 1, 0.5])[:, None]
    given[3] = tf.IndexedSlices(values, rows, tf.constant([3, 4]))
    optimizer.apply(given[::-1], variables[::-1])
    assert same([variable.numpy() for variable in variables], expected)


# ------------------------------------------------------------------------------------------ which variables


@pytest.mark.parametrize(
    "exclude, said", [("kernel|bias", "matches all of the 2 variables"), ("gamma", "matches none of the 2")]
)
def test_an_exclusion_of_everything_or_nothing_is_warned_of(exclude, said):
    with pytest.warns(UserWarning, match=said):
        LAMB(exclude=exclude).build([keras.Variable([1.0], name=name) for name in ("kernel", "bias")])


@pytest.mark.parametrize("options", [{}, {"exclude": None}, {"exclude": "two"}])
def test_other_exclusions_are_not(options):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        LAMB(**options).build([keras.Variable([1.0], name=name) for name in ("one", "two")])
    assert said == []


def test_what_cannot_work_is_refused():
    with pytest.raises(
        InvalidArgument, match=re.escape("exclude: expected a regular expression, got '(bias'")
    ):
        LARS(exclude="(bias")
    with pytest.raises(InvalidArgument, match="momentum: expected 0 or more, below 1, got 2"):
        LARS(momentum=2)
    with pytest.raises(InvalidArgument, match="expected the argument exclude"):
        LARS().exclude_from_weight_decay(var_names=["bias"])
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        optimizer = LARS()
        with pytest.raises(
            InvalidArgument, match=r"lars: expected one process a rank, got .* OneDeviceStrategy"
        ):
            optimizer.build([keras.Variable([1.0], name="kernel")])


# ------------------------------------------------------------------------------------------ as Keras uses it


@OPTIMIZERS
def test_a_configuration_makes_the_same_optimizer(make):
    optimizer = make(exclude="gamma", clipnorm=1.5)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is type(optimizer)
    assert (again.rule, again.exclude) == (optimizer.rule, "gamma")
    assert again.get_config() == optimizer.get_config()
    assert type(optimizer).from_config(optimizer.get_config()).rule == optimizer.rule


def digits(make, seed=0):
    """A small model on clusters of points, which it can tell apart, and the points."""
    keras.utils.set_random_seed(seed)
    random = np.random.default_rng(seed)
    labels = random.integers(0, 4, 256)
    points = np.float32(random.standard_normal((4, 8))[labels] + 0.3 * random.standard_normal((256, 8)))
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=make(), loss=loss, metrics=["accuracy"])
    return model, points, labels


FITTING = {
    "muon": lambda **options: MUON(0.01, weight_decay=1e-2, adamw="dense_1", **options),
    "lars": lambda **options: LARS(0.1, trust=0.1, weight_decay=1e-4, **options),
    "lamb": lambda **options: LAMB(0.02, weight_decay=1e-4, **options),
}


@pytest.mark.parametrize("make", FITTING.values(), ids=FITTING)
def test_fit_trains_a_model_and_a_saved_one_goes_on_bitwise(make, tmp_path):
    model, points, labels = digits(make)
    before = model.evaluate(points, labels, verbose=0)[0]
    model.fit(points, labels, batch_size=64, epochs=15, shuffle=False, verbose=0)
    loss, accuracy = model.evaluate(points, labels, verbose=0)
    assert loss < before / 4
    assert accuracy > 0.95
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.optimizer.rule == model.optimizer.rule
    assert int(again.optimizer.iterations) == 60
    for each in (model, again):
        each.fit(points, labels, batch_size=64, epochs=1, shuffle=False, verbose=0)
    assert same(model.get_weights(), again.get_weights())


def test_squares_are_given_before_a_step_or_nothing_is_right():
    given = GivenSquares(1)
    assert np.isnan(one([6, 8], [3, 4], LARS(1.0, trust=0.1, norms=given))).all()
    given.give(np.array([[100.0], [25.0]]))
    np.testing.assert_allclose(one([6, 8], [3, 4], LARS(1.0, trust=0.1, norms=given)), [5.4, 7.2], rtol=1e-6)
    with pytest.raises(InvalidArgument, match="norms: expected Norms or None, .* got GivenSquares"):
        LAMB(norms=given)


def test_clipping_comes_before_the_norms_and_decay_inside_them():
    lars = LARS(0.5, weight_decay=0.1, trust=1.0, epsilon=1.0, clipnorm=1.0)
    moved = one([6, 8], [30, 40], lars)
    ratio = 10 / (1 + 0.1 * 10 + 1)
    np.testing.assert_allclose(moved, [6 - 0.5 * ratio * 1.2, 8 - 0.5 * ratio * 1.6], rtol=1e-6)
    everywhere = one([6, 8], [30, 40], LARS(0.5, 0.9, False, 0.1, 1.0, 1.0, global_clipnorm=1.0))
    np.testing.assert_allclose(everywhere, moved, rtol=1e-6)


# ------------------------------------------------------------------------------------------ beside Keras' own


def test_without_decay_lamb_is_keras_lamb():
    weights, gradients = reference.weights_and_gradients(100)
    ours = train(LAMB(0.01, epsilon=1e-7, exclude=None), weights, gradients, traced=True)
    theirs = train(keras.optimizers.Lamb(0.01, epsilon=1e-7), weights, gradients, traced=True)
    for left, right in zip(ours, theirs, strict=True):
        # Keras computes 1 − βᵗ in float32, which is off by up to 3e-5 in the first steps.
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-4 * np.abs(right).max())


# ------------------------------------------------------------------------------------------ on many ranks


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("size", [3, *more(2, 5)])
@OPTIMIZERS
def test_norms_by_slices_give_equal_weights_on_all_ranks(make, size, traced):
    weights, gradients = reference.weights_and_gradients(3)
    alone = train(make(norms=Norms(SIZES, None)), weights, gradients)

    def body(comm):
        return train(make(norms=Norms(SIZES, comm, partition="slices")), weights, gradients, traced)

    results = simulated.run(body, size)
    for of_rank in results:
        assert same(of_rank, results[0])
        for left, right in zip(of_rank, alone, strict=True):
            # The float64 sums differ in their last bits, so float32 ratios by a rounding at most.
            np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [LARS, LAMB])
def test_norms_want_gradients_of_all_variables(make):
    variables = variables_of(reference.weights_and_gradients(0)[0])
    optimizer = make(norms=Norms(SIZES, None))
    optimizer.build(variables)
    gradients = [tf.ones(variable.shape) for variable in variables]
    with (
        pytest.warns(UserWarning, match="Gradients do not exist"),
        pytest.raises(InvalidArgument, match="norms: expected gradients of all 6 variables, got 5"),
    ):
        optimizer.apply([None, *gradients[1:]], variables)


# ------------------------------------------------------------------------------------------ mixed precision


def test_a_loss_scale_follows_the_flag_in_traced_steps():
    loss_scale = LossScale(LossScaling(initial=8.0, growth_steps=2))
    update = tf.function(loss_scale.update)
    seen = []
    for finite in [True, True, True, False, True, False]:
        update(tf.constant(finite))
        seen.append(tuple(int(variable.numpy()) for variable in loss_scale.variables))
    assert seen == [(8, 1), (16, 0), (16, 1), (8, 0), (8, 1), (4, 0)]


def test_a_loss_scale_is_taken_out_of_the_gradients_in_float32():
    loss_scale = LossScale(LossScaling(initial=2.0**20))
    assert float(loss_scale.scaled(tf.constant(3.0, tf.float16))) == 3 * 2.0**20
    tiny = tf.constant([2.0**-10], tf.float16)
    slices = tf.IndexedSlices(tiny, tf.constant([1]), tf.constant([4]))
    dense, nothing, sparse = loss_scale.unscaled([tiny, None, slices])
    assert (dense.dtype, nothing) == (tf.float32, None)
    assert dense.numpy() == sparse.values.numpy() == 2.0**-30
    assert sparse.indices.numpy() == 1
    assert [float(variable.numpy()) for variable in LossScale().variables] == [2.0**15, 0]
