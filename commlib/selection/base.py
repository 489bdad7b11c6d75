"""The interface of selectors, and kernels that read a vector in blocks of 64 entries, mostly once.

Finite magnitudes are ordered like their bits without the sign, and infinity and NaN come after all of them.
So the kernels compare integers: ``bits`` is a float32 vector viewed as uint32, and a magnitude is
``bits & MAGNITUDE``.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from commlib.arrays import Allocate, Workspace, compiled, new_array
from commlib.entries import INFINITY, MAGNITUDE, Bits, ones_in
from commlib.errors import NonFiniteInput
from commlib.vectors import Float32, Index, SparseVector, index_dtype


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
        """Return the selector's state; without state it is empty."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        assert not state, f"{type(self).__name__} has no state"


BLOCK = 64  # entries: the bits of a uint64


def reaching(
    vector: Float32,
    maxima: Bits,
    lowest: np.uint32,
    at_most: int,
    enough: int | None = None,
    allocate: Allocate = new_array,
) -> SparseVector | None:
    """Return the entries whose magnitudes reach the bits ``lowest``; ``None`` for more than ``at_most``.

    ``maxima``: what ``block_maxima`` returns for ``vector``. ``enough``: the caller needs only that many of
    the largest, so that ties with ``lowest`` may be left out once there are as many entries. ``allocate``
    allocates the arrays.
    """
    size = len(vector)
    most = min(at_most, size) + BLOCK
    indices, values = allocate("indices", most, index_dtype(size)), allocate("values", most, np.float32)
    enough = size + 1 if enough is None else enough
    filled = _compact(vector.view(np.uint32), maxima, lowest, enough, indices, values.view(np.uint32))
    return SparseVector.trusted(size, indices[:filled], values[:filled]) if filled <= at_most else None


