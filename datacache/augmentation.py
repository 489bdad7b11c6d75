"""From stored images to a batch of the network's inputs: crop, resize, mirror, normalise, cast in one pass.

A crop is a box with real coordinates, resized by a triangle filter: an input's pixel is the weighted mean of
the image's pixels around it, with weights that fall linearly to zero at the distance of one pixel, of the
image's or the input's, whichever is larger. So enlarging interpolates bilinearly, and shrinking does not
alias. At a box's edge the filter reaches for the image's pixels beyond it, at the image's edge for none.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from datacache.compiled import compiled
from datacache.order import GOLDEN, Flags, Ids, folded, key_of, mixed

Bytes = npt.NDArray[np.uint8]
Boxes = npt.NDArray[np.float64]
Float32 = npt.NDArray[np.float32]

DTYPES = ("uint8", "float16", "float32")
LARGEST_LEVEL = 255
TRIES = 10
_AUGMENTATION = 3  # its keys are none of an order's


@dataclass(frozen=True)
class PackedImages:
    """Images of any sizes in one buffer, which a kernel takes as it is.

    ``pixels``: uint8. ``starts``: int64, where in it each image starts. ``shapes``: int64 ``(samples, 3)``,
    the height, width and channels of each.
    """

    pixels: Bytes
    starts: Ids
    shapes: Ids

    def __post_init__(self) -> None:
        if self.shapes.shape != (len(self.starts), 3):
            raise ValueError(f"shapes: expected {(len(self.starts), 3)} numbers, got {self.shapes.shape}")
        if (self.shapes < 1).any():
            worst = self.shapes[(self.shapes < 1).any(axis=1)][0]
            raise ValueError(f"shapes: expected height, width and channels of at least 1, got {worst}")
        # The kernel reads what is said here without looking at bounds.
        stops = self.starts + self.shapes.prod(axis=1)
        if (self.starts < 0).any() or (stops > len(self.pixels)).any():
            span = f"{self.starts.min()} to {stops.max()}"
            raise ValueError(f"starts: expected images within {len(self.pixels)} bytes, got {span}")

    @classmethod
    def of(
        cls, images: Sequence[Bytes], take: Callable[[int], Bytes] = lambda size: np.empty(size, np.uint8)
    ) -> "PackedImages":
        """Copy images, each uint8 of shape ``(height, width, channels)``.

        ``take(size)``: gives the buffer, of so many bytes or more.
        """
        for image in images:
            if image.dtype != np.uint8 or image.ndim != 3:
                found = f"{image.dtype} {image.shape}"
                raise ValueError(f"images: expected uint8 (height, width, channels), got {found}")
        stops = np.cumsum([0, *(image.size for image in images)], dtype=np.int64)
        pixels = take(int(stops[-1]))
        if images:
            np.concatenate([image.reshape(-1) for image in images], out=pixels[: stops[-1]])
        shapes = np.array([image.shape for image in images], np.int64).reshape(-1, 3)
        return cls(pixels, stops[:-1], shapes)

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True)
class Crop(ABC):
    """A square of ``input_size`` pixels from every image.

    ``mean`` and ``std`` normalise a level ``v`` of 0 … 255 to ``(v − mean)/std``: levels as well, one a
    channel or one for all; ``None`` leaves levels as they are. ``dtype`` is ``"float32"``, ``"float16"``
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

        ``shapes``: as in ``PackedImages``. A box is its left, top, right and bottom, float64, in pixels
        from the image's upper left corner.
        """

    def apply(self, images: PackedImages, ids: Ids, epoch: int, seed: int, out: npt.NDArray[Any]) -> None:
        """Write the inputs cut from ``images`` to ``out``.

        ``ids``: of the samples, in the order of ``images``. ``out``: C-contiguous ``(samples, input_size,
        input_size, channels)`` of ``dtype``. What is written for a sample depends on its image and id,
        ``epoch`` and ``seed``, not on the samples around it. Runs without the GIL, in any number of threads.
        """
        self._check(images, ids, out)
        samples, _, _, channels = out.shape
        if samples == 0:
            return
        boxes, mirrored = self.boxes(images.shapes, ids, epoch, seed)
        mean, scale = self._normalisation(channels)
        # Bytes: Numba knows no float16, and one compiled kernel serves all three types.
        rows = out.reshape(samples, self.input_size, -1).view(np.uint8)
        _resample(images.pixels, images.starts, images.shapes, boxes, mirrored, mean, scale, rows)

    def _check(self, images: PackedImages, ids: Ids, out: npt.NDArray[Any]) -> None:
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
        """Return what to subtract from, then to multiply with, each number of a row of inputs."""
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
    its logarithm within ``aspect``; its place is uniform. What does not fit into the image is drawn again;
    after ten tries, the largest box of an allowed aspect is taken from the centre. ``mirror``: exchange left
    and right with probability 1/2. All is drawn from ``(seed, epoch, id)`` alone.

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
        """See :meth:`Crop.boxes`."""
        boxes, mirrored = np.empty((len(ids), 4)), np.empty(len(ids), np.bool_)
        _draw_boxes(shapes, ids, key_of(_AUGMENTATION, seed, epoch), self.area, self.aspect, boxes, mirrored)
        return boxes, mirrored & self.mirror


@dataclass(frozen=True)
class CentreCrop(Crop):
    """For evaluation: the square in the centre whose side is ``ratio`` of the image's shorter side.

    The same as resizing the shorter side to ``input_size / ratio`` and then cutting out the centre. Looks at
    neither id, epoch nor seed.

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
        """See :meth:`Crop.boxes`."""
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
    """Return a box's width and height in pixels, and whether one that was drawn fitted."""
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


