"""Residual networks for CIFAR and ImageNet (He et al. 2016; Zagoruyko and Komodakis 2016)."""

from collections.abc import Callable

import keras
from keras import layers, ops

from training.models.heads import image_input, with_logits

Shortcut = Callable[[keras.KerasTensor, int, int], keras.KerasTensor]


def resnet8(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return the CIFAR network of depth ``6·1 + 2`` with projected shortcuts, about 78,000 weights.

    For the quickstart and tests. Convolutions are not centred and logits start from Glorot's distribution,
    unlike in the papers' networks below: losses of this one are recorded to the bit.
    """
    images, x = image_input(channels, normalised=normalised)
    x = layers.ReLU()(_same_convolution(x, 16))
    for filters, stride in ((16, 1), (32, 2), (64, 2)):
        shortcut = x if stride == 1 else _same_convolution(x, filters, stride, kernel=1)
        x = layers.ReLU()(_same_convolution(x, filters, stride))
        x = layers.ReLU()(layers.Add()([_same_convolution(x, filters), shortcut]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(classes, dtype="float32", name="logits")(x), name="resnet8")


def _same_convolution(
    x: keras.KerasTensor, filters: int, stride: int = 1, *, kernel: int = 3
) -> keras.KerasTensor:
    x = layers.Conv2D(filters, kernel, stride, "same", use_bias=False, kernel_initializer="he_normal")(x)
    return layers.BatchNormalization(momentum=0.9)(x)


def resnet20(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return the CIFAR network of 20 layers, 0.27 million weights (He et al., section 4.2, shortcuts A)."""
    return _cifar_resnet(20, channels, classes, normalised=normalised)


def resnet110(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return the CIFAR network of 110 layers, 1.7 million weights (He et al., section 4.2, shortcuts A)."""
    return _cifar_resnet(110, channels, classes, normalised=normalised)


def resnet50(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return ResNet-50 v1.5, 25.56 million weights at 1,000 classes.

    v1.5: a block that halves its maps does so in its 3×3 convolution, where v1 drops three of four pixels in
    the 1×1 before. The scale of a block's last normalisation starts at zero, so that every block starts as
    its shortcut (Goyal et al. 2017, section 5.1).
    """
    images, x = image_input(channels, normalised=normalised)
    x = _imagenet_stem(x)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            x = _bottleneck(x, 64 * 2**stage, _stride(stage, block))
    return with_logits(images, layers.GlobalAveragePooling2D()(x), classes, "resnet50")


def wide_resnet18(channels: int, classes: int, *, normalised: bool = False, width: int = 4) -> keras.Model:
    """Return ResNet-18 with ``width`` times the channels in every block, 180 million weights at 4.

    The first convolution keeps its 64, as in Zagoruyko and Komodakis, whose counts (table 8) this meets.
    """
    images, x = image_input(channels, normalised=normalised)
    x = _imagenet_stem(x)
    for stage in range(4):
        for block in range(2):
            x = _basic_block(x, 64 * width * 2**stage, _stride(stage, block), _projected)
    return with_logits(images, layers.GlobalAveragePooling2D()(x), classes, "wide_resnet18")


def _cifar_resnet(depth: int, channels: int, classes: int, *, normalised: bool) -> keras.Model:
    images, x = image_input(channels, normalised=normalised)
    x = _activated(x, 16)
    for stage in range(3):
        for block in range((depth - 2) // 6):
            x = _basic_block(x, 16 * 2**stage, _stride(stage, block), _padded)
    return with_logits(images, layers.GlobalAveragePooling2D()(x), classes, f"resnet{depth}")


def _stride(stage: int, block: int) -> int:
    return 2 if stage and not block else 1


def _imagenet_stem(x: keras.KerasTensor) -> keras.KerasTensor:
    x = _activated(x, 64, kernel=7, stride=2)
    # Zeros around the maps win no maximum that they should not: activations are not negative.
    return layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))


def _basic_block(x: keras.KerasTensor, filters: int, stride: int, shortcut: Shortcut) -> keras.KerasTensor:
    y = _activated(x, filters, stride=stride)
    y = _convolution(y, filters)
    return layers.ReLU()(layers.Add()([y, shortcut(x, filters, stride)]))


def _bottleneck(x: keras.KerasTensor, filters: int, stride: int) -> keras.KerasTensor:
    y = _activated(x, filters, kernel=1)
    y = _activated(y, filters, stride=stride)
    y = _convolution(y, 4 * filters, kernel=1, gamma="zeros")
    return layers.ReLU()(layers.Add()([y, _projected(x, 4 * filters, stride)]))


def _projected(x: keras.KerasTensor, filters: int, stride: int) -> keras.KerasTensor:
    """Return shortcut B: a 1×1 convolution where the shape changes."""
    if stride == 1 and x.shape[-1] == filters:
        return x
    return _convolution(x, filters, kernel=1, stride=stride)


def _padded(x: keras.KerasTensor, filters: int, stride: int) -> keras.KerasTensor:
    """Return shortcut A, which has no weights: every ``stride``-th pixel, zeros in the new channels."""
    if stride == 1:
        return x
    return ops.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (0, filters - x.shape[-1])))


def _activated(x: keras.KerasTensor, filters: int, *, kernel: int = 3, stride: int = 1) -> keras.KerasTensor:
    return layers.ReLU()(_convolution(x, filters, kernel=kernel, stride=stride))


def _convolution(
    x: keras.KerasTensor, filters: int, *, kernel: int = 3, stride: int = 1, gamma: str = "ones"
) -> keras.KerasTensor:
    padding = "same" if stride == 1 else "valid"
    if stride > 1 and kernel > 1:
        # "same" pads even sizes below and to the right only: windows would be a pixel off the shortcut's.
        x = layers.ZeroPadding2D(kernel // 2)(x)
    x = layers.Conv2D(filters, kernel, stride, padding, use_bias=False, kernel_initializer="he_normal")(x)
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, gamma_initializer=gamma)(x)
