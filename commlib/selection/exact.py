"""Top-k by partial sorting: the definition, and what every other selector is compared with."""

import numpy as np

from commlib.errors import NonFiniteInput
from commlib.selection.base import Selector
from commlib.vectors import Float32, SparseVector, index_dtype


class Exact(Selector):
    """The ``k`` entries of largest magnitude, ties by lowest index (HiTopKComm, equation 2)."""

    def select(self, vector: Float32, k: int) -> SparseVector:
        """See :meth:`Selector.select`."""
        magnitudes = np.abs(vector)
        if not np.isfinite(magnitudes).all():
            raise NonFiniteInput("cannot select from a vector that holds a NaN or an infinity")
        size = len(vector)
        k = min(k, size)
        if k == 0:
            return SparseVector.empty(size)
        threshold = np.partition(magnitudes, size - k)[size - k]
        above = np.flatnonzero(magnitudes > threshold)
        ties = np.flatnonzero(magnitudes == threshold)[: k - len(above)]
        indices = np.sort(np.concatenate([above, ties])).astype(index_dtype(size))
        return SparseVector.trusted(size, indices, vector[indices])
