"""GaussianK: the threshold that a normal distribution of the same mean and deviation would have."""

import math
from statistics import NormalDist

import numpy as np

from commlib.arrays import compiled
from commlib.entries import Bits
from commlib.selection.base import BLOCK, BlockSelector, reaching
from commlib.selection.exact import select_exactly
from commlib.vectors import Float32, SparseVector

LOWER = 0.9  # doubles the count in a normal tail at density 1 %
LOWERINGS = 40  # to 1.5 % of the predicted threshold
LARGEST = float(np.finfo(np.float32).max)


class Gaussian(BlockSelector):
    """About ``k`` entries, ``3k/4`` to ``2k`` of them: all that reach an estimated threshold.

    The estimate is ``|μ| + z·σ``, where ``k/d`` of a normal distribution lies outside ``μ ± z·σ`` (Shi et al.
    2019, Understanding Top-k Sparsification in Distributed Deep Learning). Real gradients have fewer large
    entries, so the threshold is lowered until ``3k/4`` reach it (Ok-Topk, section 5.4).

    The papers bound neither the count nor the search. Here, where more than ``2k`` entries reach the
    threshold (gradients that are all equal, or all zero), the ``2k`` largest are taken, ties by lowest index;
    where 40 lowerings by a tenth do not suffice (one outlier has made the deviation), the ``k`` largest.
    """

    at_most = 2

    def select_by_blocks(self, vector: Float32, maxima: Bits, k: int) -> SparseVector:
        threshold = predicted_threshold(vector, k)
        at_most = min(self.at_most * k, len(vector))
        for _ in range(1 + LOWERINGS):
            lowest = np.float32(min(threshold, LARGEST)).view(np.uint32)
            selected = reaching(vector, maxima, lowest, at_most, allocate=self.allocate)
            if selected is None:
                return select_exactly(vector, maxima, at_most, self.allocate)
            if 4 * selected.nnz >= 3 * k:
                return selected
            threshold *= LOWER
        return select_exactly(vector, maxima, k, self.allocate)


def predicted_threshold(vector: Float32, k: int) -> float:
    """Return ``|μ| + z·σ``, where ``k/d`` of a normal distribution lies outside ``μ ± z·σ``."""
    total, squares = _moments(vector)
    mean = total / len(vector)
    deviation = math.sqrt(max(0.0, squares / len(vector) - mean * mean))
    return abs(mean) - NormalDist().inv_cdf(k / (2 * len(vector))) * deviation


@compiled
def _moments(vector: Float32) -> tuple[float, float]:
    """Return the sum and the sum of squares, in float64, added in the same order on every processor."""
    whole = len(vector) // BLOCK
    rows = vector[: whole * BLOCK].reshape(whole, BLOCK)
    totals, squares = np.zeros(BLOCK), np.zeros(BLOCK)  # float32 squared does not overflow float64
    for row in range(whole):
        for i in range(BLOCK):
            value = np.float64(rows[row, i])
            totals[i] += value
            squares[i] += value * value
    for i in range(len(vector) - whole * BLOCK):
        value = np.float64(vector[whole * BLOCK + i])
        totals[i] += value
        squares[i] += value * value
    return totals.sum(), squares.sum()
