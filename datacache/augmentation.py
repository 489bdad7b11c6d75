"""Crops of stored images, the inputs of a network: a random box for training, the centre for evaluation.

The box, which has real coordinates, is resized, mirrored, normalised and cast in one pass. Its filter is a
triangle: a pixel of the input is the weighted mean of the image's pixels around it, with weights that fall
linearly to zero at the distance of one pixel of the image or of the input, whichever is larger. So enlarging
interpolates bilinearly, and shrinking does not alias. At a box's edge the filter uses the image's pixels
beyond it; there are none beyond the image's edge.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from datacache.batches import Arrays, BatchSpec, Collation, Pools
from datacache.order import GOLDEN, Flags, Ids, compiled, folded, key_of, mixed

Bytes = npt.NDArray[np.uint8]
Boxes = npt.NDArray[np.float64]
Float32 = npt.NDArray[np.float32]
Interval = tuple[float, float]
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
        if self.dtype == "uint8":
            raise ValueError(f"mean, std: expected none for dtype uint8, got {self.mean} and {self.std}")
        pairs = zip(self.mean, self.std, strict=True)
        largest = max(max(abs(mean), abs(LARGEST_LEVEL - mean)) / std for mean, std in pairs)
        if not largest <= float(np.finfo(self.dtype).max):
            raise ValueError(f"mean, std: expected inputs that {self.dtype} can hold, got {largest:.4g}")

    @abstractmethod
    def boxes(self, shapes: Ids, ids: Ids, epoch: int, seed: int) -> tuple[Boxes, Flags]:
        """Return for each sample its box and whether it is mirrored.

        ``shapes``: int64 ``(samples, 3)``, the height, width and channels of each. A box is left, top, right
        and bottom, float64, in pixels from the image's upper left corner.
        """

    def arrays(self, samples: Sequence[Bytes], labels: Ids, spec: BatchSpec, pools: Pools) -> Arrays:
        """Return inputs ``(samples, input_size, input_size, channels)``, and their labels.

        The input of a sample depends on its image and id, the epoch and the seed, not on the other samples.
        Runs without the GIL, in any number of threads.
        """
        for image in samples:
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != samples[0].shape[2]:
                expected = "uint8 (height, width, channels), of equally many channels"
                raise ValueError(f"images: expected {expected}, got {image.dtype} {image.shape}")
        shapes = np.array([image.shape for image in samples], np.int64)
        pixels, starts = _in_one_array(samples, pools)
        side, channels = self.input_size, int(shapes[0, 2])
        out = pools.take((len(samples), side, side, channels), self.dtype)
        boxes, mirrored = self.boxes(shapes, spec.ids, spec.epoch, spec.seed)
        mean, scale = self._normalisation(channels)
        # As bytes, since Numba has no float16: one compiled kernel serves all three types.
        rows = out.reshape(len(samples), side, -1).view(np.uint8)
        _resample(pixels, starts, shapes, boxes, mirrored, mean, scale, rows)
        return out, labels

    def _normalisation(self, channels: int) -> tuple[Float32, Float32]:
        """Return the mean and the factor for each number of a row of inputs."""
        mean, std = np.array(self.mean or (0.0,)), np.array(self.std or (1.0,))
        if len(mean) not in (1, channels):
            raise ValueError(f"mean, std: expected 1 or {channels} numbers, one a channel, got {len(mean)}")
        pixel = np.ones((self.input_size, channels), np.float32)
        return (pixel * mean).ravel().astype(np.float32), (pixel / std).ravel().astype(np.float32)


def _in_one_array(images: Sequence[Bytes], pools: Pools) -> tuple[Bytes, Ids]:
    """Return the bytes of all images in one flat array, and where each starts.

    They are copied unless they are views of one array already, as those of a batch from a level are.
    """
    base = images[0].base
    if (
        isinstance(base, np.ndarray)
        and base.dtype == np.uint8
        and base.flags.c_contiguous
        and base.flags.writeable  # of another type the kernel would be compiled once more
        and all(image.base is base and image.flags.c_contiguous for image in images)
    ):
        places = np.array([image.__array_interface__["data"][0] for image in images])
        return base.reshape(-1), places - base.__array_interface__["data"][0]
    stops = np.cumsum([image.size for image in images])
    pixels = pools.take_bytes(int(stops[-1]))
    np.concatenate([image.reshape(-1) for image in images], out=pixels)
    return pixels, np.array([0, *stops[:-1]])


@dataclass(frozen=True)
class Augmentation(Crop):
    """For training: a random box of each image, resized to the input and mirrored with probability 1/2.

    A box's share of the image's area is uniform within ``area``; its aspect, width over height, is uniform in
    its logarithm within ``aspect``; its position is uniform. A box that does not fit into the image is drawn
    again; after ten tries, the largest box of an allowed aspect is taken from the centre. ``mirror``:
    exchange left and right with probability 1/2. All draws depend only on ``(seed, epoch, id)``.

    >>> boxes, mirrored = Augmentation(4, area=(1.0, 1.0), aspect=(1.0, 1.0)).boxes(
    ...     np.array([[5, 6, 1]]), ids=np.array([11]), epoch=0, seed=1
    ... )
    >>> boxes.tolist(), mirrored.tolist()
    ([[0.5, 0.0, 5.5, 5.0]], [False])
    """

    area: Interval = (0.08, 1.0)
    aspect: Interval = (3 / 4, 4 / 3)
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
    shapes: Ids, ids: Ids, key: np.uint64, area: Interval, aspect: Interval, boxes: Boxes, mirrored: Flags
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
    width: int, height: int, key: np.uint64, area: Interval, aspect: Interval
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


# ----------------------------------------------------------------------------------- resampling


@compiled
def _resample(
    pixels: Bytes,
    starts: Ids,
    shapes: Ids,
    boxes: Boxes,
    mirrored: Flags,
    mean: Float32,
    scale: Float32,
    out: Bytes,
) -> None:
    """Write the rows of each image's input to ``out``; no bounds are checked.

    ``starts``: of each image in ``pixels``. ``mean``, ``scale``: for each number of a row. ``out``:
    ``(samples, rows, bytes)``; the bytes of a row imply float32, float16 or uint8.
    """
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
        offsets = columns * channels - first
        row = np.empty(len(mean), np.float32)
        for y in range(len(rows)):
            _blend_rows(image[rows[y] : rows[y] + row_weights.shape[1], first:last], row_weights[y], blended)
            if channels == 3:
                _blend_columns_of_three(blended, offsets, column_weights, row)
            else:
                _blend_columns(blended, offsets, column_weights, channels, row)
            _normalise(row, mean, scale)
            _store(row, out[i, y])


@compiled
def _filter(length: int, low: float, high: float, size: int) -> tuple[Ids, Float32]:
    """Return the filter that resamples pixels ``low … high``, of ``length``, to ``size`` pixels.

    For each output pixel: its first input pixel, and the weights of that pixel and the ones after it.
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
    # Indices are unsigned: every access by a signed one would first test whether it is negative.
    for channel in range(channels):
        for x in range(len(firsts)):
            index, total = np.uint64(firsts[x] + channel), np.float32(0)
            for tap in range(weights.shape[1]):
                total += weights[x, tap] * blended[index]
                index += np.uint64(channels)
            row[x * channels + channel] = total


