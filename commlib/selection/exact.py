"""Exact top-k: a threshold from the largest magnitude of every 64 entries, as MSTopK searches for one.

Where ``k`` blocks have a maximum that reaches a threshold, at least ``k`` entries reach it. So the ``k``-th
largest block maximum is a lower threshold as in the paper: few more than ``k`` entries reach it, and they are
in about ``k`` blocks, so that the second pass leaves most of the vector unread.
"""

from functools import partial

import numpy as np
import numpy.typing as npt

from commlib.arrays import Allocate, compiled
from commlib.entries import MAGNITUDE, Bits
from commlib.selection.base import BLOCK, BlockSelector, accumulate_reaching, reaching
from commlib.vectors import Float32, Index, SparseVector


class Exact(BlockSelector):
    """The ``k`` entries of largest magnitude, ties by lowest index, in little more than one pass.

    The definition of HiTopKComm, equation 2, by the threshold search of its section 3.1 without the
    approximation. Where ``k`` is a large part of ``d``, or the large entries are in few blocks, the threshold
    comes from all entries: one more pass. Before that, a threshold near that of the latest selection is
    tried: if ``k`` entries reach it, and not many more, no search is needed. That threshold changes no
    result, so it is not part of the state.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: float | None = None  # the smallest magnitude that was selected
        self._ratio = FIRST_RATIO  # of the threshold that is tried first to the latest
        self._found = list[SparseVector | None]()  # what reaches it in the sum that is selected from

    def select_sum(self, gradient: Float32, residual: Float32, k: int, out: Float32) -> SparseVector:
        k = min(k, len(out))
        if self._latest is None or not k:
            return super().select_sum(gradient, residual, k, out)
        self.allocate = self._workspace.get
        maxima = self.allocate("maxima", -(-len(out) // BLOCK), np.uint32)
        at_most, guess = _most_candidates(k, len(maxima)), self._guess(self._latest)
        found = accumulate_reaching(gradient, residual, out, maxima, guess, at_most, k, self.allocate)
        self._found.append(found)
        try:
            return self._select_checked(out, maxima, k)
        finally:
            self._found.clear()

    def _guess(self, latest: float) -> np.uint32:
        """Return the bits of the threshold that is tried first."""
        return np.float32(min(self._ratio * latest, LARGEST)).view(np.uint32)

    def select_by_blocks(self, vector: Float32, maxima: Bits, k: int) -> SparseVector:
        selected = self._near_the_latest(vector, maxima, k)
        if selected is None:
            selected = select_exactly(vector, maxima, k, self.allocate)
        self._latest = float(np.abs(selected.values).min())
        return selected

    def _near_the_latest(self, vector: Float32, maxima: Bits, k: int) -> SparseVector | None:
        """Return what :func:`select_exactly` does; ``None`` where too few or too many reach the guess.

        Residuals grow, and gather below the threshold: the next guess is then lower or higher.
        """
        if self._latest is None:
            return None
        if self._found:
            candidates = self._found.pop()
        else:
            guess, at_most = self._guess(self._latest), _most_candidates(k, len(maxima))
            candidates = reaching(vector, maxima, guess, at_most, k, self.allocate)
        if candidates is None:
            self._ratio = min(RAISED * self._ratio, HIGHEST_RATIO)
        elif candidates.nnz < k:
            self._ratio = max(LOWERED * self._ratio, LOWEST_RATIO)
        else:
            return keep_largest(candidates, k)
        return None


def select_exactly(vector: Float32, maxima: Bits, k: int, allocate: Allocate) -> SparseVector:
    """Return the ``k`` entries of largest magnitude, see :meth:`BlockSelector.select_by_blocks`."""
    reach, candidates = partial(reaching, vector, maxima, enough=k, allocate=allocate), None
    if _are_few(k, len(maxima)):
        candidates = reach(kth_largest(maxima, k, spare=k // 16), at_most=_most_candidates(k, len(maxima)))
    if candidates is None:
        lowest = kth_largest(vector.view(np.uint32), k, spare=k)
        candidates = reach(lowest, at_most=2 * k + BLOCK)
    assert candidates is not None, "k + spare entries at most, and the ties of one block"
    return keep_largest(candidates, k)


def _are_few(k: int, blocks: int) -> bool:
    """Return whether ``k`` is few of all blocks: of more, too many entries reach a threshold (measured)."""
    return 5 * k <= 4 * blocks


def _most_candidates(k: int, blocks: int) -> int:
    """Return how many entries may reach a threshold: with more, a pass that finds a better one is cheaper."""
    return (4 if _are_few(k, blocks) else 2) * k + BLOCK


# The guess over the latest threshold: at first, what it is multiplied by after a miss, and its bounds.
FIRST_RATIO, RAISED, LOWERED = 0.95, 1.04, 0.92
LOWEST_RATIO, HIGHEST_RATIO = 0.5, 2.0
LARGEST = float(np.finfo(np.float32).max)
LEADING = 20  # the shift that leaves the sign-less leading bits: the exponent and three of the mantissa
BINS = 1 << 11

Counts = npt.NDArray[np.int64]


def keep_largest(candidates: SparseVector, k: int) -> SparseVector:
    """Return the ``k`` entries of largest magnitude, ties by lowest index, of ``k`` or more that are finite.

    The result shares the arrays of ``candidates``, which are overwritten.
    """
    indices, values = candidates.indices_or_range, candidates.values
    _filter(indices, values.view(np.uint32), k)
    return SparseVector.trusted(candidates.size, indices[:k], values[:k])


@compiled
def kth_largest(bits: Bits, k: int, spare: int) -> np.uint32:
    """Return the bits of a magnitude that at least ``k`` entries reach, ``1 <= k <= len(bits)``.

    It is the ``k``-th largest, or a lower one that no more than ``k + spare`` entries reach.
    """
    counts = _leading_histogram(bits)
    digit, rank = _descend(counts, k)
    kth = np.uint32(digit << LEADING)
    for shift in (10, 0):
        if counts[digit] - rank <= spare:
            break
        counts = _next_histogram(bits, kth, np.uint32(shift))
        digit, rank = _descend(counts, rank)
        kth |= np.uint32(digit << shift)
    return kth


@compiled
def _descend(counts: Counts, k: int) -> tuple[int, int]:
    """Return the bin that holds the ``k``-th largest, and its rank within the bin."""
    digit = len(counts) - 1
    while counts[digit] < k:
        k -= counts[digit]
        digit -= 1
    return digit, k


@compiled
def _leading_histogram(bits: Bits) -> Counts:
    # Neighbours of equal exponent would wait for each other's increment: four tables take turns.
    tables = np.zeros((4, BINS), np.int64)
    for i in range(len(bits)):
        tables[i & 3, (bits[i] & MAGNITUDE) >> LEADING] += 1
    counts: Counts = tables.sum(axis=0)
    return counts


@compiled
def _next_histogram(bits: Bits, prefix: np.uint32, shift: np.uint32) -> Counts:
    """Count the ten bits from ``shift`` on, of those that agree with ``prefix`` in the bits above."""
    known = shift + np.uint32(10)
    others = np.uint32(1 << 10)  # a bin for those that do not agree: no branch to mispredict
    tables = np.zeros((4, others + 1), np.int64)
    for i in range(len(bits)):
        magnitude = bits[i] & MAGNITUDE
        agrees = magnitude >> known == prefix >> known
        tables[i & 3, (magnitude >> shift) & np.uint32(0x3FF) if agrees else others] += 1
    counts: Counts = tables.sum(axis=0)[:others]
    return counts


@compiled
def _filter(indices: Index, bits: Bits, k: int) -> None:
    """Move the ``k`` of largest magnitude to the front, in order."""
    lowest = kth_largest(bits, k, 0)
    surplus = -k
    for i in range(len(bits)):
        surplus += (bits[i] & MAGNITUDE) >= lowest
    without_ties = len(bits)  # from here on: the last ones are too many
    while surplus > 0:
        without_ties -= 1
        surplus -= (bits[without_ties] & MAGNITUDE) == lowest
    filled = 0
    for i in range(len(bits)):
        if i == without_ties:
            lowest = np.uint32(lowest + 1)
        keeps = (bits[i] & MAGNITUDE) >= lowest
        indices[filled], bits[filled] = indices[i], bits[i]
        filled += keeps  # a dropped one is overwritten by the next: no branch to mispredict
