"""VGG networks (Simonyan and Zisserman 2015): stages of 3×3 convolutions, each followed by a pooling."""

from collections.abc import Sequence

import keras
from keras import layers

from training.models.heads import hidden_layers, image_input, with_logits

LARGEST_FILTERS = 512


def vgg16(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return VGG-16 (configuration D), 138.4 million weights at 1,000 classes."""
    return _imagenet_vgg("vgg16", (2, 2, 3, 3, 3), channels, classes, normalised=normalised)


def vgg19(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return VGG-19 (configuration E), 143.7 million weights at 1,000 classes."""
    return _imagenet_vgg("vgg19", (2, 2, 4, 4, 4), channels, classes, normalised=normalised)


def vgg16_cifar(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return VGG-16 with batch normalisation and without hidden dense layers, 14.7 million weights.

    Convolutions keep the biases that normalisation takes away again: the network that gTop-k and Ok-Topk
    were measured with has them, and its 14,728,266 weights are exchanged.
    """
    images, x = image_input(channels, normalised=normalised)
    x = _stages(x, (2, 2, 3, 3, 3), filters=64, batch_normalisation=True)
    return with_logits(images, layers.GlobalAveragePooling2D()(x), classes, "vgg16_cifar")


def vgg_small(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return three stages of one convolution each, normalised as in ``vgg16_cifar``, 94,986 weights."""
    images, x = image_input(channels, normalised=normalised)
    x = _stages(x, (1, 1, 1), filters=32, batch_normalisation=True)
    return with_logits(images, layers.GlobalAveragePooling2D()(x), classes, "vgg_small")


def vgg_tiny(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return two stages and the hidden layers of a VGG, about 14,000 weights, for tests."""
    images, x = image_input(channels, normalised=normalised)
    x = _stages(x, (1, 1), filters=16)
    return with_logits(images, hidden_layers(x, side=2, units=48), classes, "vgg_tiny")


def _imagenet_vgg(
    name: str, convolutions: Sequence[int], channels: int, classes: int, *, normalised: bool
) -> keras.Model:
    images, x = image_input(channels, normalised=normalised)
    x = _stages(x, convolutions, filters=64)
    return with_logits(images, hidden_layers(x, side=7, units=4096), classes, name)


def _stages(
    x: keras.KerasTensor, convolutions: Sequence[int], filters: int, *, batch_normalisation: bool = False
) -> keras.KerasTensor:
    """Return the maps after as many convolutions a stage; ``filters`` of the first double until 512."""
    for stage, count in enumerate(convolutions):
        for _ in range(count):
            size = min(filters * 2**stage, LARGEST_FILTERS)
            x = layers.Conv2D(size, 3, padding="same", kernel_initializer="he_normal")(x)
            if batch_normalisation:
                x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)
            x = layers.ReLU()(x)
        x = layers.MaxPooling2D(2)(x)
    return x