@compiled
def block_maxima(bits: Bits) -> Bits:
    """Return the largest magnitude of each 64 entries; the last block may be shorter."""
    whole = len(bits) // BLOCK
    rows = bits[: whole * BLOCK].reshape(whole, BLOCK)
    maxima = np.empty((len(bits) + BLOCK - 1) // BLOCK, np.uint32)
    for block in range(whole):
        maxima[block] = _largest(rows[block], BLOCK)
    if whole < len(maxima):
        maxima[whole] = _largest(bits[whole * BLOCK :], len(bits) - whole * BLOCK)
    return maxima


@compiled
def _largest(row: Bits, length: int) -> np.uint32:
    largest = np.uint32(0)
    for i in range(length):
        largest = max(largest, row[i] & MAGNITUDE)
    return largest


@compiled
def mask_reaching(row: Bits, length: int, lowest: np.uint32) -> np.uint64:
    """Return a mask whose bit ``i`` is set if entry ``i`` of the block reaches ``lowest``."""
    mask = np.uint64(0)
    for i in range(length):
        mask |= np.uint64((row[i] & MAGNITUDE) >= lowest) << np.uint64(i)
    return mask


@compiled
def write_indices(mask: np.uint64, first: int, indices: Index, filled: int) -> int:
    """Write ``first + i`` for every bit ``i`` of ``mask``; return the number of indices written so far."""
    while mask:
        lowest_bit = mask & (~mask + np.uint64(1))
        indices[filled] = first + ones_in(lowest_bit - np.uint64(1))
        filled += 1
        mask ^= lowest_bit
    return filled


@compiled
def _take(
    row: Bits, length: int, first: int, lowest: np.uint32, indices: Index, values: Bits, filled: int
) -> int:
    """Append the entries of the block at ``first`` that reach ``lowest``; return how many there are now."""
    before = filled
    filled = write_indices(mask_reaching(row, length, lowest), first, indices, filled)
    for i in range(before, filled):
        values[i] = row[indices[i] - first]
    return filled


@compiled
def _compact(bits: Bits, maxima: Bits, lowest: np.uint32, enough: int, indices: Index, values: Bits) -> int:
    """Fill ``indices`` and ``values`` for ``reaching``, until less than a block is free."""
    filled = 0
    whole = len(bits) // BLOCK
    rows = bits[: whole * BLOCK].reshape(whole, BLOCK)
    for block in range(whole):
        if maxima[block] >= lowest:
            filled = _take(rows[block], BLOCK, block * BLOCK, lowest, indices, values, filled)
            if filled + BLOCK > len(indices):
                return filled
            if filled >= enough:
                lowest, enough = np.uint32(lowest + 1), len(bits) + 1
    rest = len(bits) - whole * BLOCK
    return _take(bits[whole * BLOCK :], rest, whole * BLOCK, lowest, indices, values, filled)


class BlockSelector(Selector):
    """A selector whose one full pass over the vector finds the largest magnitude of every 64 entries.

    ``allocate(name, length, dtype)`` allocates the arrays of a call.
    """

    allocate: Allocate = staticmethod(new_array)

    def __init__(self) -> None:
        self._workspace = Workspace()

    def select(self, vector: Float32, k: int) -> SparseVector:
        self.allocate = new_array
        return self._select_checked(vector, block_maxima(vector.view(np.uint32)), k)

    def select_sum(self, gradient: Float32, residual: Float32, k: int, out: Float32) -> SparseVector:
        self.allocate = self._workspace.get
        maxima = self.allocate("maxima", -(-len(out) // BLOCK), np.uint32)
        accumulate(gradient, residual, out, maxima)
        return self._select_checked(out, maxima, k)

    def _select_checked(self, vector: Float32, maxima: Bits, k: int) -> SparseVector:
        if maxima.max(initial=0) >= INFINITY:
            raise NonFiniteInput("cannot select from a vector that holds a NaN or an infinity")
        k = min(k, len(vector))
        return self.select_by_blocks(vector, maxima, k) if k else SparseVector.empty(len(vector))

    @abstractmethod
    def select_by_blocks(self, vector: Float32, maxima: Bits, k: int) -> SparseVector:
        """Select from a finite ``vector`` with these block maxima, ``1 <= k <= d``."""


NEVER = np.uint32(0xFFFFFFFF)  # no magnitude reaches it


def accumulate(gradient: Float32, residual: Float32, out: Float32, maxima: Bits) -> None:
    """Write ``gradient + residual`` to ``out``, all float32 of shape ``(d,)``, and fill its block maxima."""
    _accumulate(gradient, residual, out, maxima, NEVER, 0, np.empty(0, np.int32), np.empty(0, np.uint32))


def accumulate_reaching(
    gradient: Float32,
    residual: Float32,
    out: Float32,
    maxima: Bits,
    lowest: np.uint32,
    at_most: int,
    enough: int,
    allocate: Allocate,
) -> SparseVector | None:
    """Do what :func:`accumulate` and then :func:`reaching` do, while a block is in the processor's cache."""
    size, most = len(out), min(at_most, len(out)) + BLOCK
    indices, values = allocate("indices", most, index_dtype(size)), allocate("values", most, np.float32)
    filled = _accumulate(gradient, residual, out, maxima, lowest, enough, indices, values.view(np.uint32))
    return SparseVector.trusted(size, indices[:filled], values[:filled]) if filled <= at_most else None


@compiled
def _accumulate(
    gradient: Float32,
    residual: Float32,
    out: Float32,
    maxima: Bits,
    lowest: np.uint32,
    enough: int,
    indices: Index,
    values: Bits,
) -> int:
    """Fill ``out`` and ``maxima``, and ``indices`` and ``values`` as :func:`_compact` does."""
    whole, filled = len(out) // BLOCK, 0
    end, shape = whole * BLOCK, (whole, BLOCK)
    gradients, residuals = gradient[:end].reshape(shape), residual[:end].reshape(shape)
    sums, bits = out[:end].reshape(shape), out[:end].view(np.uint32).reshape(shape)
    for block in range(whole):
        for i in range(BLOCK):
            sums[block, i] = gradients[block, i] + residuals[block, i]
        largest = np.uint32(0)
        for i in range(BLOCK):
            largest = max(largest, bits[block, i] & MAGNITUDE)
        maxima[block] = largest
        if largest >= lowest and filled + BLOCK <= len(indices):
            filled = _take(bits[block], BLOCK, block * BLOCK, lowest, indices, values, filled)
            if filled >= enough:
                lowest, enough = np.uint32(lowest + 1), len(out) + 1
    if end < len(out):
        out[end:] = gradient[end:] + residual[end:]
        rest = out[end:].view(np.uint32)
        maxima[whole] = (rest & MAGNITUDE).max()
        if maxima[whole] >= lowest and filled + BLOCK <= len(indices):
            filled = _take(rest, len(rest), end, lowest, indices, values, filled)
    return filled
