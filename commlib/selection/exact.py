"""Exact top-k: a threshold from the largest magnitude of every 64 entries, as MSTopK searches for one.

Where ``k`` blocks have a maximum that reaches a threshold, at least ``k`` entries reach it. So the ``k``-th
largest block maximum is a lower threshold as in the paper: few more than ``k`` entries reach it, and they are
in about ``k`` blocks, so that the second pass leaves most of the vector unread.
"""

from typing import Any

import numpy as np

from commlib.entries import Bits
from commlib.selection.accumulate import BlockSelector
from commlib.selection.blocks import BLOCK, reaching
from commlib.selection.radix import keep_largest, kth_largest
from commlib.vectors import Float32, SparseVector


class Exact(BlockSelector):
    """The ``k`` entries of largest magnitude, ties by lowest index, in little more than one pass.

    The definition of HiTopKComm, equation 2, by the threshold search of its section 3.1 without the
    approximation. Where ``k`` is a large part of ``d``, or the large entries are in few blocks, the threshold
    comes from all entries: one more pass.
    """

    def select_by_blocks(self, vector: Float32, maxima: Bits, k: int) -> SparseVector:
        """See :meth:`BlockSelector.select_by_blocks`."""
        candidates = None
        if 5 * k <= 4 * len(maxima):  # measured: nearer to all blocks, too many entries reach the threshold
            lowest = kth_largest(maxima, k, spare=k // 16)
            candidates = reaching(vector, maxima, lowest, at_most=4 * k + BLOCK, enough=k, room=self.room)
        if candidates is None:
            lowest = kth_largest(vector.view(np.uint32), k, spare=k)
            candidates = reaching(vector, maxima, lowest, at_most=2 * k + BLOCK, enough=k, room=self.room)
        assert candidates is not None, "k + spare entries at most, and the ties of one block"
        return keep_largest(candidates, k)


def paper_search(
    vector: Float32, k: int, samplings: int = 30, *, arrays: Any = np
) -> tuple[float, float, int, int]:
    """Return the paper's two thresholds and their counts (HiTopKComm, algorithm 1, lines 1–24).

    ``(upper, lower, above_upper, above_lower)``: ``above_upper <= k`` entries reach the upper threshold, or
    the search found none and ``upper`` is 0 with ``above_upper`` 0. The reference that tests and benchmarks
    compare with; it bisects between the mean and the largest magnitude, so the lower threshold stays 0 (and
    counts everything) where the k-th value lies below the mean. ``arrays``: NumPy, or the
    vector's own module.
    """
    magnitudes = arrays.abs(vector)
    mean, largest = float(magnitudes.mean(dtype=arrays.float32)), float(magnitudes.max())
    low, high = 0.0, 1.0
    upper, lower = 0.0, 0.0
    above_upper, above_lower = 0, len(vector)
    for _ in range(samplings):
        ratio = low + (high - low) / 2
        threshold = mean + ratio * (largest - mean)
        count = int(arrays.count_nonzero(magnitudes >= threshold))
        if count <= k:
            high = ratio
            if count > above_upper:
                above_upper, upper = count, threshold
        else:
            low = ratio
            if count < above_lower:
                above_lower, lower = count, threshold
    return upper, lower, above_upper, above_lower
