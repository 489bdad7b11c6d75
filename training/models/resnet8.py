"""The residual network of the quickstart and of tests."""

import keras
from keras import layers

from training.models.heads import image_input


def resnet8(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return the CIFAR residual network of depth ``6·1 + 2`` with projected shortcuts, about 78,000 weights.

    Apart from :mod:`training.models.resnet`, whose networks are those of the papers: runs whose losses are
    known to the bit start from this one's initial weights.
    """
    images, x = image_input(channels, normalised=normalised)
    x = _convolution(x, 16, stride=1)
    for stage, filters in enumerate((16, 32, 64)):
        x = _block(x, filters, stride=1 if stage == 0 else 2)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(classes, dtype="float32", name="logits")(x), name="resnet8")


def _block(x: keras.KerasTensor, filters: int, stride: int) -> keras.KerasTensor:
    shortcut = x
    if stride != 1 or x.shape[-1] != filters:
        shortcut = _convolution(x, filters, stride, kernel=1, activate=False)
    x = _convolution(x, filters, stride)
    x = _convolution(x, filters, 1, activate=False)
    return layers.ReLU()(layers.Add()([x, shortcut]))


def _convolution(
    x: keras.KerasTensor, filters: int, stride: int, *, kernel: int = 3, activate: bool = True
) -> keras.KerasTensor:
    x = layers.Conv2D(filters, kernel, stride, "same", use_bias=False, kernel_initializer="he_normal")(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    return layers.ReLU()(x) if activate else x
