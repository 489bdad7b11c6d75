"""One step: its gradient, what becomes of its mean, and what a step that does not count leaves behind."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Topology
from commlib.tensorflow import DistributedGradients
from commlib.transport.mpi import world
from datacache import Batch
from pto.keras import LossScale
from tests.training.replicas import Replica
from tests.training.small import phase, trainer
from training.models import MODELS
from training.results import StepHyperparameters
from training.run.backward import Backward
from training.run.model import Average
from training.tasks.image_classification import ImageClassification, ImagePhase, hits


@pytest.fixture
def random():
    return np.random.default_rng(5)


def batch_of(random, samples=8, size=4):
    images = random.integers(0, 256, (samples, size, size, 1), np.uint8)
    labels = random.integers(0, 10, samples)
    return Batch((images, labels), np.arange(samples), np.ones(samples, bool))


def backward_of(model, images, *, smoothing=0.0, scale=None):
    """Return the gradient computation of image classification for images of this spec."""
    samples, side = images.shape[:2]
    phase = ImagePhase(steps=1, input_size=side, batch_size=samples, label_smoothing=smoothing)
    specs = images, tf.TensorSpec((samples,), tf.int64)
    gradients = DistributedGradients(Topology(world()), model.trainable_variables, {"name": "dense"})
    losses = ImageClassification().losses
    return Backward(model, lambda arrays: losses(model, arrays, phase), specs, gradients, scale=scale)


def flat_linear(classes=3):
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    images = keras.Input((2, 2, 1))
    return keras.Model(images, keras.layers.Dense(classes)(keras.layers.Flatten()(images)))


def reference(model, images, labels, smoothing):
    """Return loss and gradient of softmax regression in float64."""
    kernel, bias = (variable.numpy().astype(np.float64) for variable in model.trainable_variables)
    x = images.reshape(len(images), -1).astype(np.float64)
    logits = x @ kernel + bias
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    classes = kernel.shape[1]
    aims = (1 - smoothing) * np.eye(classes)[labels] + smoothing / classes
    loss = -(aims * np.log(shares)).sum(axis=1).mean()
    error = (shares - aims) / len(x)
    return loss, np.concatenate([(x.T @ error).ravel(), error.sum(axis=0)])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("scale", [None, 2.0**15, 3.0])
def test_loss_and_gradient_are_those_of_the_formula(random, smoothing, scale):
    model = flat_linear()
    images = random.standard_normal((6, 2, 2, 1)).astype(np.float32)
    labels = random.integers(0, 3, 6)
    loss_scale = None
    if scale is not None:
        loss_scale = LossScale()
        loss_scale.scale.assign(scale)
    backward = backward_of(model, tf.TensorSpec((6, 2, 2, 1)), smoothing=smoothing, scale=loss_scale)
    loss, (gradient,) = backward(images, labels)
    expected, expected_gradient = reference(model, images, labels, smoothing)
    assert gradient.dtype == np.float32
    assert loss == pytest.approx(expected, rel=1e-6)
    # float32 sums of six samples
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["resnet8", "vgg_tiny"])
def test_a_prepared_step_begins_as_one_that_is_not(random, name):
    batch = batch_of(random, samples=16, size=8)
    found = []
    for prepared in (False, True):
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        model = MODELS[name](1, 10)
        backward = backward_of(model, tf.TensorSpec(batch.images.shape, tf.uint8))
        before = [variable.numpy() for variable in model.variables]
        if prepared:
            backward.prepare()
        for variable, value in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
        first, second = backward(batch.images, batch.labels), backward(batch.images, batch.labels)
        found.append([first[0], second[0], *(variable.numpy() for variable in model.variables)])
        # statistics and masks move on, so that the comparison says something
        assert any(
            (variable.numpy() != value).any() for variable, value in zip(model.variables, before, strict=True)
        )
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def replica_of(folder, *words, **keys):
    run = trainer(folder, *words, phases=(phase(steps=4, batch=8, **keys),))
    return Replica(run.parts)


def noted(replica):
    means, update = [], replica.parts.optimizer._update

    def note(mean):
        means.append(np.array(mean))
        update(mean)

    replica.parts.optimizer._update = note
    return means


def test_a_batch_in_parts_is_the_batch_to_rounding(tmp_path, random):
    batch, weights = batch_of(random), []
    for parts in (1, 2, 8):
        replica = replica_of(tmp_path, f"accumulate={parts}")
        backward = replica.backward_of(replica.config.phases[0])
        losses = [replica.step(backward, batch, StepHyperparameters(0.1, 0.9))[0] for _ in range(3)]
        weights.append((losses, [variable.numpy() for variable in replica.variables]))
    (whole_losses, whole), *others = weights
    assert whole_losses[2] < whole_losses[0]
    for losses, parts in others:
        np.testing.assert_allclose(losses, whole_losses, rtol=1e-5)
        for one, other in zip(parts, whole, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_mean_beyond_the_norm_is_scaled_down_to_it_and_others_are_left(tmp_path, random):
    batch = batch_of(random)
    replica = replica_of(tmp_path)
    backward, means = replica.backward_of(replica.config.phases[0]), noted(replica)
    replica.step(backward, batch, StepHyperparameters(0.0, 0.9))  # the weights stay as they are
    norm = float(np.linalg.norm(means[0].astype(np.float64)))
    for most, factor in ((norm / 4, 0.25), (norm * 2, 1.0)):
        clipped = replica_of(tmp_path, f"clip_norm={most!r}")
        for variable, same in zip(clipped.variables, replica.variables, strict=True):
            variable.assign(same.numpy())
        own = noted(clipped)
        clipped.step(clipped.backward_of(clipped.config.phases[0]), batch, StepHyperparameters(0.0, 0.9))
        np.testing.assert_allclose(own[0], means[0] * factor, rtol=1e-6)
        assert np.linalg.norm(own[0].astype(np.float64)) == pytest.approx(min(norm, most), rel=1e-6)
        if factor == 1.0:
            np.testing.assert_array_equal(own[0], means[0])


def everything(replica):
    return {
        **{variable.path: variable.numpy() for variable in replica.model.weights},
        **replica.optimizer_state(),
        "residual": replica.gradients.exchange.residual,
    }


def test_an_overflow_in_float16_changes_nothing_but_the_scale(tmp_path, random):
    replica = replica_of(tmp_path, "model=resnet8", "precision=float16", "reducer=hitopk")
    batch, backward = batch_of(random), replica.backward_of(replica.config.phases[0])
    held = random.standard_normal(replica.gradients.size).astype(np.float32) * 1e-3
    start = {name: value.copy() for name, value in everything(replica).items()}
    assert replica.step(backward, batch, StepHyperparameters(0.1, 0.9))[1].finite
    before = everything(replica)
    assert any((before[name] != start[name]).any() for name in start if name.endswith("moving_mean"))

    replica.gradients.exchange.add_residual(held)
    before["residual"] = held
    replica.scale.scale.assign(2.0**40)  # beyond what float16 holds
    _, report = replica.step(backward, batch, StepHyperparameters(0.1, 0.9))
    assert not report.finite
    assert float(replica.scale.scale.numpy()) == 2.0**39
    assert int(replica.scale.good_steps.numpy()) == 0
    after = everything(replica)
    assert after.keys() == before.keys()
    for name, value in before.items():  # statistics of BatchNormalization, too
        np.testing.assert_array_equal(after[name], value, err_msg=name)

    replica.scale.scale.assign(2.0**10)
    assert replica.step(backward, batch, StepHyperparameters(0.1, 0.9))[1].finite
    assert int(replica.scale.good_steps.numpy()) == 1
    assert not replica.gradients.exchange.residual.any()  # alone, a rank applies all that it held


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_half_precision_trains_float32_weights(tmp_path, precision):
    run = trainer(
        tmp_path,
        "model=resnet8",
        f"precision={precision}",
        phases=(phase(steps=14, size=6, rate="learning_rate: {start: 0.1, end: 0.05}"),),
    )
    assert {variable.dtype for variable in run.model.weights} == {"float32"}
    assert run.model.layers[5].compute_dtype == precision
    assert run.fit().metrics["top1"] > 0.5  # a guess is right in a tenth
    assert keras.config.dtype_policy().name == "float32"  # of this process, for whatever comes next
    assert (run.parts.optimizer.scale is None) == (precision == "bfloat16")


def test_the_average_follows_its_formula_and_lends_its_values():
    weights = keras.Variable([1.0, -2.0], dtype="float32")
    average = Average([weights], 0.75)
    expected = weights.numpy().astype(np.float64)
    for value in ([3.0, 4.0], [0.5, 1e-3], [-7.0, 2.0]):
        weights.assign(value)
        average.follow()
        expected = 0.75 * expected + 0.25 * np.array(value)
    np.testing.assert_allclose(average.averages[0].numpy(), expected, rtol=1e-6)
    with pytest.raises(RuntimeError, match="in the middle"), average.in_place():
        np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-6)
        raise RuntimeError("in the middle")
    np.testing.assert_array_equal(weights.numpy(), np.float32([-7, 2]))
    np.testing.assert_allclose(average.averages[0].numpy(), expected, rtol=1e-6)
    average.restart()
    np.testing.assert_array_equal(average.averages[0].numpy(), np.float32([-7, 2]))


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("logits", "labels", "counts", "expected"),
    [
        ([[7, 6, 5, 4, 3, 2, 1]] * 7, range(7), None, [1, 5]),
        ([[0, 0, 0, 0, 0, 0]] * 6, range(6), None, [1, 5]),  # equal logits: in the order of their classes
        ([[NAN, 0, 1, 2, 3, 4]] * 6, range(6), None, [1, 5]),  # NaN comes last, not first
        ([[NAN, -INF, 0, 1, 2, 3]] * 6, range(6), None, [1, 5]),  # minus infinity is before it
        ([[1, 0], [1, 0], [1, 0]], [0, 1, 0], [True, True, False], [1, 2]),  # padding does not count
    ],
)
def test_labels_count_first_and_among_five(logits, labels, counts, expected):
    counts = np.ones(len(labels), bool) if counts is None else np.array(counts)
    batch = Batch((np.empty(0), np.array(labels)), np.arange(len(labels)), counts)
    found = hits(np.array(logits, np.float32), batch)
    assert [int(found["top1"].sum()), int(found["top5"].sum())] == expected
