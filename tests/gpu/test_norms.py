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


def test_large_and_small_values_neither_overflow_nor_vanish(engine):
    vector = np.array([3e38, -3e38, 1e-45, 1e-45], np.float32)
    found = squares_of(engine, vector, [2, 2])
    assert found.tolist() == [2 * float(vector[0]) ** 2, 2 * float(vector[2]) ** 2]


def test_the_order_of_blocks_changes_no_bit(emulate):
    vector = normal(150_000)
    engines = [emulate(seed, under_way=under_way) for seed, under_way in [(1, 1), (2, 4), (3, 9)]]
    assert len({squares_of(engine, vector, [70_000, 80_000]).tobytes() for engine in engines}) == 1
