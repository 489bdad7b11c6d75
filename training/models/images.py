"""Image networks: ResNets, VGG, AlexNet and a perceptron, which all share the input layer and the logits.

Residual: He et al. 2016, Zagoruyko and Komodakis 2016; VGG: Simonyan and Zisserman 2015; AlexNet: Krizhevsky
2014. The function of a network takes the input of its first layer and returns features ``(batch, size)``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import keras
from keras import layers, ops

Maps: TypeAlias = keras.KerasTensor
Block = Callable[[Maps, int, int], Maps]  # of maps, filters and stride; so is a shortcut

LARGEST_FILTERS = 512
MLP_SIDE, MLP_UNITS, MLP_LAYERS = 28, 2048, 3


def image_model(
    name: str,
    features_of: Callable[[Maps], Maps],
    channels: int,
    classes: int,
    *,
    normalised: bool,
    deviation: float | None,
) -> keras.Model:
    """Return the model from images to the float32 logits of the features of a network.

    ``deviation``: standard deviation of the normally distributed initial weights of the logits, so small
    that all classes start about equally likely (Goyal et al. 2017, section 5.1); ``None``: Glorot's.
    """
    images, x = image_input(channels, normalised=normalised)
    features = features_of(x)
    start = "glorot_uniform" if deviation is None else keras.initializers.RandomNormal(stddev=deviation)
    logits = layers.Dense(classes, kernel_initializer=start, dtype="float32", name="logits")
    return keras.Model(images, logits(features), name=name)


def image_input(channels: int, *, normalised: bool) -> tuple[Maps, Maps]:
    """Return the model's input and, in floats, the input of its first layer.

    Without ``normalised``, levels 0 … 255 become −1 … 1, in float32 whatever the policy: half precision would
    round levels before the first convolution has seen them. With it, images are cast to the policy's compute
    dtype and nothing else, so that float16 images of a float16 model stay as they are.
    """
    if normalised:
        dtype = keras.config.dtype_policy().compute_dtype
        images = keras.Input((None, None, channels), dtype=dtype, name="images")
        return images, images
    images = keras.Input((None, None, channels), name="images")
    return images, layers.Rescaling(1 / 127.5, offset=-1, dtype="float32")(images)


# Residual networks


def resnet8(x: Maps) -> Maps:
    """Return the features of the CIFAR network of depth ``6·1 + 2`` with projected shortcuts.

    For the quickstart and tests. Convolutions are not centred, unlike in the papers' networks below: losses
    of this one are recorded to the bit.
    """
    x = layers.ReLU()(_same_convolution(x, 16))
    for filters, stride in ((16, 1), (32, 2), (64, 2)):
        shortcut = x if stride == 1 else _same_convolution(x, filters, stride, kernel=1)
        x = layers.ReLU()(_same_convolution(x, filters, stride))
        x = layers.ReLU()(layers.Add()([_same_convolution(x, filters), shortcut]))
    return layers.GlobalAveragePooling2D()(x)


def _same_convolution(x: Maps, filters: int, stride: int = 1, *, kernel: int = 3) -> Maps:
    x = layers.Conv2D(filters, kernel, stride, "same", use_bias=False, kernel_initializer="he_normal")(x)
    return layers.BatchNormalization(momentum=0.9)(x)


def cifar_resnet(x: Maps, *, depth: int) -> Maps:
    """Return the features of a CIFAR network (He et al., section 4.2, shortcuts A)."""
    blocks = [(depth - 2) // 6] * 3
    return _residual(_activated(x, 16), blocks, 16, partial(_basic_block, shortcut=_padded))


def resnet50(x: Maps) -> Maps:
    """Return the features of ResNet-50 v1.5.

    v1.5: a block that halves its maps does so in its 3×3 convolution, where v1 drops three of four pixels in
    the 1×1 before. The scale of a block's last normalisation starts at zero, so that every block starts as
    its shortcut (Goyal et al. 2017, section 5.1).
    """
    return _residual(_imagenet_stem(x), (3, 4, 6, 3), 64, _bottleneck)


def wide_resnet18(x: Maps, *, width: int = 4) -> Maps:
    """Return the features of ResNet-18 with ``width`` times the channels in every block.

    The first convolution keeps its 64, as in Zagoruyko and Komodakis, whose counts (table 8) this meets.
    """
    block = partial(_basic_block, shortcut=_projected)
    return _residual(_imagenet_stem(x), (2, 2, 2, 2), 64 * width, block)


def _residual(x: Maps, blocks: Sequence[int], filters: int, block: Block) -> Maps:
    """Return the features after as many blocks a stage; each stage but the first begins with stride 2."""
    for stage, count in enumerate(blocks):
        for number in range(count):
            x = block(x, filters * 2**stage, 2 if stage and not number else 1)
    return layers.GlobalAveragePooling2D()(x)


def _imagenet_stem(x: Maps) -> Maps:
    x = _activated(x, 64, kernel=7, stride=2)
    # Zeros around the maps win no maximum that they should not: activations are not negative.
    return layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))


def _basic_block(x: Maps, filters: int, stride: int, shortcut: Block) -> Maps:
    y = _activated(x, filters, stride=stride)
    y = _centred_convolution(y, filters)
    return layers.ReLU()(layers.Add()([y, shortcut(x, filters, stride)]))


def _bottleneck(x: Maps, filters: int, stride: int) -> Maps:
    y = _activated(x, filters, kernel=1)
    y = _activated(y, filters, stride=stride)
    y = _centred_convolution(y, 4 * filters, kernel=1, gamma="zeros")
    return layers.ReLU()(layers.Add()([y, _projected(x, 4 * filters, stride)]))


def _projected(x: Maps, filters: int, stride: int) -> Maps:
    """Return shortcut B: a 1×1 convolution where the shape changes."""
    if stride == 1 and x.shape[-1] == filters:
        return x
    return _centred_convolution(x, filters, kernel=1, stride=stride)


def _padded(x: Maps, filters: int, stride: int) -> Maps:
    """Return shortcut A, which has no weights: every ``stride``-th pixel, zeros in the new channels."""
    if stride == 1:
        return x
    return ops.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (0, filters - x.shape[-1])))


def _activated(x: Maps, filters: int, *, kernel: int = 3, stride: int = 1) -> Maps:
    return layers.ReLU()(_centred_convolution(x, filters, kernel=kernel, stride=stride))


def _centred_convolution(
    x: Maps, filters: int, *, kernel: int = 3, stride: int = 1, gamma: str = "ones"
) -> Maps:
    padding = "same" if stride == 1 else "valid"
    if stride > 1 and kernel > 1:
        # "same" pads even sizes below and to the right only: windows would be a pixel off the shortcut's.
        x = layers.ZeroPadding2D(kernel // 2)(x)
    x = layers.Conv2D(filters, kernel, stride, padding, use_bias=False, kernel_initializer="he_normal")(x)
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, gamma_initializer=gamma)(x)


# Networks without shortcuts


def vgg(x: Maps, *, convolutions: Sequence[int], filters: int = 64, side: int = 7, units: int = 4096) -> Maps:
    """Return the features of a VGG of as many ``convolutions`` a stage, after its hidden layers."""
    return _hidden_layers(_stages(x, convolutions, filters), side=side, units=units)


def normalised_vgg(x: Maps, *, convolutions: Sequence[int], filters: int = 64) -> Maps:
    """Return the features of a VGG with batch normalisation and without hidden dense layers.

    Convolutions have biases, which normalisation cancels: so has the network that gTop-k and Ok-Topk were
    measured with, whose 14,728,266 weights are exchanged.
    """
    return layers.GlobalAveragePooling2D()(_stages(x, convolutions, filters, batch_normalisation=True))


def alexnet(x: Maps) -> Maps:
    """Return the features of AlexNet in one tower."""
    x = layers.ZeroPadding2D(2)(x)
    x = layers.MaxPooling2D(3, 2)(_convolution(x, 64, 11, stride=4, padding="valid"))
    x = layers.MaxPooling2D(3, 2)(_convolution(x, 192, 5))
    for filters in (384, 256, 256):
        x = _convolution(x, filters)
    return _hidden_layers(layers.MaxPooling2D(3, 2)(x), side=6, units=4096)


def mlp(x: Maps) -> Maps:
    """Return the features of a perceptron of three hidden layers of 2,048 units each.

    Images are averaged to 28 × 28 pixels. Each weight is used once a sample (in a convolution as often as the
    map has pixels): a step computes little for the gradient that it exchanges.
    """
    x = layers.Flatten()(AdaptiveAveragePooling2D(MLP_SIDE)(x))
    for _ in range(MLP_LAYERS):
        x = layers.Dense(MLP_UNITS, activation="relu", kernel_initializer="he_normal")(x)
    return x


def _stages(x: Maps, convolutions: Sequence[int], filters: int, *, batch_normalisation: bool = False) -> Maps:
    """Return the maps after as many convolutions a stage; ``filters`` of the first double until 512."""
    for stage, count in enumerate(convolutions):
        for _ in range(count):
            size = min(filters * 2**stage, LARGEST_FILTERS)
            x = _convolution(x, size, batch_normalisation=batch_normalisation)
        x = layers.MaxPooling2D(2)(x)
    return x


def _convolution(
    x: Maps,
    filters: int,
    kernel: int = 3,
    *,
    stride: int = 1,
    padding: str = "same",
    batch_normalisation: bool = False,
) -> Maps:
    x = layers.Conv2D(filters, kernel, stride, padding, kernel_initializer="he_normal")(x)
    if batch_normalisation:
        x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)
    return layers.ReLU()(x)


def _hidden_layers(maps: Maps, *, side: int, units: int) -> Maps:
    """Return ``(batch, units)``: maps of any size averaged to ``side`` × ``side``, then two dense layers.

    Half of their outputs is dropped in training. Masks follow the random state at construction, the one that
    ``keras.utils.set_random_seed`` sets: ranks that are seeded differently drop different ones.
    """
    x = layers.Flatten()(AdaptiveAveragePooling2D(side)(maps))
    for _ in range(2):
        x = layers.Dense(units, activation="relu", kernel_initializer="he_normal")(x)
        x = layers.Dropout(0.5)(x)
    return x


class AdaptiveAveragePooling2D(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Average maps of any size over ``side`` × ``side`` bins that cover them.

    Takes ``(batch, height, width, channels)`` and returns ``(batch, side, side, channels)``, same dtype.
    Of ``h`` rows, bin ``i`` holds those from ``⌊i·h/side⌋`` to before ``⌈(i + 1)·h/side⌉``: where ``side``
    does not divide ``h``, neighbours overlap, and with ``h < side`` rows are repeated.
    """

    def __init__(self, side: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.side = side

    def call(self, maps: Any) -> Any:
        if tuple(maps.shape[1:3]) == (self.side, self.side):
            return maps
        height, width = ops.shape(maps)[1:3]
        rows = ops.einsum("ih,bhwc->biwc", self._shares(height), maps)
        return ops.einsum("jw,biwc->bijc", self._shares(width), rows)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        return (input_shape[0], self.side, self.side, input_shape[3])

    def _shares(self, size: Any) -> Any:
        """Return what each of ``size`` positions weighs in the mean of each bin, ``(side, size)``."""
        bins, positions = ops.arange(self.side)[:, None], ops.arange(size)[None, :]
        starts = bins * size // self.side
        stops = ((bins + 1) * size + self.side - 1) // self.side
        inside = ops.logical_and(starts <= positions, positions < stops)
        return ops.cast(inside, self.compute_dtype) / ops.cast(stops - starts, self.compute_dtype)
