"""Sums of squares of segments: float64, one order."""

import math

import numpy as np

from commlib.gpu import SegmentSquares
from pto.norms import sum_of_squares
from tests.gpu.vectors import SEED, normal

SIZES = [1, 31, 0, 64, 65, 1000, 32_768, 32_769, 100_001]
EPSILON = 2.0**-53


def test_short_segments_have_the_bits_of_the_cpu_and_long_ones_are_right_to_rounding(engine):
    vector = normal(sum(SIZES)) * np.exp(normal(sum(SIZES), 1))
    plan = SegmentSquares(SIZES, engine=engine)
    found = engine.to_host(plan.squares(engine.from_host(vector)))
    for size, square, segment in zip(SIZES, found, np.split(vector, np.cumsum(SIZES)[:-1]), strict=True):
        if size <= 32_768:
            assert square == sum_of_squares(segment), (size, SEED)
        wide = segment.astype(np.float64)
        exact = math.fsum((wide * wide).tolist())
        assert abs(square - exact) <= (521 + size / 2**21) * EPSILON * exact, (size, SEED)
