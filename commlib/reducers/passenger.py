"""Numbers about the mean that travel with it, so that they need no message of their own."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from commlib.errors import InvalidArgument
from commlib.vectors import Float32, SparseVector

Float64 = npt.NDArray[np.float64]

NUMBER_BYTES = 8


class Passenger(Protocol):
    """Has numbers to say about parts of the mean, such as the sums of squares that LARS needs.

    Every rank computes those about the part that it holds before the others do, and gets those about all
    parts. Which parts there are is the reducer's matter; together they are ``0 … d − 1``.
    """

    def look(self, arrays: list[npt.NDArray[Any]], /) -> None:
        """Take notice of ``arrays`` before a step: what the caller has beside the gradient, its weights.

        They lie where the gradient does, as ``mean`` will: in host memory, or on the GPU. They are lent, not
        to be written to; ``look([])`` after the step ends the loan.
        """

    def count(self, low: int, high: int, /) -> int:
        """Return how many numbers there are about entries ``low … high − 1``; equal in every step."""

    def numbers(self, low: int, high: int, mean: SparseVector | Float32, /) -> Float64:
        """Return the numbers about entries ``low … high − 1`` of the mean, shape ``(count(low, high),)``.

        A NumPy array, also where the mean is on a GPU.

        ``mean``: only these entries, dense or as a ``SparseVector`` of size ``high − low``; not to be written
        to or kept. Beside it, only what is equal on all ranks may count: several may hold the same part.
        They are thrown away where the step is skipped.
        """

    def arrived(self, shards: list[tuple[int, int, Float64]], /) -> None:
        """Take ``(low, high, numbers)`` of all parts, in their order: bitwise the same on every rank.

        Called before ``reduce`` returns, after each step that counts.
        """


class Carriage:
    """A passenger in a reducer, and how many numbers it has about each part.

    ``parts``: ``(low, high)`` of each rank of the exchange that the numbers travel with; where ``low`` is
    ``high`` a rank holds nothing, and the passenger is not asked.
    """

    def __init__(self, passenger: Passenger, parts: Sequence[tuple[int, int]]) -> None:
        self.passenger = passenger
        self._parts = list(parts)
        self.counts = np.array(
            [passenger.count(low, high) if low < high else 0 for low, high in parts], np.int64
        )
        held = [part for part, (low, high) in enumerate(parts) if low < high]
        self._in_order = sorted(held, key=lambda part: self._parts[part])

    @property
    def seats(self) -> list[int]:
        """Return the counts in the order of the parts: equal on ranks whose passengers are."""
        return [int(self.counts[part]) for part in self._in_order]

    def load(self, part: int, mean: SparseVector | Float32) -> Float64:
        """Return the numbers about a part, a contiguous array of ``counts[part]``."""
        low, high = self._parts[part]
        if low == high:
            return np.empty(0)
        numbers, count = self.passenger.numbers(low, high, mean), self.counts[part]
        if numbers.dtype != np.float64 or numbers.shape != (count,):
            raise InvalidArgument(
                f"passenger: expected {count} float64 numbers about entries {low} … {high - 1}, "
                f"got {numbers.dtype} of shape {numbers.shape}"
            )
        return np.ascontiguousarray(numbers)

    def load_integers(self, part: int, mean: SparseVector | Float32) -> list[int]:
        """Return the bits of the numbers about a part as integers, as many for each part."""
        padded = np.zeros(self.counts.max())
        padded[: self.counts[part]] = self.load(part, mean)
        integers: list[int] = padded.view(np.int64).tolist()
        return integers

    def unload_integers(self, rows: npt.NDArray[np.int64]) -> list[Float64]:
        """Return the numbers about each part, from what ``load_integers`` made of them."""
        return [row[:count].view(np.float64) for row, count in zip(rows, self.counts, strict=True)]

    def deliver(self, numbers: Sequence[Float64]) -> None:
        """Hand the numbers about each part to the passenger."""
        self.passenger.arrived([(*self._parts[part], numbers[part]) for part in self._in_order])
