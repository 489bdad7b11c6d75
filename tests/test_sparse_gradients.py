"""Gradients of tables: rows that become entries of a vector, and entries that become rows again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib import InvalidArgument, SparseVector
from commlib.sparse_gradients import entries_of_rows, rows_of_entries
from tests.extent import examples


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**16),
    height=st.integers(1, 50),
    inner=st.sampled_from([(), (1,), (3,), (2, 4)]),
    count=st.integers(0, 120),
)
def test_rows_in_any_order_are_added_up_one_after_the_other(seed, height, inner, count):
    rng = np.random.default_rng(seed)
    rows, values = rng.integers(0, height, count), rng.standard_t(1, (count, *inner)).astype(np.float32)
    expected = np.zeros((height, *inner), np.float32)
    for row, each in zip(rows, values, strict=True):
        expected[row] += each
    vector = entries_of_rows(rows, values, expected.shape)
    checked = SparseVector(vector.size, vector.indices, vector.values)  # which checks the indices
    np.testing.assert_array_equal(checked.to_dense(), expected.ravel())
    found, sums = rows_of_entries(vector, expected.shape)
    assert found.tolist() == sorted(set(rows.tolist()))
    np.testing.assert_array_equal(sums, expected[found])


def test_a_row_of_which_some_entries_are_stored_has_zeros_for_the_others():
    vector = SparseVector.from_pairs(12, [1, 2, 9], [5, 6, 7])
    rows, values = rows_of_entries(vector, (4, 3))
    assert rows.tolist() == [0, 3]
    assert values.tolist() == [[0, 5, 6], [7, 0, 0]]


def test_of_a_dense_vector_the_rows_are_those_that_are_not_all_zero():
    vector = SparseVector(6, None, np.array([0, 0, 0, 2, 0, 0], np.float32))
    rows, values = rows_of_entries(vector, (3, 2))
    assert rows.tolist() == [1]
    assert values.tolist() == [[0, 2]]


def test_a_table_past_what_32_bits_address():
    shape = (2**30, 8)
    vector = entries_of_rows(np.array([2**30 - 1, 0], np.int32), np.ones((2, 8)), shape)
    assert vector.indices.dtype == np.int64
    assert vector.indices.tolist() == [*range(8), *range(2**33 - 8, 2**33)]
    rows, values = rows_of_entries(vector, shape)
    assert rows.tolist() == [0, 2**30 - 1]
    assert values.shape == (2, 8)


@pytest.mark.parametrize(
    ("rows", "values", "message"),
    [
        ([4], np.ones((1, 2)), "rows: expected 0 … 3, got one outside"),
        ([-1], np.ones((1, 2)), "rows: expected 0 … 3, got one outside"),
        ([1.5], np.ones((1, 2)), "rows: expected integers, got float64"),
        ([1], np.ones((1, 3)), "values: expected shape (1, 2) for 1 rows, got (1, 3)"),
        ([1, 2], np.ones((1, 2)), "values: expected shape (2, 2) for 2 rows, got (1, 2)"),
    ],
)
def test_rows_that_the_table_has_not_are_refused(rows, values, message):
    with pytest.raises(InvalidArgument) as caught:
        entries_of_rows(rows, values, (4, 2))
    assert str(caught.value) == message
