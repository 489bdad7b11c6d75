"""Numba kernels for products of a large matrix and a few vectors; BLAS packs the matrix for larger ones."""

from functools import partial

import numpy as np

from commlib.arrays import Float32, compiled
from commlib.entries import are_finite

LARGEST_SUM = float(np.finfo(np.float32).max) / 2  # for which a sum of rounded products is finite

# Sums in any order, of values of any kind: for products that each rank makes of its own matrix.
own_sums = partial(compiled, fastmath={"reassoc", "contract", "nsz"})


@own_sums
def add_and_multiply(
    gradient: Float32, residual: Float32, right: Float32, out: Float32, product: Float32
) -> None:
    """Write ``gradient + residual`` to ``out``, and ``out·rightᵀ`` to ``product``.

    The vectors hold a matrix row by row; its last row may be shorter. Shapes: ``right`` ``(r, columns)``,
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
    padded = _padded(left, 4, 2)
    product = np.zeros((padded.shape[1], matrix.shape[1]), np.float32)
    _add_products(padded, matrix, product)
    return product[: left.shape[1]]


def _padded(factors: Float32, rows: int, columns: int) -> Float32:
    """Return a matrix of multiples of ``rows`` and ``columns``; what is added is 0."""
    (height, width) = factors.shape
    padded = np.zeros((height + -height % rows, width + -width % columns), np.float32)
    padded[:height, :width] = factors
    return padded


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
        total = out[row]
        total[:] = 0
        for each in range(len(right)):
            for column in range(len(total)):
                total[column] += left[row, each] * right[each, column]


def reconstruct(left: Float32, right: Float32, out: Float32, residual: Float32, share: float) -> bool:
    """Subtract ``left·right`` from ``residual``, write ``share`` times it to ``out``; return if it is finite.

    All ranks get the same bits, as from ``multiply``. Only factors so large that a sum could overflow make a
    pass over ``out`` necessary.
    """
    _reconstruct(_padded(left, 1, 4), _padded(right, 4, 1), out, residual, np.float32(share))
    largest = len(right) * float(np.abs(left).max(initial=0)) * float(np.abs(right).max(initial=0))
    return largest < LARGEST_SUM or bool(are_finite(out.reshape(-1).view(np.uint32)))


@compiled
def _reconstruct(left: Float32, right: Float32, out: Float32, residual: Float32, share: np.float32) -> None:
    """Add four products at a time, so that ``out`` is read and written less often."""
    last = len(right) - 4
    for row in range(len(left)):
        product, rest = out[row], residual[row]
        product[:] = 0
        for first in range(0, last, 4):
            a, b, c, d = left[row, first], left[row, first + 1], left[row, first + 2], left[row, first + 3]
            for column in range(len(product)):
                total = product[column] + a * right[first, column]
                total += b * right[first + 1, column]
                total += c * right[first + 2, column]
                product[column] = total + d * right[first + 3, column]
        a, b, c, d = left[row, last], left[row, last + 1], left[row, last + 2], left[row, last + 3]
        for column in range(len(product)):
            total = product[column] + a * right[last, column]
            total += b * right[last + 1, column]
            total += c * right[last + 2, column]
            total += d * right[last + 3, column]
            rest[column] -= total
            product[column] = total * share
