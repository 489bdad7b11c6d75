"""Numba kernels for products of a large matrix and a few vectors; BLAS packs the matrix for larger ones."""

from functools import partial

import numpy as np

from commlib.arrays import Float32, compiled

# Sums in any order, of values of any kind: for products that each rank makes of its own matrix.
own_sums = partial(compiled, fastmath={"reassoc", "contract", "nsz"})


@own_sums
def add_and_multiply(
    gradient: Float32, residual: Float32, right: Float32, out: Float32, product: Float32
) -> None:
    """Write ``gradient + residual`` to ``out``, and its rows' products with those of ``right``.

    The vectors have a matrix's entries, whose last row may be shorter. Shapes: ``right`` ``(r, columns)``,
    ``product`` ``(rows, r)``.
    """
    ranks, length = right.shape
    for row in range(len(product)):
        low = row * length
        own, given, kept = out[low : low + length], gradient[low : low + length], residual[low : low + length]
        for i in range(len(own)):
            own[i] = given[i] + kept[i]
        for first in range(0, ranks, 4):  # of a row that is in the processor's cache
            places = first, min(first + 1, ranks - 1), min(first + 2, ranks - 1), min(first + 3, ranks - 1)
            a, b, c, d = right[places[0]], right[places[1]], right[places[2]], right[places[3]]
            of_a, of_b, of_c, of_d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for i in range(len(own)):
                value = own[i]
                of_a += value * a[i]
                of_b += value * b[i]
                of_c += value * c[i]
                of_d += value * d[i]
            product[row, places[0]], product[row, places[1]] = of_a, of_b
            product[row, places[2]], product[row, places[3]] = of_c, of_d


def multiply_transposed(left: Float32, matrix: Float32) -> Float32:
    """Return ``leftᵀ·matrix``, of shapes ``(rows, r)`` and ``(rows, columns)``."""
    rows, ranks = left.shape
    padded = np.zeros((rows + -rows % 4, ranks + ranks % 2), np.float32)
    padded[:rows, :ranks] = left
    product = np.zeros((padded.shape[1], matrix.shape[1]), np.float32)
    _add_products(padded, matrix, product)
    return product[:ranks]


@own_sums
def _add_products(left: Float32, matrix: Float32, product: Float32) -> None:
    """Add four rows times two columns of ``left`` at a time; rows of ``left`` beyond the last are 0."""
    last = len(matrix) - 1
    for row in range(0, len(left), 4):
        a, b, c, d = (
            matrix[row],
            matrix[min(row + 1, last)],
            matrix[min(row + 2, last)],
            matrix[min(row + 3, last)],
        )
        for rank in range(0, len(product), 2):
            one, two = product[rank], product[rank + 1]
            a_one, b_one, c_one, d_one = (
                left[row, rank],
                left[row + 1, rank],
                left[row + 2, rank],
                left[row + 3, rank],
            )
            rank += 1
            a_two, b_two, c_two, d_two = (
                left[row, rank],
                left[row + 1, rank],
                left[row + 2, rank],
                left[row + 3, rank],
            )
            for column in range(len(a)):
                of_a, of_b, of_c, of_d = a[column], b[column], c[column], d[column]
                one[column] += of_a * a_one + of_b * b_one + of_c * c_one + of_d * d_one
                two[column] += of_a * a_two + of_b * b_two + of_c * c_two + of_d * d_two


@compiled
def multiply(left: Float32, right: Float32, out: Float32) -> None:
    """Write ``left·right`` to ``out``.

    The order of the sums does not depend on the processor, as a library's may: all ranks get the same bits.
    """
    for row in range(len(left)):
        _multiply_row(left[row], right, out[row])


@compiled
def reconstruct(left: Float32, right: Float32, out: Float32, residual: Float32, ranks: int) -> None:
    """Write ``left·right``, a sum of ``ranks``, to ``out``, and subtract the mean from ``residual``."""
    divisor = np.float32(ranks)
    for row in range(len(left)):
        total, rest = out[row], residual[row]
        _multiply_row(left[row], right, total)
        for column in range(len(total)):
            rest[column] -= total[column] / divisor


@compiled
def _multiply_row(factors: Float32, right: Float32, out: Float32) -> None:
    """Add up rows in order; four at a time, so that ``out`` is read and written less often."""
    ranks, columns = right.shape
    first = (ranks - 1) % 4 + 1
    for column in range(columns):
        out[column] = factors[0] * right[0, column]
    for each in range(1, first):
        for column in range(columns):
            out[column] += factors[each] * right[each, column]
    for each in range(first, ranks, 4):
        a, b, c, d = factors[each], factors[each + 1], factors[each + 2], factors[each + 3]
        for column in range(columns):
            total = out[column] + a * right[each, column]
            total += b * right[each + 1, column]
            total += c * right[each + 2, column]
            out[column] = total + d * right[each + 3, column]
