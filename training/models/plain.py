"""Networks without shortcuts: VGG (Simonyan and Zisserman 2015), AlexNet (Krizhevsky 2014), a perceptron."""

from collections.abc import Sequence

import keras
from keras import layers

from training.models.heads import AdaptiveAveragePooling2D, hidden_layers, image_input, with_logits

LARGEST_FILTERS = 512
MLP_SIDE, MLP_UNITS, MLP_LAYERS = 28, 2048, 3


def vgg16(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return VGG-16 (configuration D), 138.4 million weights at 1,000 classes."""
    return _imagenet_vgg("vgg16", (2, 2, 3, 3, 3), channels, classes, normalised=normalised)


def vgg19(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return VGG-19 (configuration E), 143.7 million weights at 1,000 classes."""
    return _imagenet_vgg("vgg19", (2, 2, 4, 4, 4), channels, classes, normalised=normalised)


def vgg16_cifar(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return VGG-16 with batch normalisation and without hidden dense layers, 14.7 million weights.

    Convolutions have biases, which normalisation cancels: so has the network that gTop-k and Ok-Topk were
    measured with, whose 14,728,266 weights are exchanged.
    """
    return _normalised_vgg("vgg16_cifar", (2, 2, 3, 3, 3), 64, channels, classes, normalised=normalised)


def vgg_small(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return three stages of one convolution each, normalised as in ``vgg16_cifar``, 94,986 weights."""
    return _normalised_vgg("vgg_small", (1, 1, 1), 32, channels, classes, normalised=normalised)


def vgg_tiny(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return two stages and the hidden layers of a VGG, about 14,000 weights, for tests."""
    images, x = image_input(channels, normalised=normalised)
    x = _stages(x, (1, 1), filters=16)
    return with_logits(images, hidden_layers(x, side=2, units=48), classes, "vgg_tiny")


def alexnet(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return AlexNet in one tower, 61.1 million weights at 1,000 classes."""
    images, x = image_input(channels, normalised=normalised)
    x = layers.ZeroPadding2D(2)(x)
    x = layers.MaxPooling2D(3, 2)(_convolution(x, 64, 11, stride=4, padding="valid"))
    x = layers.MaxPooling2D(3, 2)(_convolution(x, 192, 5))
    for filters in (384, 256, 256):
        x = _convolution(x, filters)
    x = layers.MaxPooling2D(3, 2)(x)
    return with_logits(images, hidden_layers(x, side=6, units=4096), classes, "alexnet")


def mlp(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return three hidden layers of 2,048 units each, 10 million weights on images of one channel.

    Images are averaged to 28 × 28 pixels. Each weight is used once a sample (in a convolution as often as the
    map has pixels): a step computes little for the gradient that it exchanges.
    """
    images, x = image_input(channels, normalised=normalised)
    x = layers.Flatten()(AdaptiveAveragePooling2D(MLP_SIDE)(x))
    for _ in range(MLP_LAYERS):
        x = layers.Dense(MLP_UNITS, activation="relu", kernel_initializer="he_normal")(x)
    return with_logits(images, x, classes, "mlp")


def _imagenet_vgg(
    name: str, convolutions: Sequence[int], channels: int, classes: int, *, normalised: bool
) -> keras.Model:
    images, x = image_input(channels, normalised=normalised)
    x = _stages(x, convolutions, filters=64)
    return with_logits(images, hidden_layers(x, side=7, units=4096), classes, name)


def _normalised_vgg(
    name: str, convolutions: Sequence[int], filters: int, channels: int, classes: int, *, normalised: bool
) -> keras.Model:
    images, x = image_input(channels, normalised=normalised)
    x = _stages(x, convolutions, filters, batch_normalisation=True)
    return with_logits(images, layers.GlobalAveragePooling2D()(x), classes, name)


def _stages(
    x: keras.KerasTensor, convolutions: Sequence[int], filters: int, *, batch_normalisation: bool = False
) -> keras.KerasTensor:
    """Return the maps after as many convolutions a stage; ``filters`` of the first double until 512."""
    for stage, count in enumerate(convolutions):
        for _ in range(count):
            size = min(filters * 2**stage, LARGEST_FILTERS)
            x = _convolution(x, size, batch_normalisation=batch_normalisation)
        x = layers.MaxPooling2D(2)(x)
    return x


def _convolution(
    x: keras.KerasTensor,
    filters: int,
    kernel: int = 3,
    *,
    stride: int = 1,
    padding: str = "same",
    batch_normalisation: bool = False,
) -> keras.KerasTensor:
    x = layers.Conv2D(filters, kernel, stride, padding, kernel_initializer="he_normal")(x)
    if batch_normalisation:
        x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)
    return layers.ReLU()(x)
