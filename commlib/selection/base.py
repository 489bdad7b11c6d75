"""The interface of selectors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from commlib.vectors import Float32, SparseVector


class Selector(ABC):
    """Selects the entries of a dense vector that are sent: at most ``at_most · k`` of them."""

    at_most: ClassVar[int] = 1

    @abstractmethod
    def select(self, vector: Float32, k: int) -> SparseVector:
        """Return ``min(k, d)`` entries, ``k >= 0``, of a contiguous float32 vector of shape ``(d,)``.

        Selectors that reuse or guess a threshold return another number of entries: their docstring bounds it.
        Raises :class:`commlib.errors.NonFiniteInput` where ``vector`` holds a NaN or an infinity.
        """

    def select_sum(self, gradient: Float32, residual: Float32, k: int, out: Float32) -> SparseVector:
        """Write ``gradient + residual`` to ``out``; return bitwise what ``select(out, k)`` returns.

        All three are contiguous float32 vectors of shape ``(d,)``. The caller owns ``out``, and finds the
        sum there even if it is not finite. The result is valid until the next ``select_sum``.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # select raises for them
            np.add(gradient, residual, out=out)
        return self.select(out, k)

    def state_dict(self) -> dict[str, Any]:
        """Return the selector's state; empty for selectors without state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        assert not state, f"{type(self).__name__} has no state"
