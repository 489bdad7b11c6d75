"""The shapes of all weights of networks that the papers measure, in the order of their layers.

They are made from the layers of the networks; the networks themselves are not built.
"""

from collections.abc import Callable
from itertools import pairwise
from math import prod

Shape = tuple[int, ...]

IMAGENET_CLASSES = 1000


def resnet50() -> list[Shape]:
    """Return the 161 tensors of ResNet-50 (He et al. 2016): kernels, scales and shifts, a dense layer.

    >>> len(resnet50()), entries(resnet50())
    (161, 25557032)
    """
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
    """Return the 38 tensors of VGG-19 (Simonyan and Zisserman 2015); the largest has 72 % of all entries.

    >>> len(vgg19()), entries(vgg19()), max(map(entries_of, vgg19()))
    (38, 143667240, 102760448)
    """
    channels = [3, 64, 64, 128, 128, *[256] * 4, *[512] * 8]
    shapes = [shape for ends in pairwise(channels) for shape in ((3, 3, *ends), ends[1:])]
    widths = [7 * 7 * 512, 4096, 4096, IMAGENET_CLASSES]
    return [*shapes, *(shape for ends in pairwise(widths) for shape in _dense(*ends))]


def transformer_base(vocabulary: int = 37_000) -> list[Shape]:
    """Return the tensors of the base Transformer (Vaswani et al. 2017), one embedding shared by all its uses.

    Attention without biases, layers normalised with scale and shift.

    >>> len(transformer_base()), entries(transformer_base())
    (181, 63045632)
    """
    width, inner, layers = 512, 2048, 6
    norm = [(width,), (width,)]
    attention = [(width, width)] * 4 + norm
    feed_forward = [*_dense(width, inner), *_dense(inner, width), *norm]
    encoder, decoder = attention + feed_forward, attention * 2 + feed_forward
    return [(vocabulary, width), *encoder * layers, *decoder * layers]


SHAPES: dict[str, Callable[[], list[Shape]]] = {
    "resnet50": resnet50,
    "vgg19": vgg19,
    "transformer-base": transformer_base,
}


def entries(shapes: list[Shape]) -> int:
    """Return how many entries tensors of these shapes have together."""
    return sum(map(entries_of, shapes))


def entries_of(shape: Shape) -> int:
    """Return how many entries a tensor of this shape has."""
    return prod(shape)


def _normalised_convolution(kernel: int, channels: int, filters: int) -> list[Shape]:
    return [(kernel, kernel, channels, filters), (filters,), (filters,)]


def _dense(inputs: int, outputs: int) -> list[Shape]:
    return [(inputs, outputs), (outputs,)]