# --------------------------------------------------------------------------------- resampling


@compiled
def _resample(
    pixels: Bytes,
    starts: Ids,
    shapes: Ids,
    boxes: Boxes,
    mirrored: Flags,
    mean: Float32,
    scale: Float32,
    out: npt.NDArray[np.uint8],
) -> None:
    for i in range(len(starts)):
        height, width, channels = shapes[i]
        image = pixels[starts[i] : starts[i] + height * width * channels].reshape(height, width * channels)
        left, top, right, bottom = boxes[i]
        columns, column_weights = _filter(width, left, right, out.shape[1])
        rows, row_weights = _filter(height, top, bottom, out.shape[1])
        if mirrored[i]:
            columns, column_weights = columns[::-1].copy(), column_weights[::-1].copy()
        first = columns.min() * channels
        last = (columns.max() + column_weights.shape[1]) * channels
        blended = np.empty(last - first, np.float32)
        places = columns * channels - first
        row = np.empty(len(mean), np.float32)
        for y in range(len(rows)):
            _blend_rows(image[rows[y] : rows[y] + row_weights.shape[1], first:last], row_weights[y], blended)
            if channels == 3:
                _blend_columns_of_three(blended, places, column_weights, row)
            else:
                _blend_columns(blended, places, column_weights, channels, row)
            _normalise(row, mean, scale)
            _store(row, out[i, y])


@compiled
def _filter(length: int, low: float, high: float, size: int) -> tuple[Ids, Float32]:
    """Return which of ``length`` pixels each of ``size`` from ``low`` to ``high`` is blended of.

    For each, its first pixel and the weights of that and the next ones.
    """
    step = (high - low) / size
    reach = max(step, 1.0)
    taps = min(length, int(math.ceil(2 * reach)))
    firsts, weights = np.empty(size, np.int64), np.empty((size, taps), np.float32)
    for i in range(size):
        centre = low + (i + 0.5) * step
        # The first pixel whose centre is nearer than the reach; earlier where the image ends before the taps.
        firsts[i] = min(max(int(math.floor(centre - reach + 0.5)), 0), length - taps)
        total = 0.0
        for tap in range(taps):
            total += max(1 - abs(firsts[i] + tap + 0.5 - centre) / reach, 0.0)
        for tap in range(taps):
            weights[i, tap] = max(1 - abs(firsts[i] + tap + 0.5 - centre) / reach, 0.0) / total
    return firsts, weights


@compiled
def _blend_rows(rows: Bytes, weights: Float32, blended: Float32) -> None:
    blended[:] = 0
    for tap in range(len(weights)):
        row, weight = rows[tap], weights[tap]
        for i in range(len(blended)):
            blended[i] += weight * np.float32(row[i])


@compiled
def _blend_columns(blended: Float32, firsts: Ids, weights: Float32, channels: int, row: Float32) -> None:
    # Places are unsigned: of a signed one, every access would first ask whether it counts from the end.
    for channel in range(channels):
        for x in range(len(firsts)):
            place, total = np.uint64(firsts[x] + channel), np.float32(0)
            for tap in range(weights.shape[1]):
                total += weights[x, tap] * blended[place]
                place += np.uint64(channels)
            row[x * channels + channel] = total


@compiled
def _blend_columns_of_three(blended: Float32, firsts: Ids, weights: Float32, row: Float32) -> None:
    """Do the same for three channels at once, in half the time."""
    for x in range(len(firsts)):
        place = np.uint64(firsts[x])
        red = green = blue = np.float32(0)
        for tap in range(weights.shape[1]):
            weight = weights[x, tap]
            red += weight * blended[place]
            green += weight * blended[place + np.uint64(1)]
            blue += weight * blended[place + np.uint64(2)]
            place += np.uint64(3)
        row[3 * x], row[3 * x + 1], row[3 * x + 2] = red, green, blue


@compiled
def _normalise(row: Float32, mean: Float32, scale: Float32) -> None:
    for i in range(len(row)):
        row[i] = (row[i] - mean[i]) * scale[i]


@compiled
def _store(row: Float32, out: Bytes) -> None:
    """Write a row as float32, float16 or uint8, whichever ``out`` has the bytes for."""
    if len(out) == 4 * len(row):
        _store_floats(row, out.view(np.float32))
    elif len(out) == 2 * len(row):
        _store_halves(row, out.view(np.uint16))
    else:
        _store_levels(row, out)


@compiled
def _store_floats(row: Float32, floats: Float32) -> None:
    for i in range(len(row)):  # what row[:] = … does would ask whether the two overlap
        floats[i] = row[i]


@compiled
def _store_levels(row: Float32, levels: Bytes) -> None:
    for i in range(len(row)):
        levels[i] = np.uint8(row[i] + np.float32(0.5))


@compiled
def _store_halves(row: Float32, halves: npt.NDArray[np.uint16]) -> None:
    """Write float32 of a magnitude that float16 can hold as the bits of float16, rounded to nearest even."""
    bits = row.view(np.uint32)
    # A half below its smallest normal number has steps of 2^-24. So has a float32 from a half to one: adding
    # a half rounds to such steps, and leaves their count in the low bits.
    steps = (np.abs(row) + np.float32(0.5)).view(np.uint32)
    for i in range(len(row)):
        magnitude = bits[i] & 0x7FFF_FFFF
        odd = (magnitude >> 13) & 1
        normal = (magnitude - 0x3800_0000 + 0xFFF + odd) >> 13  # exponents are 112 apart, mantissas 13 bits
        tiny = steps[i] - 0x3F00_0000
        halves[i] = (tiny if magnitude < 0x3880_0000 else normal) | ((bits[i] >> 16) & 0x8000)
