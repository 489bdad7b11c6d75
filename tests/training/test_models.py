"""Models: their sizes, what the papers ask of their layers, and images of any size and dtype."""

from collections import Counter
from functools import cache
from math import ceil, floor

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.extent import more
from training.models import MODELS
from training.models.images import AdaptiveAveragePooling2D

POLICIES = ["float32", "mixed_float16", "mixed_bfloat16"]


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(3)


def images(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@cache
def built(name):
    """Return a model that several tests look at: it takes seconds to build."""
    return MODELS[name](3, 10)


def layers_of(model, kind):
    return [layer for layer in model.layers if isinstance(layer, kind)]


@pytest.mark.parametrize(
    ("name", "channels", "classes", "expected"),
    [
        ("resnet8", 3, 10, 78_042),
        ("resnet20", 3, 10, 269_722),  # He et al.: 0.27 million
        ("resnet110", 3, 10, 1_727_962),  # 1.7 million
        ("vgg16_cifar", 3, 10, 14_728_266),  # Ok-Topk, table 2
        ("vgg_small", 3, 10, 94_986),
        ("mlp", 1, 10, (784 + 1) * 2048 + 2 * (2048 + 1) * 2048 + (2048 + 1) * 10),
        ("alexnet", 3, 1000, 61_100_840),
        ("resnet50", 3, 1000, 25_557_032),
        ("vgg16", 3, 1000, 138_357_544),
        ("vgg19", 3, 1000, 143_667_240),
        ("wide_resnet18", 3, 1000, 180_191_016),
    ],
)
def test_a_model_has_the_papers_weights(name, channels, classes, expected):
    with keras.StatelessScope(initialize_variables=False):  # none of them is allocated
        model = MODELS[name](channels, classes)
    keras.utils.clear_session()  # forgets the variables that wait for values
    assert sum(int(np.prod(variable.shape)) for variable in model.trainable_variables) == expected


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("resnet50", [(33, 50), (1, 1), *more((96, 96))]),
        ("alexnet", [(101, 70), *more((63, 63), (96, 96), (224, 224))]),
        *more(("wide_resnet18", [(32, 32), (41, 35)]), ("vgg19", [(49, 33), (96, 96), (288, 288)])),
    ],
)
def test_an_imagenet_model_takes_any_size(name, sides):
    model = MODELS[name](3, 1000)
    for height, width in sides:
        logits = model(images(1, height, width, 3))
        assert (logits.shape, logits.dtype) == ((1, 1000), tf.float32)
        assert np.isfinite(logits).all()
    # Classes start about equally likely: the last weights are small, whatever the sum over features.
    last = model.get_layer("logits").kernel.numpy()
    assert last.std() == pytest.approx(0.01, rel=0.01)  # of at least 2 million draws


