"""Products of a matrix and a few vectors against NumPy's in float64."""

import numpy as np
import pytest

from commlib.products import add_and_multiply, multiply, multiply_transposed, reconstruct

SHAPES = [(1, 1, 1), (3, 7, 2), (4, 64, 4), (37, 53, 5), (66, 129, 9)]  # rows, columns, vectors


def drawn(rows, columns):
    return np.random.default_rng([rows, columns]).standard_normal((rows, columns), np.float32)


def assert_product(found, left, right):
    exact = left.astype(float) @ right.astype(float)
    allowed = (left.shape[1] + 2) * 2.0**-24 * (np.abs(left).astype(float) @ np.abs(right).astype(float))
    assert found.dtype == np.float32
    assert (np.abs(found - exact) <= allowed).all()


@pytest.mark.parametrize(("rows", "columns", "vectors"), SHAPES)
def test_products_are_those_of_float64_to_rounding(rows, columns, vectors):
    matrix, left, right = drawn(rows, columns), drawn(rows, vectors), drawn(vectors, columns)
    assert_product(multiply_transposed(left, matrix), left.T, matrix)
    found = np.empty_like(matrix)
    multiply(left, right, found)
    assert_product(found, left, right)


@pytest.mark.parametrize("lacking", [0, 1, 3])
@pytest.mark.parametrize(("rows", "columns", "vectors"), SHAPES[1:])
def test_a_sum_is_written_and_multiplied_in_rows_of_which_the_last_may_be_shorter(
    rows, columns, vectors, lacking
):
    gradient, residual = (drawn(rows, columns).ravel()[: rows * columns - lacking] * each for each in (1, 3))
    right = drawn(vectors, columns)
    out, product = np.empty_like(gradient), np.empty((rows, vectors), np.float32)
    add_and_multiply(gradient, residual, right, out, product)
    assert out.tobytes() == (gradient + residual).tobytes()
    padded = np.concatenate([out, np.zeros(lacking, np.float32)]).reshape(rows, columns)
    assert_product(product, padded, right.T)


@pytest.mark.parametrize("vectors", [1, 4, 5, 11])
def test_a_reconstruction_is_written_and_subtracted(vectors):
    left, right, residual = drawn(37, vectors), drawn(vectors, 53), drawn(37, 53)
    out, rest = np.empty_like(residual), residual.copy()
    assert reconstruct(left, right, out, rest, 1.0)
    assert_product(out, left, right)
    assert rest.tobytes() == (residual - out).tobytes()


def test_a_share_of_a_reconstruction_is_written():
    left, right, residual = drawn(37, 5), drawn(5, 53), drawn(37, 53)
    whole, half, kept, rest = np.empty_like(residual), np.empty_like(residual), residual.copy(), residual
    assert reconstruct(left, right, whole, kept, 1.0)
    assert reconstruct(left, right, half, rest, 0.5)
    assert half.tobytes() == (whole / 2).tobytes() and rest.tobytes() == kept.tobytes()


def test_a_reconstruction_that_overflows_is_not_finite():
    left, right = np.full((3, 2), 1e20, np.float32), np.full((2, 5), 1e20, np.float32)
    left[:2] = 0
    assert not reconstruct(left, right, np.empty((3, 5), np.float32), np.zeros((3, 5), np.float32), 1.0)
    left[:, 0], right[1] = 0, 0  # the factors are as large, and no product is
    assert reconstruct(left, right, np.empty((3, 5), np.float32), np.zeros((3, 5), np.float32), 1.0)
