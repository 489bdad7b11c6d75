"""Selected values in 4, 3, 2 or 1 bit: a sign, and a class of magnitudes whose level is its mean.

QSGD's levels lie evenly between 0 and the largest magnitude; those of top-k entries lie between a threshold
and the largest, most of them near the threshold. Here the classes of every 1,024 values begin at equal steps
of the logarithm, and Lloyd's algorithm (Least Squares Quantization in PCM, 1982) moves their borders. The
largest five of the 1,024, which in heavy tails have much of the sum of squares, are sent as they are.

A contraction, which error feedback needs: of a class of ``n`` magnitudes of mean ``μ`` with the level ``c``
there is left ``Σ(|x| − c)² = Σx² − n·μ² + n·(μ − c)²``, and ``c`` differs from ``μ`` by rounding alone. So no
class is left with more than it had, but for rounding; nothing is left of the largest value, whose square is
at least a 1,024th of its bucket's. So ``‖x − Q(x)‖² ≤ (1 − 1/2048)·‖x‖²``, half of it for rounding.
"""

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from commlib.arrays import compiled
from commlib.entries import MAGNITUDE, Words
from commlib.vectors import Float32
from commlib.wire.base import Message, ValueCodec

BUCKET = 1024  # entries
EXACT = 5  # of a bucket, sent as they are
BLOCK = 64  # entries whose largest is known while the exact ones are searched
ONE = 1 << 20  # the largest of the classed magnitudes as an integer: 1,024 of them add up within 32 bits
RANGE = 6 << 23  # the classes begin at most so many octaves below it, in bits of a float32

Levels = npt.NDArray[np.float32]  # of shape (buckets, classes)
Integers = npt.NDArray[np.int32]
Positions = npt.NDArray[np.uint16]
Codes = npt.NDArray[np.uint8]


