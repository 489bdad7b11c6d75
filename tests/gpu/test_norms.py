"""Sums of squares of segments: float64, one order."""

import math

import numpy as np
import pytest

from commlib.gpu import SegmentSquares
from pto.norms import sum_of_squares
from tests.gpu.vectors import DTYPES, SEED, bits_of, normal

SIZES = [1, 31, 0, 64, 65, 1000, 32_768, 32_769, 100_001]
EPSILON = 2.0**-53


def squares_of(engine, vector, sizes, entry="float32"):
    plan = SegmentSquares(sizes, entry=entry, engine=engine)
    return engine.to_host(plan.squares(engine.from_host(bits_of(vector))))


def segments_of(vector, sizes):
    return np.split(vector, np.cumsum(sizes)[:-1])


@pytest.mark.parametrize("entry", DTYPES)
def test_short_segments_have_the_bits_of_the_cpu_and_long_ones_are_right_to_rounding(engine, entry):
    vector = (normal(sum(SIZES)) * np.exp(normal(sum(SIZES), 1))).astype(DTYPES[entry])
    found = squares_of(engine, vector, SIZES, entry)
    for size, square, segment in zip(SIZES, found, segments_of(vector, SIZES), strict=True):
        if size <= 32_768:
            assert square == sum_of_squares(segment), (size, SEED)
        wide = segment.astype(np.float64)
        exact = math.fsum((wide * wide).tolist())
        assert abs(square - exact) <= (521 + size / 2**21) * EPSILON * exact, (size, SEED)
