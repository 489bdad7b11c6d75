"""Sums of squares that travel with a reducer's last all-gather, where the mean is there in shards."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from pto.comm import Array
from pto.errors import InvalidArgument
from pto.norms import Float64, added, expect_sizes, fill, sum_of_squares, tensors_of
from pto.partition import Piece, pieces_between


class SparseEntries(Protocol):
    """Some entries of a vector, the others zero: commlib's ``SparseVector``, for one.

    ``indices``: sorted and unique, one for each of ``values``; ``None`` where ``values`` are all entries.
    """

    @property
    def indices(self) -> Any | None: ...  # noqa: D102 - described above

    @property
    def values(self) -> Any: ...  # noqa: D102


class Segments(Protocol):
    """Sums the squares of consecutive segments of vectors on a GPU: ``commlib.gpu.SegmentSquares``."""

    def squares(self, vector: Any, /) -> Any:
        """Return the sums, a float64 array of CuPy with one for each segment; the next call overwrites it."""


class ShardNorms:
    """Sums of squares that travel with a reducer's last all-gather, without a message of their own.

    A passenger of the reducers that reduce in shards of the flat gradient, entries ``low … high - 1``: who
    holds a shard of the mean computes the sums of the tensors' pieces in it. ``look(weights)`` before each
    step and ``look([])`` after it; then ``squares`` is float64 ``(2, tensors)``, those of the weights and
    those of the mean, bitwise equal on all ranks, or ``None`` if the step was skipped.

    ``sizes``: entries of each tensor. ``segments``: for weights and means on a GPU, what makes the sums of
    segments of such sizes there. The entries of a sparse shard are few, and are summed on the host.
    """

    def __init__(
        self, sizes: Sequence[int], *, segments: Callable[[Sequence[int]], Segments] | None = None
    ) -> None:
        self.sizes = tuple(sizes)
        self.squares: Float64 | None = None
        self._segments = segments
        self._ends = list(accumulate(self.sizes))
        self._weights: Sequence[Array] | None = None
        # The same few shards in every step:
        self._known: dict[tuple[int, int], tuple[Piece, ...]] = {}
        self._plans: dict[tuple[int, int], Segments] = {}

    def look(self, weights: Sequence[Any]) -> None:
        """Take the weights of the step to come: kept, not copied, unchanged until it is over.

        All tensors in their order; with ``segments`` one vector of all their entries, in a list.
        ``look([])`` lets go of them and leaves ``squares`` as they are.
        """
        if not weights and self.sizes:
            self._weights = None
            return
        expect_sizes([weights], 1, self.sizes if self._segments is None else [sum(self.sizes)])
        self._weights, self.squares = weights, None

    def count(self, low: int, high: int) -> int:
        """Return how many numbers there are about entries ``low … high - 1``."""
        return 2 * len(self._pieces(low, high))

    def numbers(self, low: int, high: int, mean: Array | SparseEntries) -> Float64:
        """Return the sums of squares about entries ``low … high - 1``; ``mean``: the mean gradient's.

        A new array: a number for each touched tensor, first those of the weights, then those of the mean.
        """
        if self._weights is None:
            raise InvalidArgument("weights: expected a call of look(weights) before each step, got none")
        pieces = self._pieces(low, high)
        if not pieces:
            return np.empty(0)
        sums = np.empty((2, len(pieces)))
        if self._segments is None:
            fill(sums[0], self._weights, pieces)
            sums[1] = _squares_of(mean, pieces)
        else:
            plan = self._plan(low, high)
            sums[0] = plan.squares(self._weights[0][low:high]).get()
            sums[1] = _squares_on_gpu(mean, pieces, plan)
        return sums.reshape(-1)

    def arrived(self, shards: Sequence[tuple[int, int, Float64]]) -> None:
        """Take ``(low, high, numbers)`` of all shards, in the order in which they are added up."""
        parts = [(tensors_of(self._pieces(low, high)), own.reshape(2, -1)) for low, high, own in shards]
        self.squares = added(parts, 2, len(self.sizes))

    def _pieces(self, low: int, high: int) -> tuple[Piece, ...]:
        if (low, high) not in self._known:
            self._known[low, high] = pieces_between(self._ends, low, high)
        return self._known[low, high]

    def _plan(self, low: int, high: int) -> Segments:
        if (low, high) not in self._plans:
            assert self._segments is not None
            sizes = [piece.high - piece.low for piece in self._pieces(low, high)]
            self._plans[low, high] = self._segments(sizes)
        return self._plans[low, high]


def _squares_of(mean: Array | SparseEntries, pieces: Sequence[Piece]) -> list[float]:
    """Return the sums of squares of a shard that is the pieces' concatenation, or of the entries it has."""
    if isinstance(mean, np.ndarray):
        return _cut_squares(None, mean, pieces)
    return _cut_squares(mean.indices, mean.values, pieces)


def _squares_on_gpu(mean: Any, pieces: Sequence[Piece], plan: Segments) -> Any:
    indices, values = getattr(mean, "indices", None), getattr(mean, "values", mean)
    if indices is None:
        return plan.squares(values).get()
    return _cut_squares(indices.get(), values.get(), pieces)


def _cut_squares(indices: Array | None, values: Array, pieces: Sequence[Piece]) -> list[float]:
    cuts = np.cumsum([piece.high - piece.low for piece in pieces])[:-1]
    if indices is not None:
        cuts = np.searchsorted(indices, cuts.astype(indices.dtype))
    return [sum_of_squares(entries) for entries in np.split(values, cuts)]
