"""MSTopK made exact: a histogram tests 2,048 thresholds in the pass in which the paper's search tests one.

Magnitudes of finite floats order like their bits without the sign. The first pass counts the leading eleven
of these (the exponent and three bits of the mantissa); the k-th value lies in one known bin. The second pass
keeps what lies in that bin or above, and only these few are looked at bit by bit.
"""

import numpy as np
import numpy.typing as npt

from commlib.errors import NonFiniteInput
from commlib.selection.base import Selector
from commlib.selection.compiled import compiled
from commlib.vectors import Float32, Index, SparseVector, index_dtype

MAGNITUDE = np.uint32(0x7FFF_FFFF)
LEADING = 20  # the shift that leaves the sign-less leading bits, 11 of 31
BINS = 1 << (31 - LEADING)
FIRST_NON_FINITE_BIN = 0x7F80_0000 >> LEADING

Bits = npt.NDArray[np.uint32]


class MSTopK(Selector):
    """The ``k`` entries of largest magnitude, ties by lowest index, in two passes over the vector.

    The threshold search of HiTopKComm, section 3.1, without its approximation.
    """

    def select(self, vector: Float32, k: int) -> SparseVector:
        """See :meth:`Selector.select`."""
        size = len(vector)
        bits = vector.view(np.uint32)
        counts = _histogram(bits)
        if counts[FIRST_NON_FINITE_BIN:].any():
            raise NonFiniteInput("cannot select from a vector that holds a NaN or an infinity")
        k = min(k, size)
        if k == 0:
            return SparseVector.empty(size)
        from_bin = counts[::-1].cumsum()[::-1]  # from_bin[b]: entries in bin b or above
        threshold_bin = int(np.flatnonzero(from_bin >= k)[-1])
        candidates = np.empty(from_bin[threshold_bin] + 1, index_dtype(size))
        compact(bits, np.uint32(threshold_bin << LEADING), candidates)
        indices = _keep_largest(bits, candidates[:-1], k, threshold_bin)
        return SparseVector(size, indices, vector[indices])


@compiled
def _histogram(bits: Bits) -> npt.NDArray[np.int64]:
    # Neighbours of equal exponent would wait for each other's increment: four tables take turns.
    tables = np.zeros((4, BINS), np.int64)
    whole = len(bits) // 4 * 4
    for i in range(0, whole, 4):
        tables[0, (bits[i] & MAGNITUDE) >> LEADING] += 1
        tables[1, (bits[i + 1] & MAGNITUDE) >> LEADING] += 1
        tables[2, (bits[i + 2] & MAGNITUDE) >> LEADING] += 1
        tables[3, (bits[i + 3] & MAGNITUDE) >> LEADING] += 1
    for i in range(whole, len(bits)):
        tables[0, (bits[i] & MAGNITUDE) >> LEADING] += 1
    counts: npt.NDArray[np.int64] = tables[0] + tables[1] + tables[2] + tables[3]
    return counts


@compiled
def count_reaching(bits: Bits, lowest: np.uint32) -> int:
    """Return how many magnitudes have the bits ``lowest`` or above; NaN and infinity always have."""
    count = 0
    for i in range(len(bits)):
        count += (bits[i] & MAGNITUDE) >= lowest
    return count


@compiled
def compact(bits: Bits, lowest: np.uint32, indices: Index) -> None:
    """Write the positions whose magnitudes reach ``lowest``; ``indices`` has one place to spare."""
    filled = 0
    for i in range(len(bits)):
        indices[filled] = i  # overwritten by the next one unless it counts: no branch to mispredict
        filled += (bits[i] & MAGNITUDE) >= lowest


@compiled
def _keep_largest(bits: Bits, candidates: Index, k: int, threshold_bin: int) -> Index:
    """Return the ``k`` of ``candidates`` with the largest magnitude, ties by lowest index, in order."""
    prefix = np.uint32(threshold_bin << LEADING)
    above = 0
    for i in candidates:
        above += ((bits[i] & MAGNITUDE) >> LEADING) > threshold_bin
    wanted = k - above  # of those whose known bits equal the threshold's
    for shift in (10, 0):
        counts = np.zeros(1 << 10, np.int64)
        known = np.uint32(shift + 10)
        for i in candidates:
            magnitude = bits[i] & MAGNITUDE
            if magnitude >> known == prefix >> known:
                counts[(magnitude >> np.uint32(shift)) & np.uint32(0x3FF)] += 1
        digit = len(counts) - 1
        while counts[digit] < wanted:
            wanted -= counts[digit]
            digit -= 1
        prefix |= np.uint32(digit << shift)
    kept = np.empty(k, candidates.dtype)
    filled = 0
    for i in candidates:
        magnitude = bits[i] & MAGNITUDE
        is_tie = magnitude == prefix
        if magnitude > prefix or (is_tie and wanted > 0):
            kept[filled] = i
            filled += 1
            wanted -= is_tie
    return kept


def paper_search(vector: Float32, k: int, samplings: int = 30) -> tuple[float, float, int, int]:
    """Return the paper's two thresholds and their counts (HiTopKComm, algorithm 1, lines 1–24).

    ``(upper, lower, above_upper, above_lower)``: ``above_upper <= k`` entries reach the upper threshold, or
    the search found none and ``upper`` is 0 with ``above_upper`` 0. The reference that tests and benchmarks
    compare with; it bisects between the mean and the largest magnitude, so the lower threshold stays 0 (and
    counts everything) where the k-th value lies below the mean.
    """
    magnitudes = np.abs(vector)
    mean, largest = float(magnitudes.mean()), float(magnitudes.max())
    low, high = 0.0, 1.0
    upper, lower = 0.0, 0.0
    above_upper, above_lower = 0, len(vector)
    for _ in range(samplings):
        ratio = low + (high - low) / 2
        threshold = mean + ratio * (largest - mean)
        count = int(np.count_nonzero(magnitudes >= threshold))
        if count <= k:
            high = ratio
            if count > above_upper:
                above_upper, upper = count, threshold
        else:
            low = ratio
            if count < above_lower:
                above_lower, lower = count, threshold
    return upper, lower, above_upper, above_lower
