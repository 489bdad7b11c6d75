"""A threshold found exactly every τ′ steps and reused between them (Ok-Topk, section 3.1.3)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from commlib.entries import Bits
from commlib.errors import InvalidArgument
from commlib.selection.base import BlockSelector, reaching
from commlib.selection.exact import select_exactly
from commlib.vectors import Float32, SparseVector


class Reused(BlockSelector):
    """Exactly ``k`` entries every τ′ = ``every`` calls; in between, all that reach the last exact threshold.

    Gradients drift, and the count with them. Where fewer than ``k/2`` or more than ``2k`` reach the
    threshold, it is computed again at once: the count is bounded, also for ties and for gradients that grow.
    """

    at_most = 2

    def __init__(self, every: int = 32) -> None:
        super().__init__()
        if type(every) is not int or every < 1:
            raise InvalidArgument(f"every: expected a whole number of calls from 1, got {every!r}")
        self._every = every
        self._calls = 0
        self._threshold = np.uint32(0)

    def select_by_blocks(self, vector: Float32, maxima: Bits, k: int) -> SparseVector:
        selected = None
        if self._calls % self._every:
            selected = reaching(
                vector, maxima, self._threshold, at_most=self.at_most * k, allocate=self.allocate
            )
        if selected is None or 2 * selected.nnz < k:
            selected = select_exactly(vector, maxima, k, self.allocate)
            self._threshold = np.abs(selected.values).min().view(np.uint32)
        self._calls += 1
        return selected

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls, "threshold": int(self._threshold)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._calls = state["calls"]
        self._threshold = np.uint32(state["threshold"])