@pytest.mark.parametrize(
    "name", ["resnet8", "vgg_tiny", "vgg_small", "vgg16_cifar", "mlp", *more("resnet20", "resnet110")]
)
def test_a_small_model_takes_any_size_at_once_and_traced_with_unknown_sizes(name):
    model, smallest = MODELS[name](1, 7), MODELS[name].smallest_side
    traced = tf.function(
        lambda batch: model(batch, training=False),
        input_signature=[tf.TensorSpec((None, None, None, 1), tf.uint8)],
    )
    for height, width in [(smallest, smallest), (smallest + 9, smallest + 4)]:
        batch = images(3, height, width, 1)
        logits = model(batch, training=False)
        assert (logits.shape, logits.dtype) == ((3, 7), tf.float32)
        # the same sums in another order
        np.testing.assert_allclose(traced(tf.constant(batch)), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet20", "resnet50", "vgg16_cifar"])
def test_normalisation_averages_over_ten_steps(name):
    found = layers_of(built(name), keras.layers.BatchNormalization)
    assert {(layer.momentum, layer.epsilon) for layer in found} == {(0.9, 1e-5)}


def test_resnet50_halves_its_maps_in_3x3_convolutions():
    convolutions = layers_of(built("resnet50"), keras.layers.Conv2D)
    assert Counter((layer.kernel_size, layer.strides) for layer in convolutions) == {
        ((7, 7), (2, 2)): 1,
        ((3, 3), (2, 2)): 3,
        ((1, 1), (2, 2)): 3,  # the projected shortcuts; v1 has three more, and no 3×3 of stride 2
        ((3, 3), (1, 1)): 13,
        ((1, 1), (1, 1)): 33,
    }
    assert not any(layer.use_bias for layer in convolutions)


def test_every_block_of_resnet50_starts_as_its_shortcut():
    model = built("resnet50")
    ends = [_last_normalisation(add) for add in layers_of(model, keras.layers.Add)]
    assert len(ends) == 3 + 4 + 6 + 3
    for layer in layers_of(model, keras.layers.BatchNormalization):
        assert set(layer.gamma.numpy().tolist()) == ({0.0} if layer in ends else {1.0})


@pytest.mark.parametrize(("height", "width"), [(9, 10), *more((8, 8))])
def test_shortcuts_without_weights_keep_every_other_pixel_and_add_empty_channels(height, width):
    model = MODELS["resnet20"](3, 10)
    for add in layers_of(model, keras.layers.Add):
        _last_normalisation(add).gamma.assign(np.zeros(add.output.shape[-1]))
    (pooling,) = layers_of(model, keras.layers.GlobalAveragePooling2D)
    first = layers_of(model, keras.layers.ReLU)[0]
    start, end = keras.Model(model.input, [first.output, pooling.input])(images(2, height, width, 3))
    expected = np.zeros(end.shape, np.float32)
    expected[..., :16] = start[:, ::4, ::4]
    assert end.shape[-1] == 64
    np.testing.assert_array_equal(end, expected)


@pytest.mark.parametrize("name", ["resnet20", "resnet50"])
@pytest.mark.parametrize("side", [9, *more(8)])
def test_strided_convolutions_are_centred_on_the_shortcuts_pixels(name, side):
    model = built(name)
    strided = [
        layer
        for layer in layers_of(model, keras.layers.Conv2D)
        if layer.kernel_size == (3, 3) and layer.strides == (2, 2)
    ]
    for layer in strided:
        centre = np.zeros(layer.kernel.shape, np.float32)
        centre[1, 1] = np.eye(*layer.kernel.shape[2:])
        layer.kernel.assign(centre)
        maps = np.random.default_rng(1).normal(size=(1, side, side, layer.kernel.shape[2])).astype("float32")
        padding = layer.input._keras_history.operation
        found = layer(padding(maps))
        kept = min(layer.kernel.shape[2:])
        np.testing.assert_array_equal(found[..., :kept], maps[:, ::2, ::2, :kept])
    assert len(strided) == {"resnet20": 2, "resnet50": 3}[name]


def _last_normalisation(add):
    """Return the layer in front of a block's sum; the shortcut is the other summand."""
    return add.input[0]._keras_history.operation


@pytest.mark.parametrize("name", ["resnet8", "vgg_tiny"])
def test_bytes_become_minus_one_to_one_and_normalised_images_stay(name):
    model, plain = MODELS[name](3, 10), MODELS[name](3, 10, normalised=True)
    plain.set_weights(model.get_weights())
    batch = images(4, 8, 8, 3)
    batch[0, 0, 0, :2] = 0, 255
    # levels are scaled by the rounded 1/127.5 there, divided here
    np.testing.assert_allclose(plain(batch / np.float32(127.5) - 1), model(batch), rtol=1e-4, atol=1e-5)
    floats = plain(np.zeros((1, 8, 8, 3), np.float32))
    np.testing.assert_array_equal(plain(np.zeros((1, 8, 8, 3), np.float16)), floats)


@pytest.mark.parametrize("policy", POLICIES, indirect=True)
@pytest.mark.parametrize("name", ["vgg_tiny", *more("resnet8")])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_images_are_cast_once_and_logits_are_float32_under_every_policy(name, dtype, policy):
    model = MODELS[name](3, 10, normalised=dtype != "uint8")
    traced = tf.function(model).get_concrete_function(tf.TensorSpec((2, 9, 8, 3), dtype))
    assert traced.structured_outputs.dtype == tf.float32
    assert {variable.dtype for variable in model.weights} == {"float32"}
    casts = [
        (operation.inputs[0].dtype.name, operation.outputs[0].dtype.name)
        for operation in traced.graph.get_operations()
        if operation.type == "Cast" and operation.inputs[0].shape == (2, 9, 8, 3)
    ]
    compute = policy.removeprefix("mixed_")
    path = [dtype, compute] if dtype != "uint8" else ["uint8", "float32", compute]
    assert casts == [pair for pair in zip(path, path[1:], strict=False) if pair[0] != pair[1]]


def pooled(maps, side):
    """Return the adaptive average as its definition says, bin after bin, in float64."""
    _, height, width, _ = maps.shape
    result = np.empty((len(maps), side, side, maps.shape[3]))
    for i in range(side):
        for j in range(side):
            rows = slice(floor(i * height / side), ceil((i + 1) * height / side))
            columns = slice(floor(j * width / side), ceil((j + 1) * width / side))
            result[:, i, j] = maps[:, rows, columns].astype(np.float64).mean(axis=(1, 2))
    return result


@pytest.mark.parametrize("side", [2, 7, *more(1)])
@pytest.mark.parametrize(("height", "width"), [(4, 9), (14, 10), *more((1, 1), (3, 3), (7, 7))])
def test_adaptive_pooling_averages_bins_that_cover_the_maps(side, height, width):
    maps = np.random.default_rng(2).normal(size=(2, height, width, 5)).astype(np.float32)
    layer = AdaptiveAveragePooling2D(side)
    # float32 against float64, values about 1
    np.testing.assert_allclose(layer(maps), pooled(maps, side), rtol=0, atol=1e-6)
    unknown = tf.function(layer, input_signature=[tf.TensorSpec((None, None, None, 5))])
    np.testing.assert_array_equal(unknown(maps), layer(maps))
    assert layer.compute_output_shape((None, None, None, 5)) == (None, side, side, 5)


def test_dropout_repeats_with_the_seed_and_differs_between_ranks():
    def build(seed):
        keras.utils.set_random_seed(seed)
        return MODELS["vgg_tiny"](3, 10)

    first, again, other = build(5), build(5), build(6)
    other.set_weights(first.get_weights())
    batch = images(8, 8, 8, 3)
    answers = [model(batch, training=True).numpy() for model in (first, again, other)]
    np.testing.assert_array_equal(answers[0], answers[1])
    assert (answers[0] != answers[2]).any()
    np.testing.assert_array_equal(first(batch, training=False), other(batch, training=False))
    # The state of the masks is a rank's own: it is no weight, so that broadcasting weights leaves it alone.
    states = {variable.path for variable in first.variables} - {variable.path for variable in first.weights}
    assert len(states) == 2