class Lloyd(ValueCodec):
    """For every 1,024 values a float32 level of each class and the largest five; for each its sign and class.

    Integers are added up in place of floats, so equal values give equal bytes on any processor. With two or
    more classes, a 0 comes back as 0. All values of a bucket with a NaN or an infinity come back as NaN.
    """

    lossless = False
    bits: ClassVar[int]
    rounds: ClassVar[int] = 0  # of Lloyd's algorithm: with more classes they gain less, and take longer

    def message_bytes(self, entries: int) -> int:
        levels = _buckets(entries) << (self.bits - 1)
        return 4 * levels + (4 + 2) * _exact(entries) + (entries * self.bits + 7) // 8

    def encode(self, values: Float32) -> Message:
        levels, exact, positions, codes = self._parts(len(values))
        _quantize(values, self.bits, self.rounds, levels, exact, positions, codes)
        return np.concatenate([levels.view(np.uint8), exact.view(np.uint8), positions.view(np.uint8), codes])

    def decode(self, message: Message, entries: int) -> Float32:
        parts, start = self._parts(entries), 0
        for part in parts:
            part.view(np.uint8)[...] = message[start : start + part.nbytes]
            start += part.nbytes
        values = np.empty(entries, np.float32)
        _restore(*parts, self.bits, values)
        return values

    def _parts(self, entries: int) -> tuple[Levels, Float32, Positions, Codes]:
        """Return arrays for levels, the exact values, their positions in their buckets, and codes."""
        exact = _exact(entries)
        return (
            np.empty(_buckets(entries) << (self.bits - 1), np.float32),
            np.empty(exact, np.float32),
            np.empty(exact, np.uint16),
            np.empty((entries * self.bits + 7) // 8, np.uint8),
        )


class Lloyd4(Lloyd):
    """Eight classes."""

    bits = 4


class Lloyd3(Lloyd):
    """Four classes."""

    bits = 3
    rounds = 1


class Lloyd2(Lloyd):
    """Two classes."""

    bits = 2
    rounds = 2


class Lloyd1(Lloyd):
    """The sign and one level, the mean magnitude; a 0 is decoded as the mean, too."""

    bits = 1


def _buckets(entries: int) -> int:
    return (entries + BUCKET - 1) // BUCKET


def _exact(entries: int) -> int:
    return (entries * EXACT + BUCKET - 1) // BUCKET


@compiled
def _quantize(
    values: Float32,
    bits: int,
    rounds: int,
    levels: Float32,
    exact: Float32,
    positions: Positions,
    codes: Codes,
) -> None:
    classes = 1 << (bits - 1)
    magnitudes, maxima = np.empty(BUCKET, np.int32), np.empty(BUCKET // BLOCK, np.int32)
    borders, own_codes = np.empty(classes, np.int32), np.empty(BUCKET, np.uint8)
    for bucket in range(len(levels) // classes):
        own = values[bucket * BUCKET : (bucket + 1) * BUCKET]
        own_bits = own.view(np.int32)
        own_levels = levels[bucket * classes : (bucket + 1) * classes]
        own_positions = positions[bucket * EXACT : (bucket + 1) * EXACT]
        for i in range(len(own)):
            magnitudes[i] = own_bits[i] & MAGNITUDE
        magnitudes[len(own) :] = -1
        largest = _take_largest(magnitudes, maxima, own_positions)
        for i in range(len(own_positions)):
            exact[bucket * EXACT + i] = own[own_positions[i]]
        if not np.isfinite(exact[bucket * EXACT]):
            exact[bucket * EXACT : bucket * EXACT + len(own_positions)] = np.nan
            own_levels[:] = np.nan
            own_codes[:] = 0
        else:
            _find_levels(magnitudes, largest, rounds, own_levels, borders)
            _encode(magnitudes, own_bits, borders, own_codes)
        packed = codes[bucket * BUCKET * bits // 8 : (bucket + 1) * BUCKET * bits // 8]
        _pack(own_codes.view(np.uint64), bits, packed)


@compiled
def _take_largest(magnitudes: Integers, maxima: Integers, positions: Positions) -> np.int32:
    """Write where the largest are, the first of equals first, and put −1 there; return the largest left."""
    for block in range(len(maxima)):
        maxima[block] = _largest(magnitudes[block * BLOCK : (block + 1) * BLOCK])
    for i in range(len(positions)):
        block = int(np.argmax(maxima))
        within = magnitudes[block * BLOCK : (block + 1) * BLOCK]
        offset = 0
        while within[offset] != maxima[block]:
            offset += 1
        positions[i] = block * BLOCK + offset
        within[offset] = -1
        maxima[block] = _largest(within)
    return _largest(maxima)


@compiled
def _largest(magnitudes: Integers) -> np.int32:
    largest = np.int32(-1)
    for i in range(len(magnitudes)):
        largest = np.int32(max(largest, magnitudes[i]))
    return largest


@compiled
def _find_levels(
    magnitudes: Integers, largest: np.int32, rounds: int, levels: Float32, borders: Integers
) -> None:
    """Fill ``levels`` and the integer ``borders``, and scale ``magnitudes`` to integers; −1 is no magnitude.

    ``magnitudes``: the bits of a float32 each. Class ``j`` begins at ``borders[j]``.
    """
    if largest <= 0:
        levels[:], borders[:] = 0, 0
        return
    lowest, zeros = largest, np.int32(0)
    for i in range(len(magnitudes)):
        lowest = np.int32(min(lowest, magnitudes[i] if magnitudes[i] > 0 else largest))
        zeros = np.int32(zeros + (magnitudes[i] == 0))
    lowest = np.int32(max(lowest, largest - RANGE))
    has_zero = len(levels) > 1 and zeros > 0
    ends = np.array([largest, 0], np.int32)
    scale = ONE / np.float64(ends.view(np.float32)[0])
    floats = magnitudes.view(np.float32)
    borders[0] = 0
    for j in range(1, len(borders)):
        ends[1] = lowest + (largest - lowest) * (j - has_zero) // (len(borders) - has_zero)
        borders[j] = np.int32(np.ceil(np.float64(ends.view(np.float32)[1]) * scale))
    for i in range(len(magnitudes)):
        magnitudes[i] = np.int32(floats[i] * scale + 0.5) if magnitudes[i] >= 0 else -1
    for number in range(rounds + 1):
        _find_means(magnitudes, borders, levels)
        if has_zero:
            levels[0] = 0
        if number < rounds:
            for j in range(1, len(borders)):
                borders[j] = np.int32(np.ceil((levels[j - 1] + levels[j]) / 2))
    for j in range(len(levels)):
        levels[j] /= scale


@compiled
def _find_means(integers: Integers, borders: Integers, levels: Float32) -> None:
    """Fill ``levels`` with the means of the classes; an empty class has its border."""
    count_above, sum_above = np.int32(0), np.int32(0)
    for j in range(len(borders) - 1, -1, -1):
        count, total = np.int32(0), np.int32(0)  # of this class and those above
        for i in range(len(integers)):
            reaches = integers[i] >= borders[j]
            count = np.int32(count + reaches)
            total = np.int32(total + (integers[i] if reaches else 0))
        levels[j] = (total - sum_above) / (count - count_above) if count > count_above else borders[j]
        count_above, sum_above = count, total


@compiled
def _encode(integers: Integers, own_bits: Integers, borders: Integers, codes: Codes) -> None:
    """Fill ``codes`` with the class of each entry, and above it the sign."""
    codes[:] = 0
    for j in range(1, len(borders)):
        for i in range(len(codes)):
            codes[i] += integers[i] >= borders[j]
    for i in range(len(own_bits)):
        codes[i] += np.uint8(len(borders)) if own_bits[i] < 0 else np.uint8(0)


@compiled
def _masks(bits: int) -> Words:
    """Return the masks of a word of eight codes after two, four and eight codes were joined."""
    masks = np.empty(3, np.uint64)
    masks[2] = (np.uint64(1) << np.uint64(8 * bits)) - np.uint64(1)
    masks[1] = (np.uint64(1) << np.uint64(4 * bits)) - np.uint64(1)
    masks[1] |= masks[1] << np.uint64(32)
    masks[0] = (np.uint64(1) << np.uint64(2 * bits)) - np.uint64(1)
    masks[0] |= masks[0] << np.uint64(16)
    masks[0] |= masks[0] << np.uint64(32)
    return masks


@compiled
def _pack(codes: Words, bits: int, packed: Codes) -> None:
    """Write the low ``bits`` of each byte of ``codes``, the first in the lowest bits of the first byte."""
    masks = _masks(bits)
    for first in range(0, len(packed), bits):
        word = codes[first // bits]
        for step in range(3):  # two, four and eight codes move together
            word = (word | word >> np.uint64((8 - bits) << step)) & masks[step]
        for i in range(min(bits, len(packed) - first)):
            packed[first + i] = word >> np.uint64(8 * i)


@compiled
def _restore(
    levels: Float32, exact: Float32, positions: Positions, codes: Codes, bits: int, values: Float32
) -> None:
    classes = 1 << (bits - 1)
    of_code, own_codes = np.empty(2 * classes, np.float32), np.empty(BUCKET, np.uint8)
    for bucket in range(len(levels) // classes):
        own = values[bucket * BUCKET : (bucket + 1) * BUCKET]
        of_code[:classes] = levels[bucket * classes : (bucket + 1) * classes]
        of_code[classes:] = np.float32(0) - of_code[:classes]  # which makes no -0 of a 0
        packed = codes[bucket * BUCKET * bits // 8 :][: (len(own) * bits + 7) // 8]
        _unpack(packed, bits, own_codes.view(np.uint64))
        for i in range(len(own)):
            own[i] = of_code[own_codes[i]]
        for i in range(bucket * EXACT, min((bucket + 1) * EXACT, len(exact))):
            own[min(positions[i], len(own) - 1)] = exact[i]  # a damaged position is one all the same


@compiled
def _unpack(packed: Codes, bits: int, codes: Words) -> None:
    """Undo ``_pack``; bytes after the last code are undefined."""
    masks = _masks(bits)
    masks[2], masks[1], masks[0] = masks[1], masks[0], np.uint64(((1 << bits) - 1) * 0x0101_0101_0101_0101)
    for first in range(0, len(packed), bits):
        word = np.uint64(0)
        for i in range(min(bits, len(packed) - first)):
            word |= np.uint64(packed[first + i]) << np.uint64(8 * i)
        for step in range(2, -1, -1):
            word = (word | word << np.uint64((8 - bits) << step)) & masks[step]
        codes[first // bits] = word
