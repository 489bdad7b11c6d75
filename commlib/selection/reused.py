"""A threshold found exactly once in a while and reused between (Ok-Topk, section 3.1.3)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from commlib.errors import NonFiniteInput
from commlib.selection.base import Selector
from commlib.selection.mstopk import MAGNITUDE, MSTopK, compact, count_reaching
from commlib.vectors import Float32, SparseVector, index_dtype


class Reused(Selector):
    """Exactly ``k`` entries every τ′ = ``every`` calls; between, all that reach the last of those thresholds.

    Gradients drift, and the count with them. Where fewer than ``k/2`` or more than ``2k`` reach the
    threshold, it is found anew at once: the count is bounded, also for ties and for gradients that grow.
    """

    def __init__(self, every: int = 32) -> None:
        self._every = every
        self._exact = MSTopK()
        self._calls = 0
        self._threshold = np.uint32(0)

    def select(self, vector: Float32, k: int) -> SparseVector:
        """See :meth:`Selector.select`, but for the count."""
        bits = vector.view(np.uint32)
        is_due = self._calls % self._every == 0
        count = 0 if is_due else int(count_reaching(bits, self._threshold))
        if is_due or not k <= 2 * count <= 4 * k:
            selected = self._exact.select(vector, k)
            smallest = np.abs(selected.values).min(initial=np.inf)
            self._threshold = np.float32(smallest).view(np.uint32) & MAGNITUDE
        else:
            indices = np.empty(count + 1, index_dtype(len(vector)))
            compact(bits, self._threshold, indices)
            selected = SparseVector(len(vector), indices[:-1], vector[indices[:-1]])
            if not selected.is_finite:  # such entries reach every threshold
                raise NonFiniteInput("cannot select from a vector that holds a NaN or an infinity")
        self._calls += 1
        return selected

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Selector.state_dict`."""
        return {"calls": self._calls, "threshold": int(self._threshold)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Selector.load_state_dict`."""
        self._calls = state["calls"]
        self._threshold = np.uint32(state["threshold"])
