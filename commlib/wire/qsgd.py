"""Values in 8, 4 or 2 bits: QSGD's buckets and levels (SparCML, section 6), rounded to the nearest.

QSGD rounds at random, so that the mean is unbiased without error feedback. Here the rounding error stays in
the residual, and error feedback needs each step's error small rather than zero on average: rounding to the
nearest level has the smallest error, and ranks that encode equal sums get equal bytes.

``|x − Q(x)| ≤ |x|``: with ``s`` between levels, ``|x| < s/2`` goes to 0, and the others to at most ``2·|x|``.
The largest of ``B`` values is exact, so that ``‖x − Q(x)‖² ≤ (1 − 1/B)·‖x‖²``: a contraction.
"""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from commlib.arrays import compiled
from commlib.vectors import Float32
from commlib.wire.base import Message, ValueCodec

BUCKET = 512
SCALE_BYTES = 4

Levels = npt.NDArray[np.signedinteger[Any]]


class Qsgd(ValueCodec):
    """For every 512 values a float32 scale, their largest magnitude; then a signed level of each value.

    Levels are ``−L … L`` with ``L = 2^(bits − 1) − 1``. A value comes back as ``level·(scale/L)``, the
    largest of a bucket exactly as it was; all of one that holds a NaN or an infinity come back as NaN.
    """

    lossless = False
    bits: ClassVar[int]

    def message_bytes(self, entries: int) -> int:
        return SCALE_BYTES * buckets_of(entries) + (entries * self.bits + 7) // 8

    def encode(self, values: Float32) -> Message:
        scales, levels = self.scales(values), np.empty(len(values), np.int8)
        self.quantize(values, scales, levels)
        return np.concatenate([scales.view(np.uint8), _pack(levels, self.bits)])

    def decode(self, message: Message, entries: int) -> Float32:
        levels_from = SCALE_BYTES * buckets_of(entries)
        scales = message[:levels_from].copy().view(np.float32)
        levels = _unpack(message[levels_from:], self.bits, entries)
        values = np.empty(entries, np.float32)
        self.restore(levels, scales, values)
        return values

    def scales(self, values: Float32) -> Float32:
        """Return the largest magnitude of each bucket; NaN where it holds one."""
        firsts = np.arange(0, len(values), BUCKET)
        ends = (np.abs(extreme.reduceat(values, firsts)) for extreme in (np.maximum, np.minimum))
        return np.maximum(*ends)  # no second long array, as of all magnitudes

    def quantize(self, values: Float32, scales: Float32, levels: Levels) -> None:
        """Write the level of each value, none of which is larger than its bucket's scale."""
        _quantize(values, scales, self._largest_level(), levels)

    def restore(self, levels: Levels, scales: Float32, values: Float32, ranks: int = 1) -> None:
        """Write to ``values`` the mean of those of ``ranks`` ranks, whose levels are added up."""
        _restore(levels, scales, ranks * self._largest_level(), values)

    def _largest_level(self) -> int:
        return (1 << (self.bits - 1)) - 1


class Qsgd8(Qsgd):
    """Levels −127 … 127."""

    bits = 8


class Qsgd4(Qsgd):
    """Levels −7 … 7."""

    bits = 4


class Qsgd2(Qsgd):
    """Levels −1, 0 and 1: the sign of values above half the largest of their bucket."""

    bits = 2


def buckets_of(entries: int) -> int:
    """Return how many buckets so many entries make."""
    return (entries + BUCKET - 1) // BUCKET


@compiled
def _quantize(values: Float32, scales: Float32, largest_level: int, levels: Levels) -> None:
    for bucket in range(len(scales)):
        start, stop = bucket * BUCKET, min(len(values), (bucket + 1) * BUCKET)
        # In float64 neither the smallest nor the largest float32 is out of range, and the step is exact
        # enough for level L to round back to the scale itself.
        scale = np.float64(scales[bucket])
        if not 0 < scale < np.inf:
            levels[start:stop] = 0
            continue
        levels_per_unit = largest_level / scale
        for i in range(start, stop):
            levels[i] = np.int8(np.rint(values[i] * levels_per_unit))


@compiled
def _restore(levels: Levels, scales: Float32, largest_level: int, values: Float32) -> None:
    for bucket in range(len(scales)):
        step = np.float64(scales[bucket]) / largest_level
        for i in range(bucket * BUCKET, min(len(values), (bucket + 1) * BUCKET)):
            values[i] = levels[i] * step


def _pack(levels: Levels, bits: int) -> Message:
    """Return the low ``bits`` of each level, the first level in the lowest bits of the first byte."""
    per_byte = 8 // bits
    codes = levels.view(np.uint8) & ((1 << bits) - 1)
    packed = np.zeros((len(levels) + per_byte - 1) // per_byte, np.uint8)
    for position in range(per_byte):
        own = codes[position::per_byte]
        packed[: len(own)] |= np.left_shift(own, position * bits)
    return packed


def _unpack(packed: Message, bits: int, entries: int) -> Levels:
    """Return the first ``entries`` levels of a packed message."""
    per_byte = 8 // bits
    codes = np.empty(len(packed) * per_byte, np.uint8)
    for position in range(per_byte):
        codes[position::per_byte] = packed >> (position * bits)
    sign = 1 << (bits - 1)
    codes &= (1 << bits) - 1
    return ((codes[:entries] ^ sign) - sign).view(np.int8)
