"""Deep Gradient Compression's selection: a threshold from a sample, then top-k of what reaches it."""

import math

import numpy as np

from commlib.entries import Bits
from commlib.selection.base import BLOCK, BlockSelector, reaching
from commlib.selection.exact import keep_largest, kth_largest, select_exactly
from commlib.vectors import Float32, SparseVector

SAMPLE = 1 << 14  # entries of a long vector
LOWERINGS = 2


class DGC(BlockSelector):
    """The ``k`` entries of largest magnitude, ties by lowest index (Lin et al. 2018, section 5).

    1. A sample: every ``s``-th entry, a ninth of a short vector, about 16,384 of a long one.
    2. Its threshold for density ``k/d``, four standard deviations of the count on the low side. Where fewer
       than ``k`` entries reach it, the rank in the sample is doubled, twice at most.
    3. The exact top-k of the entries that reach it.

    The paper takes fewer than ``k`` as they come; here only the cost depends on how well the sample
    represents the vector. Where the threshold is far off, the search of ``exact`` finds it.
    """

    def select_by_blocks(self, vector: Float32, maxima: Bits, k: int) -> SparseVector:
        stride = max(len(vector) // SAMPLE, 8) | 1  # odd: never down one column of a matrix of even width
        sample = np.ascontiguousarray(vector[::stride]).view(np.uint32)
        expected = k / stride
        rank = math.ceil(expected + 4 * math.sqrt(expected)) + 4
        for _ in range(1 + LOWERINGS):
            if rank > len(sample):
                break
            lowest = kth_largest(sample, rank, spare=0)
            at_most = 2 * rank * stride + BLOCK
            candidates = reaching(vector, maxima, lowest, at_most=at_most, enough=k, allocate=self.allocate)
            if candidates is None:
                break
            if candidates.nnz >= k:
                return keep_largest(candidates, k)
            rank *= 2
        return select_exactly(vector, maxima, k, self.allocate)