@compiled
def _blend_columns_of_three(blended: Float32, firsts: Ids, weights: Float32, row: Float32) -> None:
    """Do the same as ``_blend_columns`` for three channels at once, in half the time."""
    for x in range(len(firsts)):
        index = np.uint64(firsts[x])
        red = green = blue = np.float32(0)
        for tap in range(weights.shape[1]):
            weight = weights[x, tap]
            red += weight * blended[index]
            green += weight * blended[index + np.uint64(1)]
            blue += weight * blended[index + np.uint64(2)]
            index += np.uint64(3)
        row[3 * x], row[3 * x + 1], row[3 * x + 2] = red, green, blue


@compiled
def _normalise(row: Float32, mean: Float32, scale: Float32) -> None:
    for i in range(len(row)):
        row[i] = (row[i] - mean[i]) * scale[i]


@compiled
def _store(row: Float32, out: Bytes) -> None:
    """Write a row as float32, float16 or uint8, whichever ``out`` has the bytes for."""
    if len(out) == 4 * len(row):
        floats = out.view(np.float32)
        for i in range(len(row)):  # floats[:] = row would first test whether the two overlap
            floats[i] = row[i]
    elif len(out) == 2 * len(row):
        _store_halves(row, out.view(np.uint16))
    else:
        for i in range(len(row)):
            out[i] = np.uint8(row[i] + np.float32(0.5))


@compiled
def _store_halves(row: Float32, halves: npt.NDArray[np.uint16]) -> None:
    """Write float32 of a magnitude that float16 can hold as the bits of float16, rounded to nearest even."""
    bits = row.view(np.uint32)
    # A float16 below its smallest normal number has steps of 2^-24. So has a float32 from 0.5 to 1: adding
    # 0.5 rounds to such steps, and leaves their count in the low bits.
    steps = (np.abs(row) + np.float32(0.5)).view(np.uint32)
    for i in range(len(row)):
        magnitude = bits[i] & 0x7FFF_FFFF
        odd = (magnitude >> 13) & 1
        normal = (magnitude - 0x3800_0000 + 0xFFF + odd) >> 13  # exponents are 112 apart, mantissas 13 bits
        tiny = steps[i] - 0x3F00_0000
        halves[i] = (tiny if magnitude < 0x3880_0000 else normal) | ((bits[i] >> 16) & 0x8000)
