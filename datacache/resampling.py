"""Boxes of stored images, resized, mirrored, normalised and cast in one pass.

A crop is a box with real coordinates, resized by a triangle filter: a pixel of the input is the weighted mean
of the image's pixels around it, with weights that fall linearly to zero at the distance of one pixel of the
image or of the input, whichever is larger. So enlarging interpolates bilinearly, and shrinking does not
alias. At a box's edge the filter uses the image's pixels beyond it; there are none beyond the image's edge.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from datacache.order import Flags, Ids, compiled

Bytes = npt.NDArray[np.uint8]
Boxes = npt.NDArray[np.float64]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PackedImages:
    """Images of any sizes in one buffer, the input of a kernel.

    ``pixels``: uint8. ``starts``: int64, the start of each image in ``pixels``. ``shapes``: int64
    ``(samples, 3)``, the height, width and channels of each.
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
        # The kernel does not check bounds.
        stops = self.starts + self.shapes.prod(axis=1)
        if (self.starts < 0).any() or (stops > len(self.pixels)).any():
            span = f"{self.starts.min()} to {stops.max()}"
            raise ValueError(f"starts: expected images within {len(self.pixels)} bytes, got {span}")

    @classmethod
    def of(
        cls, images: Sequence[Bytes], take: Callable[[int], Bytes] = lambda size: np.empty(size, np.uint8)
    ) -> "PackedImages":
        """Copy images, each uint8 of shape ``(height, width, channels)``.

        ``take(size)`` returns the buffer, of at least so many bytes.
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


@compiled
def resample(
    pixels: Bytes,
    starts: Ids,
    shapes: Ids,
    boxes: Boxes,
    mirrored: Flags,
    mean: Float32,
    scale: Float32,
    out: npt.NDArray[np.uint8],
) -> None:
    """Write the rows of each image's input to ``out``.

    ``pixels``, ``starts``, ``shapes``: as in :class:`PackedImages`. ``boxes``: float64 ``(samples, 4)``, the
    left, top, right and bottom of each in pixels. ``mean``, ``scale``: float32, for each number of a row.
    ``out``: uint8 ``(samples, rows, bytes)``; the bytes of a row imply float32, float16 or uint8.
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
    """Return the pixels, of ``length``, and weights of each of ``size`` pixels between ``low`` and ``high``.

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
        _store_floats(row, out.view(np.float32))
    elif len(out) == 2 * len(row):
        _store_halves(row, out.view(np.uint16))
    else:
        _store_levels(row, out)


@compiled
def _store_floats(row: Float32, floats: Float32) -> None:
    for i in range(len(row)):  # floats[:] = row would first test whether the two overlap
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
