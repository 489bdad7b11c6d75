"""The shapes of all weights of networks that the papers measure, in the order of their layers.

They are made from the layers of the networks; the networks themselves are not built.
"""

from collections.abc import Callable
from itertools import pairwise

Shape = tuple[int, ...]

IMAGENET_CLASSES = 1000


def resnet50() -> list[Shape]:
    """Return the 161 tensors of ResNet-50 (He et al. 2016), 25,557,032 entries."""
    shapes, channels = _normalised_convolution(7, 3, 64), 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            shapes += _normalised_convolution(1, channels, width)
            shapes += _normalised_convolution(3, width, width)
            shapes += _normalised_convolution(1, width, 4 * width)
            if block == 0:  # the shortcut changes the number of channels
                shapes += _normalised_convolution(1, channels, 4 * width)
            channels = 4 * width
    return [*shapes, *_dense(channels, IMAGENET_CLASSES)]


def vgg19() -> list[Shape]:
    """Return the 38 tensors of VGG-19 (Simonyan and Zisserman 2015); the largest has 72 % of 143,667,240."""
    channels = [3, 64, 64, 128, 128, *[256] * 4, *[512] * 8]
    shapes = [shape for ends in pairwise(channels) for shape in ((3, 3, *ends), ends[1:])]
    widths = [7 * 7 * 512, 4096, 4096, IMAGENET_CLASSES]
    return [*shapes, *(shape for ends in pairwise(widths) for shape in _dense(*ends))]


def transformer_base() -> list[Shape]:
    """Return the 181 tensors of the base Transformer (Vaswani et al. 2017), 63,045,632 entries.

    One embedding is shared by all its uses; attention is without biases, layers have scale and shift.
    """
    width, inner, layers = 512, 2048, 6
    norm = [(width,), (width,)]
    attention = [(width, width)] * 4 + norm
    feed_forward = [*_dense(width, inner), *_dense(inner, width), *norm]
    encoder, decoder = attention + feed_forward, attention * 2 + feed_forward
    return [(37_000, width), *encoder * layers, *decoder * layers]


SHAPES: dict[str, Callable[[], list[Shape]]] = {
    "resnet50": resnet50,
    "vgg19": vgg19,
    "transformer-base": transformer_base,
}


def _normalised_convolution(kernel: int, channels: int, filters: int) -> list[Shape]:
    return [(kernel, kernel, channels, filters), (filters,), (filters,)]


def _dense(inputs: int, outputs: int) -> list[Shape]:
    return [(inputs, outputs), (outputs,)]
