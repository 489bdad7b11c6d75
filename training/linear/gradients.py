"""The gradient of a batch as a ``SparseVector`` from the start: entries in the columns that its rows have."""

import numpy as np

from commlib import SparseVector
from commlib.vectors import index_dtype
from training.linear import columns
from training.linear.kernels import Float64, Int64
from training.linear.rows import Rows


class Gradients:
    """Makes gradients of batches of ``rows``, with an entry for the intercept behind them if there is one.

    Besides what a gradient has it holds 1.5 bits for each feature: which columns are there, and how many
    are before them.
    """

    def __init__(self, rows: Rows, *, intercept: bool) -> None:
        self._rows, self._intercept = rows, intercept
        self._size = rows.features + intercept
        words = -(-rows.features // 64)
        self._words = np.zeros(words, np.uint64)
        self._firsts = np.empty(words, np.int32)

    def of(self, numbers: Int64, slopes: Float64, factor: float) -> SparseVector:
        """Return ``factor·Σ slopeᵢ·xᵢ`` over the rows of these numbers; those with slope 0 give no entry."""
        matrix, words, firsts = self._rows.matrix, self._words, self._firsts
        columns.mark_columns(matrix, numbers, slopes, words)
        count = columns.count_columns(words, firsts)
        indices = np.empty(count + self._intercept, index_dtype(self._size))
        sums = np.zeros(count + self._intercept, np.float32)
        columns.list_columns(words, indices)
        columns.add_up(matrix, numbers, slopes, factor, words, firsts, sums)
        columns.clear_words(words, indices[:count])
        if self._intercept:
            indices[count], sums[count] = self._rows.features, factor * slopes.sum()
        return SparseVector.trusted(self._size, indices, sums)
