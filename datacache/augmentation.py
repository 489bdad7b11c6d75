"""Crops of stored images, the inputs of a network: a random box for training, the centre for evaluation.

The box is resized, mirrored, normalised and cast in one pass: see :mod:`datacache.resampling`.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from datacache.batches import Array, BatchSpec, Collation, Pools
from datacache.order import GOLDEN, Flags, Ids, compiled, folded, key_of, mixed
from datacache.resampling import Boxes, Float32, PackedImages, resample

DTYPES = ("uint8", "float16", "float32")
LARGEST_LEVEL = 255
TRIES = 10
_AUGMENTATION = 3  # so that its keys differ from those of other uses


@dataclass(frozen=True)
class Crop(Collation):
    """A square of ``input_size`` pixels from every image, beside the labels.

    ``mean`` and ``std`` normalise a level ``v`` of 0 … 255 to ``(v − mean)/std``; they are levels, one a
    channel or one for all; ``None``: no normalisation. ``dtype`` is ``"float32"``, ``"float16"``
    (the nearest to float32, ties to even), or ``"uint8"`` (the nearest level, not normalised).
    """

    input_size: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.input_size < 1:
            raise ValueError(f"input_size: expected at least 1 pixel, got {self.input_size}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.mean is None and self.std is None:
            return
        if self.mean is None or self.std is None or len(self.mean) != len(self.std):
            raise ValueError(f"mean, std: expected equally many numbers, got {self.mean} and {self.std}")
        if not min(self.std) > 0:
            raise ValueError(f"std: expected numbers above 0, got {self.std}")
        self._check_range(self.mean, self.std)

    def _check_range(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        if self.dtype == "uint8":
            raise ValueError(f"mean, std: expected none for dtype uint8, got {mean} and {std}")
        largest = max(max(abs(m), abs(LARGEST_LEVEL - m)) / s for m, s in zip(mean, std, strict=True))
        if not largest <= float(np.finfo(self.dtype).max):
            raise ValueError(f"mean, std: expected inputs that {self.dtype} can hold, got {largest:.4g}")

    @abstractmethod
    def boxes(self, shapes: Ids, ids: Ids, epoch: int, seed: int) -> tuple[Boxes, Flags]:
        """Return for each sample its box and whether it is mirrored.

        ``shapes``: as in ``PackedImages``. A box is left, top, right and bottom, float64, in pixels from the
        image's upper left corner.
        """

    def arrays(
        self,
        samples: Sequence[npt.NDArray[np.uint8]],
        labels: npt.NDArray[np.int64],
        spec: BatchSpec,
        pools: Pools,
    ) -> tuple[Array, ...]:
        """Return inputs ``(samples, input_size, input_size, channels)``, and their labels."""

        def pixels(size: int) -> npt.NDArray[np.uint8]:
            # lengths are powers of two, so that buffers are reused
            return pools.take((1 << (size - 1).bit_length(),), "uint8")

        images = PackedImages.of(samples, pixels)
        side = self.input_size
        out = pools.take((len(samples), side, side, int(images.shapes[0, 2])), self.dtype)
        self.apply(images, spec.ids, spec.epoch, spec.seed, out)
        return out, labels

    def apply(self, images: PackedImages, ids: Ids, epoch: int, seed: int, out: Array) -> None:
        """Write the inputs cut from ``images`` to ``out``.

        ``ids``: of the samples, in the order of ``images``. ``out``: C-contiguous ``(samples, input_size,
        input_size, channels)`` of ``dtype``. The input of a sample depends on its image and id, ``epoch`` and
        ``seed``, not on the other samples. Runs without the GIL, in any number of threads.
        """
        self._check(images, ids, out)
        samples, _, _, channels = out.shape
        if samples == 0:
            return
        boxes, mirrored = self.boxes(images.shapes, ids, epoch, seed)
        mean, scale = self._normalisation(channels)
        # As bytes, since Numba has no float16: one compiled kernel serves all three types.
        rows = out.reshape(samples, self.input_size, -1).view(np.uint8)
        resample(images.pixels, images.starts, images.shapes, boxes, mirrored, mean, scale, rows)

    def _check(self, images: PackedImages, ids: Ids, out: Array) -> None:
        if len(ids) != len(images):
            raise ValueError(f"ids: expected {len(images)}, as many as images, got {len(ids)}")
        channels = out.shape[-1]
        expected = (len(images), self.input_size, self.input_size, channels)
        if out.shape != expected or out.dtype != self.dtype or not out.flags.c_contiguous:
            found = f"{out.dtype} {out.shape} with strides {out.strides}"
            raise ValueError(f"out: expected C-contiguous {self.dtype} {expected}, got {found}")
        if (images.shapes[:, 2] != channels).any():
            found = ", ".join(map(str, np.unique(images.shapes[:, 2])))
            raise ValueError(f"images: expected {channels} channels, as out has, got {found}")

    def _normalisation(self, channels: int) -> tuple[Float32, Float32]:
        """Return the mean and the factor for each number of a row of inputs."""
        mean, std = np.array(self.mean or (0.0,)), np.array(self.std or (1.0,))
        if len(mean) not in (1, channels):
            raise ValueError(
                f"mean, std: expected 1 or {channels} numbers, as out's channels, got {len(mean)}"
            )
        pixel = np.ones((self.input_size, channels), np.float32)
        return (pixel * mean).ravel().astype(np.float32), (pixel / std).ravel().astype(np.float32)


@dataclass(frozen=True)
class Augmentation(Crop):
    """For training: a random box of the image, resized to the input; half of them mirrored.

    A box's share of the image's area is uniform within ``area``; its aspect, width over height, is uniform in
    its logarithm within ``aspect``; its position is uniform. A box that does not fit into the image is drawn
    again; after ten tries, the largest box of an allowed aspect is taken from the centre. ``mirror``:
    exchange left and right with probability 1/2. All draws depend only on ``(seed, epoch, id)``.

    >>> augmentation = Augmentation(4, area=(0.5, 1.0), dtype="uint8")
    >>> images = PackedImages.of([np.full((5, 6, 1), 7, np.uint8)])
    >>> out = np.empty((1, 4, 4, 1), np.uint8)
    >>> augmentation.apply(images, np.array([11]), epoch=0, seed=1, out=out)
    >>> out.min().item(), out.max().item()
    (7, 7)
    """

    area: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    mirror: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise ValueError(
                f"area: expected lowest and highest share, above 0 and at most 1, got {self.area}"
            )
        if not 0 < self.aspect[0] <= self.aspect[1] < math.inf:
            raise ValueError(f"aspect: expected lowest and highest ratio, above 0, got {self.aspect}")

    def boxes(self, shapes: Ids, ids: Ids, epoch: int, seed: int) -> tuple[Boxes, Flags]:
        boxes, mirrored = np.empty((len(ids), 4)), np.empty(len(ids), np.bool_)
        _draw_boxes(shapes, ids, key_of(_AUGMENTATION, seed, epoch), self.area, self.aspect, boxes, mirrored)
        return boxes, mirrored & self.mirror


@dataclass(frozen=True)
class CentreCrop(Crop):
    """For evaluation: the square in the centre whose side is ``ratio`` of the image's shorter side.

    The same as resizing the shorter side to ``input_size / ratio`` and then cropping the centre. Does not
    depend on id, epoch or seed.

    >>> CentreCrop(4, ratio=0.5).boxes(np.array([[10, 20, 3]]), np.array([0]), epoch=0, seed=0)[0].tolist()
    [[7.5, 2.5, 12.5, 7.5]]
    """

    ratio: float = 0.875

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            raise ValueError(
                f"ratio: expected a share of the shorter side, above 0 and at most 1, got {self.ratio}"
            )

    def boxes(self, shapes: Ids, ids: Ids, epoch: int, seed: int) -> tuple[Boxes, Flags]:
        sides = shapes[:, [1, 0]]
        margins = (sides - self.ratio * sides.min(axis=1, keepdims=True)) / 2
        return np.hstack([margins, sides - margins]), np.zeros(len(ids), np.bool_)


# ------------------------------------------------------------------------------- random boxes


@compiled
def _draw_boxes(
    shapes: Ids,
    ids: Ids,
    key: np.uint64,
    area: tuple[float, float],
    aspect: tuple[float, float],
    boxes: Boxes,
    mirrored: Flags,
) -> None:
    for i in range(len(ids)):
        key_of_sample = folded(key, np.uint64(ids[i]))
        height, width = shapes[i, 0], shapes[i, 1]
        box_width, box_height, fits = _drawn_size(width, height, key_of_sample, area, aspect)
        left = (width - box_width) * (_uniform(key_of_sample, 0) if fits else 0.5)
        top = (height - box_height) * (_uniform(key_of_sample, 1) if fits else 0.5)
        mirrored[i] = _uniform(key_of_sample, 2) < 0.5
        boxes[i, 0], boxes[i, 2] = left, min(left + box_width, width)
        boxes[i, 1], boxes[i, 3] = top, min(top + box_height, height)


@compiled
def _drawn_size(
    width: int, height: int, key: np.uint64, area: tuple[float, float], aspect: tuple[float, float]
) -> tuple[float, float, bool]:
    """Return a box's width and height in pixels, and whether a random one fitted the image."""
    lowest, highest = math.log(aspect[0]), math.log(aspect[1])
    for attempt in range(TRIES):
        pixels = width * height * (area[0] + (area[1] - area[0]) * _uniform(key, 3 + 2 * attempt))
        ratio = math.exp(lowest + (highest - lowest) * _uniform(key, 4 + 2 * attempt))
        if pixels * ratio <= width * width and pixels <= height * height * ratio:
            return math.sqrt(pixels * ratio), math.sqrt(pixels / ratio), True
    return min(float(width), height * aspect[1]), min(float(height), width / aspect[0]), False


@compiled
def _uniform(key: np.uint64, draw: int) -> float:
    """Return the ``draw``-th number of a key, uniform in [0, 1), a multiple of 2^-53."""
    return float(mixed(key + np.uint64(draw) * GOLDEN) >> np.uint64(11)) * 2.0**-53
