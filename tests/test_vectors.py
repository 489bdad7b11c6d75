"""SparseVector and the pure functions under it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib import InvalidArgument, SparseVector
from commlib.entries import TILE
from commlib.vectors import index_dtype, is_finite, partition, sum_sparse
from tests.extent import examples


def sparse(size, entries):
    """A SparseVector from a dictionary of index to value."""
    indices = np.array(sorted(entries), index_dtype(size))
    return SparseVector(size, indices, np.array([entries[i] for i in sorted(entries)], np.float32))


def drawn(rng, size, count):
    """``count`` heavy-tailed entries of either sign, at random indices."""
    indices = np.sort(rng.choice(size, count, replace=False)).astype(index_dtype(size))
    return SparseVector(size, indices, rng.standard_t(2, count).astype(np.float32))


def as_dense(vector):
    """The same vector in the dense representation."""
    return SparseVector(vector.size, None, vector.to_dense())


IN_BOTH = pytest.mark.parametrize("as_either", [lambda vector: vector, as_dense], ids=["sparse", "dense"])


# ------------------------------------------------------------- index_dtype, delta, partition


def test_indices_are_32_bits_while_the_size_fits_and_64_beyond():
    assert [index_dtype(size) for size in (0, 1, 2**31 - 1)] == [np.int32] * 3
    assert [index_dtype(size) for size in (2**31, 2**40)] == [np.int64] * 2


@given(size=st.integers(0, 2**40), parts=st.integers(1, 300))
def test_a_partition_covers_everything_in_nearly_equal_parts(size, parts):
    bounds = partition(size, parts)
    lengths = np.diff(bounds)
    assert bounds.dtype == np.int64
    assert (len(bounds), bounds[0], bounds[-1]) == (parts + 1, 0, size)
    assert set(lengths.tolist()) <= {size // parts, -(-size // parts)}


# ------------------------------------------------------------- dense and back


@settings(max_examples=examples(100))
@given(seed=st.integers(0, 2**32), size=st.integers(1, 300), share=st.floats(0, 1))
def test_from_dense_and_back_is_the_same(seed, size, share):
    rng = np.random.default_rng(seed)
    dense = np.where(rng.random(size) < share, rng.standard_t(2, size), 0).astype(np.float32)
    vector = SparseVector.from_dense(dense)
    assert vector.to_dense().tobytes() == dense.tobytes()
    assert vector.is_dense == (np.count_nonzero(dense) >= size / 2)
    if not vector.is_dense:
        np.testing.assert_array_equal(vector.indices, np.flatnonzero(dense))
        assert vector.indices.dtype == np.int32


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("size", "place"), [(1, 0), (4095, 4094), (4096, 4095), (4097, 4096), (9000, 5000)])
def test_what_is_not_finite_is_found_wherever_it_is(size, place, bad):
    vector = np.zeros(size, np.float32)
    assert is_finite(vector)
    vector[place] = bad
    assert not is_finite(vector)


@pytest.mark.parametrize("size, last_sparse", [(1000, 499), (999, 499), (7, 3), (6, 2), (1, 0), (2, 0)])
def test_from_dense_switches_exactly_at_delta(size, last_sparse):
    below, at = np.zeros(size, np.float32), np.zeros(size, np.float32)
    below[:last_sparse] = 1 + np.arange(last_sparse)
    at[: last_sparse + 1] = 1 + np.arange(last_sparse + 1)
    assert not SparseVector.from_dense(below).is_dense
    assert SparseVector.from_dense(below).nnz == last_sparse
    assert SparseVector.from_dense(at).is_dense
    assert SparseVector.from_dense(at).nnz == size


@given(seed=st.integers(0, 2**16), size=st.integers(1, 300), count=st.integers(0, 900))
def test_pairs_in_any_order_are_added_up_one_after_the_other(seed, size, count):
    rng = np.random.default_rng(seed)
    indices, values = rng.integers(0, size, count), rng.standard_t(1, count).astype(np.float32)
    before = indices.copy(), values.copy()
    vector = SparseVector.from_pairs(size, indices, values)
    expected = np.zeros(size, np.float32)
    for index, value in zip(indices, values, strict=True):
        expected[index] += value
    assert vector.to_dense().tobytes() == expected.tobytes()
    assert vector.indices.tolist() == sorted(set(indices.tolist()))
    assert vector.indices.dtype == np.int32
    assert np.array_equal(indices, before[0])
    assert np.array_equal(values, before[1])


def test_pairs_of_large_vectors_and_of_other_types_are_taken():
    vector = SparseVector.from_pairs(2**40, np.array([2**39, 5, 2**39], np.uint64), [1, 2, 3])
    assert (vector.indices.dtype, vector.indices.tolist()) == (np.int64, [5, 2**39])
    assert (vector.values.dtype, vector.values.tolist()) == (np.float32, [2.0, 4.0])
    assert SparseVector.from_pairs(7, [], []).nnz == 0


@pytest.mark.parametrize(
    ("indices", "values", "message"),
    [
        ([1, 7], [1, 1], "indices: expected 0 … 6, got one outside"),
        ([-1, 2], [1, 1], "indices: expected 0 … 6, got one outside"),
        ([1.0], [1], "indices: expected integers, got float64"),
        ([True], [1], "indices: expected integers, got bool"),
        ([1, 2], [1], "values: expected one for each index"),
        ([[1]], [[1]], "values: expected one for each index"),
    ],
)
def test_pairs_that_are_none_are_refused(indices, values, message):
    with pytest.raises(InvalidArgument, match=message):
        SparseVector.from_pairs(7, indices, values)


def test_to_dense_is_a_new_array_of_sparse_and_dense_vectors():
    vector = sparse(9, {1: 2.0, 4: 3.0})
    for each in (vector, as_dense(vector)):
        each.to_dense()[:] = 7
        np.testing.assert_array_equal(each.to_dense(), [0, 2, 0, 0, 3, 0, 0, 0, 0])


# ------------------------------------------------------------- adding


@settings(max_examples=examples(100))
@given(seed=st.integers(0, 2**32), size=st.integers(1, 500), number=st.integers(1, 9))
def test_a_total_is_the_float64_sum_whatever_the_overlap(seed, size, number):
    rng = np.random.default_rng(seed)
    vectors = [drawn(rng, size, rng.integers(0, size + 1)) for _ in range(number)]
    reference = np.sum([vector.to_dense() for vector in vectors], axis=0, dtype=np.float64)
    magnitude = np.sum([np.abs(vector.to_dense()) for vector in vectors], axis=0, dtype=np.float64)
    error = np.abs(sum_sparse(vectors).to_dense() - reference)
    # each of the additions rounds a partial sum, at most the magnitude, by half an ulp
    assert (error <= number * 2.0**-24 * magnitude).all()


@settings(max_examples=examples(100))
@given(seed=st.integers(0, 2**32), size=st.integers(1, 500), number=st.integers(1, 9))
def test_a_total_is_bitwise_the_same_sparse_dense_or_mixed(seed, size, number):
    rng = np.random.default_rng(seed)
    vectors = [drawn(rng, size, rng.integers(0, size // (2 * number) + 1)) for _ in range(number)]
    mixed = [as_dense(vector) if rng.random() < 0.5 else vector for vector in vectors]
    expected = sum_sparse(vectors).to_dense().tobytes()
    assert sum_sparse([as_dense(vector) for vector in vectors]).to_dense().tobytes() == expected
    assert sum_sparse(mixed).to_dense().tobytes() == expected


@IN_BOTH
def test_a_total_adds_in_the_order_given(as_either):
    large, one, minus = (as_either(sparse(9, {4: value})) for value in (2.0**24, 1.0, -(2.0**24)))
    # a float32 of 2**24 has no room for a one
    assert sum_sparse([large, one, minus]).to_dense()[4] == 0
    assert sum_sparse([large, minus, one]).to_dense()[4] == 1


def test_a_total_switches_to_dense_when_the_entries_together_reach_delta():
    below = sum_sparse([sparse(10, {0: 1, 1: 2}), sparse(10, {1: 3, 2: 4})])
    at = sum_sparse([sparse(10, {0: 1, 1: 2}), sparse(10, {1: 3, 2: 4, 3: 5})])  # 2 + 3 = δ, of four entries
    assert (below.is_dense, below.nnz) == (False, 3)
    assert (at.is_dense, at.nnz) == (True, 10)
    np.testing.assert_array_equal(at.to_dense(), [1, 5, 4, 5, 0, 0, 0, 0, 0, 0])


def test_adding_changes_neither():
    first, second = sparse(100, {1: 2.0, 4: 3.0}), sparse(100, {4: 5.0})
    for left, right in ((first, second), (as_dense(first), second), (first, as_dense(second))):
        sum_sparse([left, right]).values[:] = np.nan
        np.testing.assert_array_equal(left.to_dense(), first.to_dense())
        np.testing.assert_array_equal(right.to_dense(), second.to_dense())
    np.testing.assert_array_equal(first.values, [2, 3])
    np.testing.assert_array_equal(second.values, [5])


def test_beyond_32_bits_nothing_is_cut_off():
    size = 2**31 + 10
    first, second = sparse(size, {3: 1.0, 2**31 + 5: 2.0}), sparse(size, {2**31 + 5: 3.0, 2**31 + 9: -9.0})
    added = sum_sparse([first, second])
    np.testing.assert_array_equal(added.indices, [3, 2**31 + 5, 2**31 + 9])
    np.testing.assert_array_equal(added.values, [1, 5, -9])
    np.testing.assert_array_equal(added.top_k(1).indices, [2**31 + 9])
    assert added.indices.dtype == added.top_k(1).indices.dtype == np.int64


@IN_BOTH
def test_add_to_and_subtract_from_change_the_vector_in_place(as_either):
    vector = as_either(sparse(6, {1: 2.0, 4: -3.0}))
    target = np.arange(6, dtype=np.float32)
    vector.add_to(target)
    np.testing.assert_array_equal(target, [0, 3, 2, 3, 1, 5])
    vector.subtract_from(target)
    vector.subtract_from(target)
    np.testing.assert_array_equal(target, [0, -1, 2, 3, 7, 5])


def test_sums_in_two_tiles_are_apart():
    vectors = [sparse(50_000, {5: 1, 5 + TILE: 10})] * 3
    assert sum_sparse(vectors).indices_or_range.tolist() == [5, 5 + TILE]
    assert sum_sparse(vectors).values.tolist() == [3, 30]


# ------------------------------------------------------------- slice, without, top_k and divide


@IN_BOTH
def test_a_slice_counts_from_its_beginning(as_either):
    part = as_either(sparse(20, {3: 1, 5: 2, 8: 3, 9: 4})).slice(5, 9)
    assert part.to_dense().tolist() == [2, 0, 0, 3]


def test_without_leaves_the_entries_that_the_other_has_not_and_within_those_that_it_has():
    vector, other = sparse(20, {1: 1, 5: 2, 8: 3, 19: 4}), sparse(20, {0: 9, 5: 9, 6: 9, 8: 9})
    left, both = vector.without(other), vector.within(other)
    assert (left.indices_or_range.tolist(), left.values.tolist()) == ([1, 19], [1, 4])
    assert (both.indices_or_range.tolist(), both.values.tolist()) == ([5, 8], [2, 3])


@IN_BOTH
def test_top_k_takes_the_largest_magnitudes_ties_by_lowest_index(as_either):
    vector = as_either(sparse(20, {2: 1.0, 5: -4.0, 7: 4.0, 11: 0.5, 13: -4.0, 19: 9.0}))
    expected = {0: [], 1: [19], 2: [5, 19], 3: [5, 7, 19], 4: [5, 7, 13, 19], 5: [2, 5, 7, 13, 19]}
    for k, indices in expected.items():
        best = vector.top_k(k)
        np.testing.assert_array_equal(best.indices, indices)
        np.testing.assert_array_equal(best.values, vector.to_dense()[indices])
        assert best.indices.dtype == np.int32
    assert not vector.top_k(20).is_dense  # also beyond δ
    assert vector.top_k(20).to_dense().tobytes() == vector.to_dense().tobytes()


@IN_BOTH
def test_divide_rounds_once_in_float32(as_either):
    divided = as_either(drawn(np.random.default_rng(1), 10_000, 4_900))
    before = divided.to_dense()
    assert divided.divide(7)
    # a float64 quotient of float32 numbers, rounded to float32, is the float32 quotient
    expected = (before.astype(np.float64) / 7).astype(np.float32)
    assert divided.to_dense().tobytes() == expected.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 4_096, 9_999])
def test_divide_finds_a_value_that_is_not_finite(value, at):
    values = np.ones(10_000, np.float32)
    values[at] = value
    assert not SparseVector(10_000, None, values).divide(3)


# ------------------------------------------------------------- what is refused


int32, float32 = (lambda *entries, dtype=dtype: np.array(entries, dtype) for dtype in (np.int32, np.float32))


@pytest.mark.parametrize(
    "size, indices, values, message",
    [
        (2, int32(0), np.ones(1), "values: expected float32, got float64"),
        (2, None, np.ones((2, 3), np.float32), "values: expected one dimension"),
        (3, None, float32(1, 2), "values: a dense vector of size 3 got 2"),
        (3, np.array([1]), float32(1), "indices: expected int32 .*, got int64"),
        (3, np.array([1], np.uint32), float32(1), "indices: expected int32 .*, got uint32"),
        (2**31, int32(1), float32(1), "indices: expected int64 .*, got int32"),
        (3, int32(0, 1), float32(1), "indices: 2 indices for 1 values"),
        (3, int32(-1, 1), float32(1, 2), "indices: expected 0 … 2, got one outside"),
        (3, int32(1, 3), float32(1, 2), "indices: expected 0 … 2, got one outside"),
        (0, int32(0), float32(1), "indices: expected 0 … -1, got one outside"),
        (3, int32(2, 1), float32(1, 2), "indices: expected sorted and unique"),
        (3, int32(1, 1), float32(1, 2), "indices: expected sorted and unique"),
        (9, int32(0, 8, 1, 2), float32(1, 2, 3, 4), "indices: expected sorted and unique"),
    ],
)
def test_what_is_no_sparse_vector_is_refused_with_received_and_expected(size, indices, values, message):
    with pytest.raises(InvalidArgument, match=message):
        SparseVector(size, indices, values)


@pytest.mark.parametrize("sizes", [[5, 9], []])
def test_vectors_of_different_sizes_are_not_added_and_none_are_no_sum(sizes):
    vectors = [SparseVector.from_dense(np.ones(size, np.float32)) for size in sizes]
    with pytest.raises(InvalidArgument, match="vectors: expected .* of equal size") as caught:
        sum_sparse(vectors)
    assert str(caught.value).endswith(f"got sizes {sizes}")


def test_a_negative_count_is_refused():
    with pytest.raises(InvalidArgument, match="k: expected at least 0, got -1"):
        SparseVector.from_dense(np.ones(5, np.float32)).top_k(-1)
