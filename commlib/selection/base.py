"""What a selector is."""

from abc import ABC, abstractmethod

from commlib.vectors import Float32, SparseVector


class Selector(ABC):
    """Picks the entries of a dense vector that are worth sending."""

    @abstractmethod
    def select(self, vector: Float32, k: int) -> SparseVector:
        """Return exactly ``min(k, d)`` entries, ``k >= 0``, of a contiguous float32 vector of shape ``(d,)``.

        Raises :class:`commlib.errors.NonFiniteInput` where ``vector`` holds a NaN or an infinity.
        """
