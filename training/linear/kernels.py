"""Numba kernels of linear models: losses, margins, updates, and sparse sums of rows.

Rows come in random order, and their weights lie anywhere in the model: kernels over rows prefetch the weights
of the next row, so that a pass does not wait for memory.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from commlib.arrays import compiled
from commlib.entries import Words, ones_in
from commlib.selection.base import write_indices
from commlib.vectors import Float32, Index

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

LOSSES = {"logistic": 0, "hinge": 1, "squared_hinge": 2}  # name -> what the kernels call it
LOGISTIC, HINGE, SQUARED_HINGE = LOSSES.values()
# The largest second derivative by the margin, where there is one: what coordinate descent divides by.
CURVATURES = {"logistic": 0.25, "squared_hinge": 2.0}

# Columns are cast to unsigned numbers where they are indices: else Numba would check for negative ones.

LINE = 16  # entries in a line of the cache
SMALLEST_SCALE = 1e-6  # below it the scale moves into the weights: quotients stay in float32's range
ONE, SHIFT, MASK = np.uint64(1), np.uint64(6), np.uint64(63)  # of sets of columns: 64 columns a word
READ, KEEP, DATA = 0, 3, 1  # arguments of LLVM's prefetch: to read, into all levels of the data cache


class Matrix(NamedTuple):
    """Rows of few entries: row ``i`` has ``values[starts[i] : starts[i + 1]]`` in those ``columns``."""

    starts: Int64
    columns: Index
    values: Float32


class Weights(NamedTuple):
    """Weights ``w = scale·v`` and an intercept.

    A step of L2 regularization multiplies ``scale`` alone. L1 regularization is lazy: an entry
    of ``v`` is brought nearer to 0 only when it is read or updated, by what ``shrunk`` has grown since
    ``seen``, the value of ``shrunk`` at the entry's last update. Without L1 ``seen`` is empty.
    """

    v: Float32
    seen: Float64
    shrunk: float
    scale: float
    intercept: float


def _prefetch(context: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of an entry of an array of one dimension."""

    def generate(target: Any, builder: Any, signature: Any, given: Any) -> Any:
        entries = target.make_array(signature.args[0])(target, builder, given[0]).data
        place = builder.bitcast(builder.gep(entries, [given[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(function, [place, number(READ), number(KEEP), number(DATA)])
        return target.get_dummy_value()

    return types.void(array, index), generate


prefetch: Any = intrinsic(_prefetch)  # called as ``prefetch(array, index)``


@compiled
def value_and_slope(loss: int, margin: float, label: float) -> tuple[float, float]:
    """Return a loss of the margin ``z = w·x + b`` and a label ``y``, −1 or +1, and its derivative by ``z``.

    ``log(1 + exp(−yz))``, ``max(0, 1 − yz)``, or the square of that. The hinge's derivative is 0 where it has
    none.
    """
    signed = label * margin
    if loss == LOGISTIC:
        small = math.exp(-abs(signed))
        return max(0.0, -signed) + math.log1p(small), -label * (small if signed > 0 else 1.0) / (1.0 + small)
    short = max(0.0, 1.0 - signed)
    if loss == HINGE:
        return short, -label if short > 0.0 else 0.0
    return short * short, -2.0 * label * short


@compiled
def soft(number: float, threshold: float) -> float:
    """Return ``number`` brought nearer to 0 by ``threshold``, at most to 0."""
    if number > threshold:
        return number - threshold
    if number < -threshold:
        return number + threshold
    return 0.0


@compiled
def margin(matrix: Matrix, row: int, weights: Weights) -> float:
    """Return ``w·x + b`` of a row."""
    columns, values, v, seen, total = matrix.columns, matrix.values, weights.v, weights.seen, 0.0
    low, high = np.uintp(matrix.starts[row]), np.uintp(matrix.starts[row + 1])
    if len(seen):
        for entry in range(low, high):
            column = np.uintp(columns[entry])
            total += soft(v[column], weights.shrunk - seen[column]) * values[entry]
    else:
        for entry in range(low, high):
            total += v[np.uintp(columns[entry])] * values[entry]
    return weights.scale * total + weights.intercept


@compiled
def prefetch_after(matrix: Matrix, rows: Int64, number: int, v: Float32) -> None:
    """Prefetch the weights of the row after row ``number``, and the entries of the row after that."""
    if number + 1 < len(rows):
        low, high = np.uintp(matrix.starts[rows[number + 1]]), np.uintp(matrix.starts[rows[number + 1] + 1])
        for entry in range(low, high):
            prefetch(v, np.uintp(matrix.columns[entry]))
    if number + 2 < len(rows):
        low, high = np.uintp(matrix.starts[rows[number + 2]]), np.uintp(matrix.starts[rows[number + 2] + 1])
        for entry in range(low, high, np.uintp(LINE)):
            prefetch(matrix.columns, entry)
            prefetch(matrix.values, entry)


@compiled
def margins_of(matrix: Matrix, weights: Weights) -> Float64:
    """Return the margin of each row."""
    found = np.empty(len(matrix.starts) - 1)
    for row in range(len(found)):
        found[row] = margin(matrix, row, weights)
    return found


@compiled
def slopes_of(
    loss: int, matrix: Matrix, labels: Float32, rows: Int64, weights: Weights, slopes: Float64
) -> float:
    """Write the derivative of the loss of each row of a batch to ``slopes``; return the sum of the losses."""
    total = 0.0
    for number in range(len(rows)):
        row = rows[number]
        prefetch_after(matrix, rows, number, weights.v)
        of_row, slopes[number] = value_and_slope(loss, margin(matrix, row, weights), labels[row])
        total += of_row
    return total


@compiled
def add_row(matrix: Matrix, row: int, factor: float, weights: Weights) -> None:
    """Add ``factor`` times a row to ``v``."""
    columns, values, v, seen = matrix.columns, matrix.values, weights.v, weights.seen
    low, high = np.uintp(matrix.starts[row]), np.uintp(matrix.starts[row + 1])
    shrunk, times = weights.shrunk, np.float32(factor)
    if len(seen):
        for entry in range(low, high):
            column = np.uintp(columns[entry])
            v[column] = soft(v[column], shrunk - seen[column]) + factor * values[entry]
            seen[column] = shrunk
    else:
        for entry in range(low, high):
            v[np.uintp(columns[entry])] += times * values[entry]


@compiled
def add_dense(vector: Float32, factor: float, weights: Weights) -> None:
    """Add ``factor`` times a dense vector to ``v``."""
    v, seen, shrunk, times = weights.v, weights.seen, weights.shrunk, np.float32(factor)
    if len(seen):
        for column in range(len(v)):
            v[column] = soft(v[column], shrunk - seen[column]) + factor * vector[column]
            seen[column] = shrunk
    else:
        for column in range(len(v)):
            v[column] += times * vector[column]


@compiled
def settle(weights: Weights) -> None:
    """Write the weights themselves to ``v``; the caller must then set ``scale`` to 1 and ``shrunk`` to 0."""
    v, seen = weights.v, weights.seen
    if len(seen):
        for column in range(len(v)):
            v[column] = weights.scale * soft(v[column], weights.shrunk - seen[column])
            seen[column] = 0.0
    else:
        for column in range(len(v)):
            v[column] = weights.scale * v[column]


@compiled
def norms(weights: Weights) -> tuple[float, float]:
    """Return the sum of the squares and of the magnitudes of the weights."""
    v, seen = weights.v, weights.seen
    squares, magnitudes = 0.0, 0.0
    for column in range(len(v)):
        number = soft(v[column], weights.shrunk - seen[column]) if len(seen) else float(v[column])
        squares += number * number
        magnitudes += abs(number)
    return weights.scale**2 * squares, weights.scale * magnitudes


@compiled
def pass_of_one_rank(
    loss: int,
    matrix: Matrix,
    labels: Float32,
    batches: tuple[Int64, Int64, Float64],
    weights: Weights,
    penalties: tuple[float, float],
    has_intercept: bool,
) -> tuple[float, float, float, float]:
    """Take a step for each batch; return the sum of the losses, and ``shrunk``, ``scale`` and the intercept.

    ``batches``: the order of the rows, where each batch begins in it, and its rate. ``penalties``: L2 and L1.
    """
    order, bounds, rates = batches
    l2, l1 = penalties
    total, slopes = 0.0, np.empty(len(order))
    v, seen, shrunk, scale, intercept = weights
    for step in range(len(rates)):
        low, high, rate = bounds[step], bounds[step + 1], rates[step]
        now, of_intercept = Weights(v, seen, shrunk, scale, intercept), 0.0
        for number in range(low, high):
            row = order[number]
            prefetch_after(matrix, order, number, v)
            of_row, slopes[number] = value_and_slope(loss, margin(matrix, row, now), labels[row])
            total += of_row
        scale *= 1.0 - rate * l2
        for number in range(low, high):
            if slopes[number] != 0.0:
                of_intercept += slopes[number]
                add_row(matrix, order[number], -rate / (scale * (high - low)) * slopes[number], now)
        if has_intercept:
            intercept -= rate * of_intercept / (high - low)
        shrunk += rate * l1 / scale
        if scale < SMALLEST_SCALE:
            settle(Weights(v, seen, shrunk, scale, intercept))
            shrunk, scale = 0.0, 1.0
    return total, shrunk, scale, intercept


@compiled
def mark_columns(matrix: Matrix, rows: Int64, slopes: Float64, words: Words, firsts: Index) -> int:
    """Set the bit of each column of the rows that have a slope; return how many columns are marked.

    Writes the number of columns marked before each word to ``firsts``.
    """
    for number in range(len(rows)):
        if slopes[number] != 0.0:
            low, high = matrix.starts[rows[number]], matrix.starts[rows[number] + 1]
            for given in matrix.columns[low:high]:
                column = np.uint64(given)
                words[column >> SHIFT] |= ONE << (column & MASK)
    count = 0
    for number in range(len(words)):
        firsts[number] = count
        if words[number]:
            count += ones_in(words[number])
    return count


@compiled
def list_columns(words: Words, listed: Index) -> None:
    """Write the marked columns, ascending."""
    filled = 0
    for number in range(len(words)):
        filled = write_indices(words[number], number * 64, listed, filled)


@compiled
def add_up(
    matrix: Matrix, rows: Int64, slopes: Float64, factor: float, words: Words, firsts: Index, sums: Float32
) -> None:
    """Add ``factor·slope·x`` of each row to ``sums``, an entry for each marked column."""
    for number in range(len(rows)):
        if slopes[number] != 0.0:
            times = np.float32(factor * slopes[number])
            low, high = matrix.starts[rows[number]], matrix.starts[rows[number] + 1]
            columns, values = matrix.columns[low:high], matrix.values[low:high]
            for entry in range(len(columns)):
                column = np.uint64(columns[entry])
                word = column >> SHIFT
                before = words[word] & ((ONE << (column & MASK)) - ONE)
                sums[np.uint64(firsts[word]) + np.uint64(ones_in(before))] += times * values[entry]


@compiled
def clear_words(words: Words, listed: Index) -> None:
    """Clear the words of the listed columns."""
    for column in listed:
        words[np.uint64(column) >> SHIFT] = 0
