"""Numba kernels that add up rows by their columns, with a bit for each column that there is."""

import numpy as np

from commlib.arrays import compiled
from commlib.entries import ones_in
from commlib.vectors import Float32, Index
from training.linear.kernels import Float64, Int64, Matrix, Words

# Columns are unsigned where they are indices, as in the kernels of the model.
ONE, SHIFT, MASK = np.uint64(1), np.uint64(6), np.uint64(63)  # 64 columns a word


@compiled
def mark_columns(matrix: Matrix, rows: Int64, slopes: Float64, words: Words) -> None:
    """Set the bit of each column that a row with a slope has; all bits were 0."""
    for number in range(len(rows)):
        if slopes[number] != 0.0:
            low, high = matrix.starts[rows[number]], matrix.starts[rows[number] + 1]
            for given in matrix.columns[low:high]:
                column = np.uint64(given)
                words[column >> SHIFT] |= ONE << (column & MASK)


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
            lowest_bit = word & (~word + ONE)
            listed[filled] = number * 64 + ones_in(lowest_bit - ONE)
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
            low, high = matrix.starts[rows[number]], matrix.starts[rows[number] + 1]
            columns, values = matrix.columns[low:high], matrix.values[low:high]
            for entry in range(len(columns)):
                column = np.uint64(columns[entry])
                word = column >> SHIFT
                before = words[word] & ((ONE << (column & MASK)) - ONE)
                sums[np.uint64(firsts[word]) + np.uint64(ones_in(before))] += times * values[entry]


@compiled
def clear_words(words: Words, listed: Index) -> None:
    """Unmark the columns that are listed."""
    for column in listed:
        words[np.uint64(column) >> SHIFT] = 0
