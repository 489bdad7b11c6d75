"""The first pass of block selectors: over a vector, or over the sum that the pass computes."""

from abc import abstractmethod

import numpy as np

from commlib.compiled import compiled
from commlib.entries import MAGNITUDE, Bits
from commlib.memory import Room, Workspace, new_array
from commlib.selection.base import Selector
from commlib.selection.blocks import BLOCK, block_maxima, check_finite
from commlib.vectors import Float32, SparseVector


class BlockSelector(Selector):
    """A selector whose one full pass over the vector finds the largest magnitude of every 64 entries.

    ``room(name, length, dtype)`` allocates the arrays of a call.
    """

    def __init__(self, room: Room = new_array) -> None:
        self.room = room
        self._workspace = Workspace()

    def select(self, vector: Float32, k: int) -> SparseVector:
        """See :meth:`Selector.select`."""
        self.room = new_array
        return self._select_checked(vector, block_maxima(vector.view(np.uint32)), k)

    def select_sum(self, gradient: Float32, residual: Float32, k: int, out: Float32) -> SparseVector:
        """See :meth:`Selector.select_sum`; ``accumulate`` finds the maxima while it adds."""
        self.room = self._workspace.get
        maxima = self.room("maxima", -(-len(out) // BLOCK), np.uint32)
        accumulate(gradient, residual, out, maxima)
        return self._select_checked(out, maxima, k)

    def _select_checked(self, vector: Float32, maxima: Bits, k: int) -> SparseVector:
        check_finite(maxima)
        k = min(k, len(vector))
        return self.select_by_blocks(vector, maxima, k) if k else SparseVector.empty(len(vector))

    @abstractmethod
    def select_by_blocks(self, vector: Float32, maxima: Bits, k: int) -> SparseVector:
        """Select from a finite ``vector`` with these block maxima, ``1 <= k <= d``."""


@compiled
def accumulate(gradient: Float32, residual: Float32, out: Float32, maxima: Bits) -> None:
    """Write ``gradient + residual`` to ``out``, all float32 of shape ``(d,)``, and fill its block maxima."""
    whole = len(out) // BLOCK
    end, shape = whole * BLOCK, (whole, BLOCK)
    gradients, residuals = gradient[:end].reshape(shape), residual[:end].reshape(shape)
    sums, bits = out[:end].reshape(shape), out[:end].view(np.uint32).reshape(shape)
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
