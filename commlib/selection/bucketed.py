"""SparCML's selection: a fixed share of so many consecutive entries (Renggli et al. 2019, section 8.3)."""

import numpy as np

from commlib.arrays import compiled
from commlib.entries import INFINITY, MAGNITUDE, Bits
from commlib.errors import InvalidArgument, NonFiniteInput
from commlib.selection.base import BLOCK, Selector, mask_reaching, write_indices
from commlib.vectors import Float32, Index, SparseVector, index_dtype

FIRST_STEP = np.uint32(1 << 20)  # of the search, in bits of the magnitude: an eighth of an octave


class Bucketed(Selector):
    """The largest magnitudes of each ``bucket`` of entries, ties by lowest index; ``min(k, d)`` in total.

    Of the buckets that end at entry ``n``, ``⌊n·k/d⌋`` are selected: each gives its proportional share to
    within one, also the last bucket, which may be shorter. No bucket's threshold depends on another's.
    """

    def __init__(self, bucket: int = 512) -> None:
        if not isinstance(bucket, int) or isinstance(bucket, bool) or bucket < 1:
            raise InvalidArgument(f"bucket: expected a whole number of entries from 1, got {bucket!r}")
        self._bucket = bucket

    def select(self, vector: Float32, k: int) -> SparseVector:
        size = len(vector)
        k = min(k, size)
        indices = np.empty(k, index_dtype(size))
        if not _select(vector.view(np.uint32), k, min(self._bucket, size), indices):
            raise NonFiniteInput("cannot select from a vector that holds a NaN or an infinity")
        return SparseVector.trusted(size, indices, vector[indices])


@compiled
def _select(bits: Bits, k: int, length: int, indices: Index) -> bool:
    """Fill ``indices`` with the ``k`` selected ones and return true; false if an entry is not finite."""
    blocks = (length + BLOCK - 1) // BLOCK
    magnitudes, offsets = np.empty(blocks * BLOCK, np.uint32), np.empty(blocks * BLOCK, np.int64)
    filled, owed = 0, 0
    for first in range(0, len(bits), max(1, length)):
        bucket = bits[first : first + length]
        for i in range(len(bucket)):
            magnitudes[i] = bucket[i] & MAGNITUDE
        magnitudes[len(bucket) :] = 0  # at the end, so that they lose every tie
        largest = np.uint32(0)
        for i in range(len(magnitudes)):
            largest = max(largest, magnitudes[i])
        if largest >= INFINITY:
            return False
        owed += k * len(bucket)
        share = owed // len(bits)
        owed -= share * len(bits)
        if share:
            _find_largest(magnitudes, share, _threshold(magnitudes, share, largest), offsets)
            for i in range(share):
                indices[filled + i] = first + offsets[i]
            filled += share
    return True


@compiled
def _count(magnitudes: Bits, lowest: np.uint32) -> int:
    count = 0
    for i in range(len(magnitudes)):
        count += magnitudes[i] >= lowest
    return count


@compiled
def _threshold(magnitudes: Bits, share: int, largest: np.uint32) -> np.uint32:
    """Return a magnitude that ``share`` of ``magnitudes`` reach, or more if there are ties."""
    above, lowest, step = np.uint32(largest + 1), largest, FIRST_STEP
    count = _count(magnitudes, lowest)
    while count < share:  # steps down, each double the last, until the threshold is enclosed
        above, lowest = lowest, np.uint32(lowest - min(step, lowest))
        step = np.uint32(2 * step)
        count = _count(magnitudes, lowest)
    while count > share and above - lowest > 1:
        middle = np.uint32(lowest + (above - lowest) // 2)
        reached = _count(magnitudes, middle)
        if reached < share:
            above = middle
        else:
            lowest, count = middle, reached
    return lowest


@compiled
def _find_largest(magnitudes: Bits, share: int, lowest: np.uint32, offsets: Index) -> None:
    """Fill ``offsets`` with the ``share`` entries that reach ``lowest``, the first ones of ties with it."""
    found = 0
    for i in range(0, len(magnitudes), BLOCK):
        found = write_indices(mask_reaching(magnitudes[i:], BLOCK, lowest), i, offsets, found)
    surplus, filled = found - share, found
    while surplus > 0:  # the last ties are too many
        filled -= 1
        surplus -= magnitudes[offsets[filled]] == lowest
    for i in range(filled, found):
        offsets[filled] = offsets[i]
        filled += magnitudes[offsets[i]] > lowest
