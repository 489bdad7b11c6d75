"""Numba kernels that add up rows by their columns, with a bit for each column that there is."""

import numpy as np

from commlib.compiled import compiled
from commlib.entries import ones_in
from commlib.vectors import Float32, Index
from training.linear.kernels import Float64, Int64, Matrix, Words


@compiled
def mark_columns(matrix: Matrix, rows: Int64, slopes: Float64, words: Words) -> None:
    """Set the bit of each column that a row with a slope has; all bits were 0."""
    for number in range(len(rows)):
        if slopes[number] != 0.0:
            for entry in range(matrix.starts[rows[number]], matrix.starts[rows[number] + 1]):
                column = matrix.columns[entry]
                words[column >> 6] |= np.uint64(1) << np.uint64(column & 63)


@compiled
def count_columns(words: Words, firsts: Index) -> int:
    """Write to ``firsts`` how many columns are marked before each word; return how many there are."""
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
        word = words[number]
        while word:
            lowest_bit = word & (~word + np.uint64(1))
            listed[filled] = number * 64 + ones_in(lowest_bit - np.uint64(1))
            filled += 1
            word ^= lowest_bit


@compiled
def add_up(
    matrix: Matrix, rows: Int64, slopes: Float64, factor: float, words: Words, firsts: Index, sums: Float32
) -> None:
    """Add ``factor·slope·x`` of each row to ``sums``, which has an entry for each marked column."""
    for number in range(len(rows)):
        if slopes[number] != 0.0:
            times = np.float32(factor * slopes[number])
            for entry in range(matrix.starts[rows[number]], matrix.starts[rows[number] + 1]):
                column = matrix.columns[entry]
                word, bit = column >> 6, np.uint64(1) << np.uint64(column & 63)
                place = firsts[word] + ones_in(words[word] & (bit - np.uint64(1)))
                sums[place] += times * matrix.values[entry]


@compiled
def clear_words(words: Words, listed: Index) -> None:
    """Unmark the columns that are listed."""
    for column in listed:
        words[column >> 6] = 0
