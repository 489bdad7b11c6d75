"""Values in 8 or 4 bits after a Hadamard rotation, which spreads each value over its whole bucket.

Where few values of a bucket are much larger than the others, a scale for the largest leaves most others at 0.
A rotation makes all of about one size, so that the levels serve all (SDP4Bit, arXiv 2410.15526; THC,
arXiv 2302.08545). It is the same on all ranks, and keeps norms: the error is no larger than QSGD's bound.
Ranks that round under common scales can add up their levels, and rotate back the sum.
"""

from typing import Any

import numpy as np

from commlib.arrays import compiled
from commlib.vectors import Float32
from commlib.wire.base import Message
from commlib.wire.qsgd import BUCKET, Levels, Qsgd

SIGNS = np.random.default_rng(0x48).choice(np.array([-1, 1], np.float32), BUCKET)


class Hadamard(Qsgd):
    """Random signs and a Hadamard transform of every 512 values; then QSGD. A shorter rest is not rotated.

    A value of 0 comes back as an error of the others' size.
    """

    def encode(self, values: Float32) -> Message:
        return super().encode(self.rotated(values, np.empty_like(values)))

    def rotated(self, values: Float32, out: Float32) -> Float32:
        """Write the rotated values to ``out``, which may be ``values``, and return it."""
        _change_signs(values, out)
        _transform(out, np.float32(0.5))  # halves: no sum is larger than the largest value
        return out

    def restore(self, levels: Levels, scales: Float32, values: Float32, ranks: int = 1) -> None:
        super().restore(levels, scales, values, ranks)
        _transform(values, np.float32(1))
        _change_signs(values, values)

    def type_of_sums(self, ranks: int) -> "np.dtype[Any]":
        """Return the smallest integer type that holds the sums of the levels of so many ranks."""
        return np.min_scalar_type(-ranks * self._largest_level() - 1)


class Hadamard8(Hadamard):
    """Levels −127 … 127."""

    bits = 8


class Hadamard4(Hadamard):
    """Levels −7 … 7."""

    bits = 4


def _change_signs(values: Float32, out: Float32) -> None:
    whole = len(values) - len(values) % BUCKET
    np.multiply(values[:whole].reshape(-1, BUCKET), SIGNS, out=out[:whole].reshape(-1, BUCKET))
    np.multiply(values[whole:], SIGNS[: len(values) - whole], out=out[whole:])


@compiled
def _transform(values: Float32, factor: np.float32) -> None:
    """Transform whole buckets: ``a, b`` become ``factor·(a + b), factor·(a − b)`` at every distance."""
    for first in range(0, len(values) - BUCKET + 1, BUCKET):
        block = values[first : first + BUCKET]
        distance = 1
        while distance < BUCKET:
            for start in range(0, BUCKET, 2 * distance):
                for i in range(start, start + distance):
                    left, right = block[i], block[i + distance]
                    block[i] = factor * left + factor * right
                    block[i + distance] = factor * left - factor * right
            distance *= 2
