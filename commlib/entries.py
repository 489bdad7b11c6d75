"""Numba kernels for sparse entries in host memory: sorted indices and their float32 values."""

from typing import Any

import numpy as np
import numpy.typing as npt

from commlib.arrays import Float32, compiled

Index = npt.NDArray[np.signedinteger[Any]]
Bits = npt.NDArray[np.uint32]
Words = npt.NDArray[np.uint64]

ZERO = np.float32(0)
MAGNITUDE = np.uint32(0x7FFF_FFFF)
INFINITY = np.uint32(0x7F80_0000)
STRIDE = 4096  # entries between two checks whether all were finite so far
ENTRIES_A_LINE = 16  # of float32: where one in so many is written, filling all is as fast as clearing those
TILE = 1 << 14  # entries that are added up at a time: their sums stay in the processor's cache


@compiled
def are_ascending(indices: Index) -> bool:
    """Return whether every index is larger than the one before."""
    wrong = 0
    for i in range(1, len(indices)):
        wrong += indices[i] <= indices[i - 1]
    return wrong == 0


@compiled
def are_finite(bits: Bits) -> bool:
    """Return whether no value, float32 viewed as uint32, is a NaN or an infinity."""
    for low in range(0, len(bits), STRIDE):
        some, largest = bits[low : low + STRIDE], np.uint32(0)
        for i in range(len(some)):  # from 0 on: it compiles to vector instructions
            largest = max(largest, some[i] & MAGNITUDE)
        if largest >= INFINITY:
            return False
    return True


@compiled
def divide(values: Float32, divisor: int) -> bool:
    """Divide every value, and return whether all are finite."""
    finite = True
    for low in range(0, len(values), STRIDE):
        some = values[low : low + STRIDE]
        for i in range(len(some)):
            some[i] /= np.float32(divisor)
        finite &= are_finite(some.view(np.uint32))
    return finite


@compiled
def clear_at(vector: Float32, indices: Index) -> None:
    """Set the entries at ``indices`` to 0."""
    for i in range(len(indices)):
        vector[indices[i]] = 0


@compiled
def take_out(vector: Float32, indices: Index) -> Float32:
    """Return the entries at ``indices``, of which none is there twice, and set them to 0."""
    values = np.empty(len(indices), np.float32)
    for i in range(len(indices)):
        values[i] = vector[indices[i]]
        vector[indices[i]] = 0
    return values


@compiled
def write_at(vector: Float32, indices: Index, values: Float32) -> None:
    """Set the entries at ``indices`` to ``values``."""
    for i in range(len(indices)):
        vector[indices[i]] = values[i]


@compiled
def add_at(vector: Float32, indices: Index, values: Float32) -> None:
    """Add ``values`` to the entries at ``indices``."""
    for i in range(len(indices)):
        vector[indices[i]] += values[i]


@compiled
def subtract_at(vector: Float32, indices: Index, values: Float32) -> None:
    """Subtract ``values`` from the entries at ``indices``."""
    for i in range(len(indices)):
        vector[indices[i]] -= values[i]


@compiled
def are_missing(indices: Index, others: Index) -> npt.NDArray[np.bool_]:
    """Return for each of ``indices`` whether it is missing in ``others``; both are sorted."""
    missing = np.ones(len(indices), np.bool_)
    i, j = 0, 0
    while i < len(indices) and j < len(others):
        own, other = indices[i], others[j]
        missing[i] = own != other
        i += own <= other  # no branch to mispredict
        j += other <= own
    return missing


@compiled
def keep(indices: Index, values: Float32, mask: npt.NDArray[np.bool_]) -> tuple[Index, Float32]:
    """Return the entries for which ``mask`` is true: NumPy's ``indices[mask]`` takes ten times as long."""
    count = mask.sum()
    kept_indices, kept_values = np.empty(count + 1, indices.dtype), np.empty(count + 1, np.float32)
    filled = 0
    for i in range(len(mask)):
        kept_indices[filled], kept_values[filled] = indices[i], values[i]
        filled += mask[i]  # a dropped one is overwritten by the next: no branch to mispredict
    return kept_indices[:count], kept_values[:count]


@compiled
def add_up_equal(indices: Index, values: Float32) -> int:
    """Add up the values of equal neighbours among sorted ``indices``, in their order from 0 on, in place.

    Return how many distinct indices are left, at the front of both arrays.
    """
    filled = 0
    for i in range(len(indices)):
        if filled and indices[filled - 1] == indices[i]:
            values[filled - 1] += values[i]
        else:
            indices[filled], values[filled] = indices[i], ZERO + values[i]
            filled += 1
    return filled


@compiled
def merge_two(
    indices: Index, values: Float32, half: int, merged_indices: Index, merged_values: Float32
) -> int:
    """Merge the runs before and from ``half`` on; return how many distinct indices were written."""
    left, right, filled = 0, half, 0
    while left < half and right < len(indices):
        first, second = indices[left], indices[right]
        own, other = values[left], values[right]  # read in any case: no branch to mispredict
        from_left, from_right = first <= second, second <= first  # both where they are equal
        value = (ZERO + (own if from_left else ZERO)) + (other if from_right else ZERO)
        merged_indices[filled], merged_values[filled] = min(first, second), value
        left += from_left
        right += from_right
        filled += 1
    for rest, end in ((left, half), (right, len(indices))):
        for i in range(rest, end):
            merged_indices[filled], merged_values[filled] = indices[i], ZERO + values[i]
            filled += 1
    return filled


@compiled
def merge_runs(
    indices: Index,
    values: Float32,
    ends: npt.NDArray[np.int64],
    merged_indices: Index,
    merged_values: Float32,
) -> int:
    """Merge sorted runs that end at ``ends``; return how many distinct indices were written.

    The values of an index are added in the order of the runs, starting from 0. One tile of the vector at a
    time is summed as if it were dense; a bit mask marks the entries that were touched.
    """
    heads = np.zeros(len(ends), np.int64)
    heads[1:] = ends[:-1]
    sums, touched = np.zeros(TILE, np.float32), np.zeros(TILE // 64, np.uint64)
    filled = 0
    while True:
        first, found = indices[0], False
        for run in range(len(ends)):
            if heads[run] < ends[run] and (not found or indices[heads[run]] < first):
                first, found = indices[heads[run]], True
        if not found:
            return filled
        low = int(first) // TILE * TILE
        for run in range(len(ends)):
            i = heads[run]
            while i < ends[run] and indices[i] - low < TILE:
                offset = indices[i] - low
                sums[offset] += values[i]
                touched[offset >> 6] |= np.uint64(1) << np.uint64(offset & 63)
                i += 1
            heads[run] = i
        filled = _collect(low, sums, touched, filled, merged_indices, merged_values)


@compiled
def _collect(
    low: int, sums: Float32, touched: Words, filled: int, merged_indices: Index, merged_values: Float32
) -> int:
    """Write the touched entries of a tile and clear it; return how many entries are written in total."""
    for number in range(len(touched)):
        word = touched[number]
        touched[number] = 0
        while word:
            lowest_bit = word & (~word + np.uint64(1))
            offset = number * 64 + ones_in(lowest_bit - np.uint64(1))
            merged_indices[filled], merged_values[filled] = low + offset, sums[offset]
            sums[offset] = 0
            filled += 1
            word ^= lowest_bit
    return filled


@compiled
def ones_in(word: np.uint64) -> int:
    """Return how many bits are set; LLVM makes one instruction of the loop."""
    count = 0
    while word:
        word &= word - np.uint64(1)
        count += 1
    return count
