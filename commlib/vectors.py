"""Sparse gradient vectors: sorted unique indices and float32 values over a known size.

A vector switches to a dense representation where that is the shorter message
(SparCML, section 5.1): past ``δ = size · value_bytes / (index_bytes + value_bytes)`` entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib.arrays import is_on_gpu, module_of
from commlib.compiled import compiled
from commlib.errors import InvalidArgument

Float32 = npt.NDArray[np.float32]
Index = npt.NDArray[np.signedinteger[Any]]

VALUE_BYTES = 4
ALIGNMENT_BYTES = 64  # at such addresses TensorFlow takes an array over as it is, at others it copies
ROW_MULTIPLE = 4  # entries: rows of such lengths all begin where a GPU loads as many at once


def index_dtype(size: int) -> "np.dtype[np.signedinteger[Any]]":
    """Return the integer type that addresses ``size`` entries: int32, or int64 past 2³¹ − 1.

    >>> index_dtype(2**31 - 1), index_dtype(2**31)
    (dtype('int32'), dtype('int64'))
    """
    return np.dtype(np.int32 if size <= np.iinfo(np.int32).max else np.int64)


def delta(size: int, value_bytes: int = VALUE_BYTES) -> float:
    """Return δ: with this many entries or more, the dense message is the shorter one.

    >>> delta(1000), delta(900, value_bytes=2)
    (500.0, 300.0)
    """
    return size * value_bytes / (index_dtype(size).itemsize + value_bytes)


def empty(size: int, arrays: ModuleType = np) -> Float32:
    """Return ``size`` float32 of whatever values, at an address that is a multiple of ``ALIGNMENT_BYTES``.

    ``arrays``: the module to make it with, NumPy or CuPy.
    """
    if arrays is not np:
        return arrays.empty(size, np.float32)  # type: ignore[no-any-return]
    vector = np.empty(size + ALIGNMENT_BYTES // VALUE_BYTES, np.float32)
    first = -vector.ctypes.data % ALIGNMENT_BYTES // VALUE_BYTES
    return vector[first : first + size]


def copy_of(vector: Float32) -> Float32:
    """Return a copy of a vector, aligned as ``empty`` is."""
    copy = empty(len(vector), module_of(vector))
    copy[...] = vector
    return copy


def zeros(size: int, arrays: ModuleType = np) -> Float32:
    """Return ``size`` zeros, made and aligned as ``empty`` does it.

    ``np.zeros`` costs five times as much: a page fault every 4 KiB.
    """
    vector = empty(size, arrays)  # in huge pages, where the system has them
    vector.fill(0)
    return vector


def partition(size: int, parts: int) -> npt.NDArray[np.int64]:
    """Return the ``parts + 1`` bounds that cut ``size`` entries into contiguous, nearly equal parts.

    >>> partition(10, 4)
    array([ 0,  2,  5,  7, 10])
    """
    return np.array([size * part // parts for part in range(parts + 1)], np.int64)


@dataclass(frozen=True, eq=False)
class SparseVector:
    """A vector of ``size`` float32 entries, of which those not named are zero.

    ``indices`` are sorted and unique (int32, or int64 past 2³¹ − 1), one for each of ``values``;
    ``indices=None`` says that the vector is dense and ``values`` holds all its entries.
    The arrays are kept, not copied: who makes a SparseVector gives them away. They may be CuPy's; then the
    order and range of the indices are not looked at, for who looks has to wait for the GPU.

    >>> SparseVector(6, np.array([1, 4], np.int32), np.array([2.0, -3.0], np.float32)).to_dense()
    array([ 0.,  2.,  0.,  0., -3.,  0.], dtype=float32)
    """

    size: int
    indices: Index | None
    values: Float32

    def __post_init__(self) -> None:
        if self.values.dtype != np.float32:
            raise InvalidArgument(f"values: expected float32, got {self.values.dtype}")
        if self.values.ndim != 1:
            raise InvalidArgument(f"values: expected one dimension, got shape {self.values.shape}")
        if self.indices is None:
            if len(self.values) != self.size:
                raise InvalidArgument(f"values: a dense vector of size {self.size} got {len(self.values)}")
            return
        expected = index_dtype(self.size)
        if self.indices.dtype != expected:
            found = self.indices.dtype
            raise InvalidArgument(f"indices: expected {expected} for size {self.size}, got {found}")
        if len(self.indices) != len(self.values):
            raise InvalidArgument(f"indices: {len(self.indices)} indices for {len(self.values)} values")
        if is_on_gpu(self.indices):
            return
        if len(self.indices) and (self.indices[0] < 0 or self.indices[-1] >= self.size):
            raise InvalidArgument(f"indices: expected 0 … {self.size - 1}, got one outside")
        if np.any(self.indices[1:] <= self.indices[:-1]):
            raise InvalidArgument("indices: expected sorted and unique, got some that are not")

    @classmethod
    def empty(cls, size: int, arrays: ModuleType = np) -> "SparseVector":
        """Return the vector of ``size`` entries of which none is held, made with the module ``arrays``."""
        return cls(size, arrays.empty(0, index_dtype(size)), arrays.empty(0, np.float32))

    @classmethod
    def from_dense(cls, vector: Float32) -> "SparseVector":
        """Return the non-zero entries of ``vector``; past δ, the dense representation of it (not copied)."""
        indices = np.flatnonzero(vector)
        if len(indices) >= delta(len(vector)):
            return cls(len(vector), None, vector)
        return cls(len(vector), indices.astype(index_dtype(len(vector))), vector[indices])

    @property
    def is_dense(self) -> bool:
        """Whether all entries are held, instead of indices and values."""
        return self.indices is None

    @property
    def entries(self) -> int:
        """How many entries are held: all of them when dense."""
        return len(self.values)

    @property
    def places(self) -> Index:
        """Return the indices of the entries: all of them when dense."""
        if self.indices is not None:
            return self.indices
        return module_of(self.values).arange(self.size, dtype=index_dtype(self.size))  # type: ignore[no-any-return]

    def where(self, mask: npt.NDArray[np.bool_]) -> "SparseVector":
        """Return the entries for which ``mask``, one bool an entry, is true."""
        return SparseVector(self.size, self.places[mask], self.values[mask])

    def to_dense(self) -> Float32:
        """Return a new float32 array of shape ``(size,)``."""
        if self.indices is None:
            return copy_of(self.values)
        vector = zeros(self.size, module_of(self.values))
        vector[self.indices] = self.values
        return vector

    def write_to(self, vector: Float32) -> None:
        """Put the entries into ``vector``, in place of what is there."""
        vector[slice(None) if self.indices is None else self.indices] = self.values

    def add_to(self, vector: Float32) -> None:
        """Add the entries to ``vector``, in place."""
        if self.indices is None:
            vector += self.values
        else:
            vector[self.indices] += self.values

    def subtract_from(self, vector: Float32) -> None:
        """Subtract the entries from ``vector``, in place."""
        if self.indices is None:
            vector -= self.values
        else:
            vector[self.indices] -= self.values

    def add(self, other: "SparseVector") -> "SparseVector":
        """Return the sum of the two, dense where δ may be passed."""
        return total([self, other])

    def slice(self, low: int, high: int) -> "SparseVector":
        """Return entries ``low … high − 1`` as a vector of size ``high − low``; it shares the values."""
        if self.indices is None:
            return SparseVector(high - low, None, self.values[low:high])
        bounds = module_of(self.indices).asarray([low, high])
        first, last = np.searchsorted(self.indices, bounds).tolist()
        indices = (self.indices[first:last] - low).astype(index_dtype(high - low))
        return SparseVector(high - low, indices, self.values[first:last])

    def top_k(self, k: int) -> "SparseVector":
        """Return the ``min(k, entries)`` entries of largest magnitude, ties by lowest index."""
        if k < 0:
            raise InvalidArgument(f"k: expected at least 0, got {k}")
        magnitudes = np.abs(self.values)
        k = min(k, self.entries)
        if k == 0:
            return SparseVector.empty(self.size, module_of(self.values))
        threshold = np.partition(magnitudes, -k)[-k]
        kept = magnitudes > threshold
        kept[np.flatnonzero(magnitudes == threshold)[: k - int(np.count_nonzero(kept))]] = True
        return self.where(kept)

    def without(self, others: "SparseVector") -> "SparseVector":
        """Return the entries whose indices ``others`` does not hold."""
        if is_on_gpu(self.values):
            return self.where(~np.isin(self.places, others.places))
        return self.where(_is_missing(self.places, others.places))

    @property
    def is_finite(self) -> bool:
        """Whether no value is a NaN or an infinity."""
        return bool(np.isfinite(self.values).all())

    def divided_by(self, divisor: int) -> "SparseVector":
        """Return the vector with every value divided, in float32."""
        return SparseVector(self.size, self.indices, self.values / np.float32(divisor))


@compiled
def _is_missing(indices: Index, others: Index) -> npt.NDArray[np.bool_]:
    """Return for each of ``indices`` whether ``others`` does not hold it; both are sorted."""
    missing = np.ones(len(indices), np.bool_)
    place = 0
    for i in range(len(indices)):
        while place < len(others) and others[place] < indices[i]:
            place += 1
        missing[i] = place == len(others) or others[place] != indices[i]
    return missing


@compiled
def _add_equal(indices: Index, values: Float32, order: npt.NDArray[np.int64]) -> tuple[Index, Float32]:
    """Return the distinct indices in ``order``, and the sum of the values of each."""
    distinct, sums = np.empty_like(indices), np.empty_like(values)
    filled = 0
    for place in order:
        if filled == 0 or indices[place] != distinct[filled - 1]:
            distinct[filled] = indices[place]
            sums[filled] = 0
            filled += 1
        sums[filled - 1] += values[place]
    return distinct[:filled].copy(), sums[:filled].copy()


def void(size: int, arrays: ModuleType = np) -> SparseVector:
    """Return the sum that stands for one that is not finite: a NaN at index 0."""
    return SparseVector(size, arrays.zeros(1, index_dtype(size)), arrays.full(1, np.nan, np.float32))


def concatenate(parts: Sequence[SparseVector]) -> SparseVector:
    """Return the vector whose consecutive ranges are ``parts``, dense where one of them is or δ is passed.

    >>> concatenate([SparseVector.from_dense(np.array([0, 0, 5], np.float32))] * 2).indices
    array([2, 5], dtype=int32)
    """
    size = sum(part.size for part in parts)
    sparse = [part.indices for part in parts if part.indices is not None]
    if len(sparse) < len(parts) or sum(map(len, sparse)) >= delta(size):
        return SparseVector(size, None, np.concatenate([part.to_dense() for part in parts]))
    offsets = np.cumsum([0, *(part.size for part in parts[:-1])])
    dtype = index_dtype(size)
    indices = [own.astype(dtype) + dtype.type(offset) for own, offset in zip(sparse, offsets, strict=True)]
    return SparseVector(size, np.concatenate(indices), np.concatenate([part.values for part in parts]))


def total(vectors: Sequence[SparseVector]) -> SparseVector:
    """Return the sum, added in the order of ``vectors``: equal on all who hold them in that order.

    The result is dense where the entries together could pass δ, or where one of the vectors is.

    >>> a = SparseVector(9, np.array([1, 4], np.int32), np.array([2.0, 3.0], np.float32))
    >>> total([a, a]).values
    array([4., 6.], dtype=float32)
    """
    sizes = {vector.size for vector in vectors}
    if len(sizes) != 1:
        raise InvalidArgument(f"vectors: expected one or more of equal size, got sizes {sorted(sizes)}")
    size = sizes.pop()
    sparse = [vector.indices for vector in vectors if vector.indices is not None]
    if size and len(sparse) == len(vectors) and is_on_gpu(sparse[0]):
        from commlib.kernels import kernels_of  # which needs this module

        return kernels_of(module_of(sparse[0])).total(vectors)
    if len(sparse) < len(vectors) or sum(map(len, sparse)) >= delta(size):
        dense = zeros(size, module_of(vectors[0].values))
        for vector in vectors:
            vector.add_to(dense)
        return SparseVector(size, None, dense)
    indices, values = np.concatenate(sparse), np.concatenate([vector.values for vector in vectors])
    # Sorted runs are merged; stable, so that values of one index stay in the order of the vectors.
    return SparseVector(size, *_add_equal(indices, values, np.argsort(indices, kind="stable")))


def sum_rows(others: Float32, own: Float32, place: int) -> Float32:
    """Return the sum of rows in their order: ``own`` is number ``place``, the first ones being ``others``'.

    A new array of the length of ``own``. ``others``: one or more rows, of which so many entries are added.

    >>> sum_rows(np.array([[1e8, 9], [1, 9]], np.float32), np.array([-1e8], np.float32), 1)
    array([1.], dtype=float32)
    """
    rows = list(others[:, : len(own)])
    rows.insert(place, own)
    sums: Float32 = np.add(rows[0], rows[1])
    for row in rows[2:]:  # np.add.reduce would add long columns pairwise
        sums += row
    return sums
