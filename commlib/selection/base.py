"""What a selector is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from commlib.vectors import Float32, SparseVector


class Selector(ABC):
    """Picks the entries of a dense vector that are worth sending, ``at_most`` times ``k`` of them."""

    at_most: ClassVar[int] = 1

    @abstractmethod
    def select(self, vector: Float32, k: int) -> SparseVector:
        """Return ``min(k, d)`` entries, ``k >= 0``, of a contiguous float32 vector of shape ``(d,)``.

        Selectors that reuse or guess a threshold return another number of entries: their docstring bounds it.
        Raises :class:`commlib.errors.NonFiniteInput` where ``vector`` holds a NaN or an infinity.
        """

    def select_sum(self, gradient: Float32, residual: Float32, k: int, out: Float32) -> SparseVector:
        """Write ``gradient + residual`` to ``out`` and select from it: bitwise what ``select`` returns.

        All three are contiguous float32 vectors of shape ``(d,)``; the caller owns ``out``, and finds the sum
        in it also where it is not finite. The entries returned are valid until the next ``select_sum``.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # select says it with an exception
            np.add(gradient, residual, out=out)
        return self.select(out, k)

    def state_dict(self) -> dict[str, Any]:
        """Return what a restored selector needs to go on alike: nothing, but for those that remember."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        assert not state, f"{type(self).__name__} remembers nothing"
