"""The passes that the selectors share, one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib import SparseVector
from commlib.selection.base import block_maxima, reaching
from commlib.selection.exact import keep_largest, kth_largest
from tests.extent import examples

SIZES = [0, 1, 63, 64, 65, 1000, 4099]


def magnitudes_of(vector):
    return vector.view(np.uint32) & 0x7FFF_FFFF


def bits_of(value):
    return np.float32(value).view(np.uint32)


def any_bits(seed, size):
    """Every float32 there is: NaN, infinities, denormals."""
    bits = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32)
    return bits.view(np.float32)


def normal(seed, size):
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_block_maxima_are_the_largest_magnitudes_of_every_64(size):
    vector = any_bits(1, size)
    expected = [magnitudes_of(vector)[first : first + 64].max() for first in range(0, size, 64)]
    np.testing.assert_array_equal(block_maxima(vector.view(np.uint32)), np.array(expected, np.uint32))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threshold", [0.0, 0.01, 1.5, 3.0, 100.0])
def test_all_that_reach_a_threshold_are_found_with_their_values(size, threshold):
    vector = normal(2, size)
    maxima = block_maxima(vector.view(np.uint32))
    found = reaching(vector, maxima, bits_of(threshold), at_most=size)
    np.testing.assert_array_equal(found.indices, np.flatnonzero(np.abs(vector) >= threshold))
    assert found.values.tobytes() == vector[found.indices].tobytes()


def test_every_single_place_of_a_block_is_found():
    for offset in range(64):
        vector = np.zeros(130, np.float32)
        vector[64 + offset] = -1
        found = reaching(vector, block_maxima(vector.view(np.uint32)), bits_of(1), at_most=1)
        assert found.indices.tolist() == [64 + offset]


def test_one_more_than_may_reach_the_threshold_is_none():
    vector = np.zeros(1000, np.float32)
    vector[[3, 64, 65, 700, 998]] = 5  # 998 in the block that is not whole
    maxima = block_maxima(vector.view(np.uint32))
    assert reaching(vector, maxima, bits_of(5), at_most=5).nnz == 5
    assert reaching(vector, maxima, bits_of(5), at_most=4) is None
    assert reaching(vector, maxima, bits_of(0), at_most=999) is None
    assert reaching(vector, maxima, bits_of(0), at_most=1000).nnz == 1000


def test_enough_ends_the_ties_with_the_threshold_but_not_what_is_above():
    vector = np.ones(1000, np.float32)
    vector[900] = 2
    found = reaching(vector, block_maxima(vector.view(np.uint32)), bits_of(1), at_most=1000, enough=70)
    assert found.indices.tolist() == [*range(128), 900]  # the two blocks that hold the first 70, and the 2


def test_enough_keeps_every_candidate_for_the_largest():
    vector = np.random.default_rng(3).integers(-3, 4, 4099).astype(np.float32)
    maxima = block_maxima(vector.view(np.uint32))
    for k in (1, 50, 600):
        found = reaching(vector, maxima, bits_of(2), at_most=4099, enough=k)
        order = np.argsort(-np.abs(vector.astype(np.float64)), kind="stable")[:k]
        assert np.isin(order, found.indices).all()


@settings(max_examples=examples(300))
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 3000),
    values=st.sampled_from(
        [2, 50, 2**12, 2**23, 2**31]
    ),  # how many there are to draw from: from all ties to none
    share=st.floats(0, 1),
    spare=st.integers(0, 100),
)
def test_at_least_k_reach_the_kth_largest_and_no_more_than_the_spare_ones_besides(
    seed, size, values, share, spare
):
    magnitudes = np.random.default_rng(seed).integers(0, values, size, dtype=np.uint32)
    k = max(1, round(share * size))
    threshold = kth_largest(magnitudes, k, spare)
    kth = np.sort(magnitudes)[size - k]
    count = int((magnitudes >= threshold).sum())
    assert threshold <= kth
    assert count >= k
    assert threshold == kth or count <= k + spare


def test_the_sign_does_not_count_for_the_kth_largest():
    vector = normal(5, 1000)
    for k in (1, 77, 1000):
        expected = kth_largest(magnitudes_of(vector), k, 0)
        assert kth_largest(vector.view(np.uint32), k, 0) == expected


def test_neighbours_that_differ_in_the_last_bit_are_told_apart():
    magnitudes = np.arange(1000, dtype=np.uint32)[::-1] + np.uint32(0x3F80_0000)
    assert [int(kth_largest(magnitudes, k, 0)) - 0x3F80_0000 for k in (1, 500, 1000)] == [999, 500, 0]


@pytest.mark.parametrize("k", [1, 7, 500, 999, 1000])
def test_the_largest_candidates_are_kept_in_order_ties_by_lowest_index(k):
    values = np.random.default_rng(4).integers(-5, 6, 1000).astype(np.float32)
    indices = np.arange(1000, dtype=np.int32) * 3 + 1
    expected = np.sort(np.argsort(-np.abs(values.astype(np.float64)), kind="stable")[:k])
    largest = keep_largest(SparseVector(3001, indices.copy(), values.copy()), k)
    assert largest.size == 3001
    np.testing.assert_array_equal(largest.indices, indices[expected])
    np.testing.assert_array_equal(largest.values, values[expected])
