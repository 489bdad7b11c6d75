"""The first sweep of the selectors that look at blocks: over a vector, or over a sum that it makes."""

from abc import abstractmethod

import numpy as np

from commlib.compiled import compiled
from commlib.selection.base import Selector
from commlib.selection.blocks import BLOCK, MAGNITUDE, Bits, block_maxima, check_finite
from commlib.vectors import Float32, SparseVector


class BlockSelector(Selector):
    """A selector whose one full pass over the vector finds the largest magnitude of every 64 entries."""

    def select(self, vector: Float32, k: int) -> SparseVector:
        """See :meth:`Selector.select`."""
        return self._select_checked(vector, block_maxima(vector.view(np.uint32)), k)

    def select_sum(self, gradient: Float32, residual: Float32, k: int, out: Float32) -> SparseVector:
        """See :meth:`Selector.select_sum`; what ``accumulate`` has just added is not read once more."""
        return self._select_checked(out, accumulate(gradient, residual, out), k)

    def _select_checked(self, vector: Float32, maxima: Bits, k: int) -> SparseVector:
        check_finite(maxima)
        k = min(k, len(vector))
        return self.select_by_blocks(vector, maxima, k) if k else SparseVector.empty(len(vector))

    @abstractmethod
    def select_by_blocks(self, vector: Float32, maxima: Bits, k: int) -> SparseVector:
        """Select from a finite ``vector`` whose block maxima are at hand, ``1 <= k <= d``."""


@compiled
def accumulate(gradient: Float32, residual: Float32, out: Float32) -> Bits:
    """Write ``gradient + residual`` to ``out``, all float32 of shape ``(d,)``; return its block maxima."""
    whole = len(out) // BLOCK
    end, shape = whole * BLOCK, (whole, BLOCK)
    gradients, residuals = gradient[:end].reshape(shape), residual[:end].reshape(shape)
    sums, bits = out[:end].reshape(shape), out[:end].view(np.uint32).reshape(shape)
    maxima = np.empty((len(out) + BLOCK - 1) // BLOCK, np.uint32)
    for block in range(whole):
        for i in range(BLOCK):
            sums[block, i] = gradients[block, i] + residuals[block, i]
        largest = np.uint32(0)
        for i in range(BLOCK):
            largest = max(largest, bits[block, i] & MAGNITUDE)
        maxima[block] = largest
    if end < len(out):
        out[end:] = gradient[end:] + residual[end:]
        maxima[whole] = (out[end:].view(np.uint32) & MAGNITUDE).max()
    return maxima
