"""What a selector is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from commlib.vectors import Float32, SparseVector


class Selector(ABC):
    """Picks the entries of a dense vector that are worth sending."""

    @abstractmethod
    def select(self, vector: Float32, k: int) -> SparseVector:
        """Return exactly ``min(k, d)`` entries, ``k >= 0``, of a contiguous float32 vector of shape ``(d,)``.

        Raises :class:`commlib.errors.NonFiniteInput` where ``vector`` holds a NaN or an infinity.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a restored selector needs to go on alike: nothing, but for those that remember."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        assert not state, f"{type(self).__name__} remembers nothing"
