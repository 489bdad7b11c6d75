"""Sparse gradient vectors: sorted unique indices and float32 values over a known size.

A vector switches to a dense representation where that is the shorter message
(SparCML, section 5.1): past ``δ = size · value_bytes / (index_bytes + value_bytes)`` entries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib import entries
from commlib.arrays import Allocate, clear, copy_of, empty, is_on_gpu, module_of, new_array, zeros
from commlib.arrays import Float32 as Float32
from commlib.entries import Index as Index
from commlib.errors import InvalidArgument

VALUE_BYTES = 4
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_LARGEST_INT32 = int(np.iinfo(np.int32).max)


def index_dtype(size: int) -> "np.dtype[np.signedinteger[Any]]":
    """Return the integer type that addresses ``size`` entries: int32, or int64 past 2³¹ − 1.

    >>> index_dtype(2**31 - 1), index_dtype(2**31)
    (dtype('int32'), dtype('int64'))
    """
    return _INT32 if size <= _LARGEST_INT32 else _INT64


def delta(size: int, value_bytes: int = VALUE_BYTES) -> float:
    """Return δ: with this many entries or more, the dense message is the shorter one.

    >>> delta(1000), delta(900, value_bytes=2)
    (500.0, 300.0)
    """
    return size * value_bytes / (index_dtype(size).itemsize + value_bytes)


def partition(size: int, parts: int) -> npt.NDArray[np.int64]:
    """Return the ``parts + 1`` bounds that cut ``size`` entries into contiguous, nearly equal parts.

    >>> partition(10, 4)
    array([ 0,  2,  5,  7, 10])
    """
    return np.array([size * part // parts for part in range(parts + 1)], np.int64)


@dataclass(frozen=True, eq=False)
class SparseVector:
    """A vector of ``size`` float32 entries; entries without an index are zero.

    ``indices`` are sorted and unique (int32, or int64 past 2³¹ − 1), one for each of ``values``;
    ``indices=None`` means that the vector is dense: ``values`` holds all its entries.
    The arrays are not copied: they belong to the SparseVector from now on. They may be CuPy's; then the order
    and range of the indices are not checked, since a check would have to wait for the GPU.

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
        if not entries.are_ascending(self.indices):
            raise InvalidArgument("indices: expected sorted and unique, got some that are not")

    @classmethod
    def trusted(cls, size: int, indices: Index | None, values: Float32) -> "SparseVector":
        """Return a vector of these arrays without checking them."""
        vector = object.__new__(cls)
        vector.__dict__.update(size=size, indices=indices, values=values)
        return vector

    @classmethod
    def empty(cls, size: int, arrays: ModuleType = np) -> "SparseVector":
        """Return a vector of ``size`` zeros without any stored entry, in arrays of the module ``arrays``."""
        return cls.trusted(size, arrays.empty(0, index_dtype(size)), arrays.empty(0, np.float32))

    @classmethod
    def from_dense(cls, vector: Float32) -> "SparseVector":
        """Return the non-zero entries of ``vector``; past δ, the dense representation of it (not copied)."""
        indices = np.flatnonzero(vector)
        if len(indices) >= delta(len(vector)):
            return cls(len(vector), None, vector)
        return cls.trusted(len(vector), indices.astype(index_dtype(len(vector))), vector[indices])

    @classmethod
    def from_pairs(cls, size: int, indices: npt.ArrayLike, values: npt.ArrayLike) -> "SparseVector":
        """Return the vector of pairs in any order; values of one index are added up in the order given.

        Both are copied, and of one dimension: integers and real numbers in host memory.

        >>> SparseVector.from_pairs(6, [4, 1, 4], [2.0, -3.0, 0.5]).to_dense()
        array([ 0. , -3. ,  0. ,  0. ,  2.5,  0. ], dtype=float32)
        """
        places, given = np.asarray(indices), np.asarray(values, np.float32)
        if places.size and places.dtype.kind not in "iu":
            raise InvalidArgument(f"indices: expected integers, got {places.dtype}")
        if places.ndim != 1 or given.shape != places.shape:
            raise InvalidArgument(
                f"values: expected one for each index, got shapes {places.shape} and {given.shape}"
            )
        if places.size and not (places.min() >= 0 and places.max() < size):
            raise InvalidArgument(f"indices: expected 0 … {size - 1}, got one outside")
        order = np.argsort(places, kind="stable")
        own_indices, own_values = places[order].astype(index_dtype(size)), given[order]
        filled = entries.add_up_equal(own_indices, own_values)
        return cls.trusted(size, own_indices[:filled], own_values[:filled])

    @property
    def is_dense(self) -> bool:
        """Whether all ``size`` values are stored, without indices."""
        return self.indices is None

    @property
    def nnz(self) -> int:
        """The number of stored entries: ``size`` when dense."""
        return len(self.values)

    @property
    def indices_or_range(self) -> Index:
        """The indices of the stored entries: ``0 … size − 1`` when dense."""
        if self.indices is not None:
            return self.indices
        return module_of(self.values).arange(self.size, dtype=index_dtype(self.size))

    def copy(self) -> "SparseVector":
        """Return a vector with arrays of its own."""
        indices = None if self.indices is None else self.indices.copy()
        return SparseVector.trusted(self.size, indices, self.values.copy())

    def where(self, mask: npt.NDArray[np.bool_]) -> "SparseVector":
        """Return the entries for which ``mask``, one bool an entry, is true."""
        assert len(mask) == self.nnz, "one bool an entry"
        if is_on_gpu(self.values):
            return SparseVector.trusted(self.size, self.indices_or_range[mask], self.values[mask])
        return SparseVector.trusted(self.size, *entries.keep(self.indices_or_range, self.values, mask))

    def to_dense(self) -> Float32:
        """Return a new float32 array of shape ``(size,)``."""
        if self.indices is None:
            return copy_of(self.values)
        vector = zeros(self.size, module_of(self.values))
        self.write_to(vector)
        return vector

    def write_to(self, vector: Float32) -> None:
        """Overwrite the entries of ``vector`` at the indices."""
        if self.indices is None:
            vector[...] = self.values
        elif is_on_gpu(vector):
            vector[self.indices] = self.values
        else:
            entries.write_at(vector, self.indices, self.values)

    def add_to(self, vector: Float32) -> None:
        """Add the entries to ``vector``, in place."""
        if self.indices is None:
            vector += self.values
        elif is_on_gpu(vector):
            vector[self.indices] += self.values
        else:
            entries.add_at(vector, self.indices, self.values)

    def subtract_from(self, vector: Float32) -> None:
        """Subtract the entries from ``vector``, in place."""
        if self.indices is None:
            vector -= self.values
        elif is_on_gpu(vector):
            vector[self.indices] -= self.values
        else:
            entries.subtract_at(vector, self.indices, self.values)

    def slice(self, low: int, high: int) -> "SparseVector":
        """Return entries ``low … high − 1`` as a vector of size ``high − low``; it shares the values."""
        if self.indices is None:
            return SparseVector.trusted(high - low, None, self.values[low:high])
        # Of their type: else all indices would be converted.
        bounds = module_of(self.indices).asarray([low, high], self.indices.dtype)
        first, last = np.searchsorted(self.indices, bounds).tolist()
        indices = (self.indices[first:last] - low).astype(index_dtype(high - low))
        return SparseVector.trusted(high - low, indices, self.values[first:last])

    def top_k(self, k: int) -> "SparseVector":
        """Return the ``min(k, nnz)`` entries of largest magnitude, ties by lowest index."""
        if k < 0:
            raise InvalidArgument(f"k: expected at least 0, got {k}")
        magnitudes = np.abs(self.values)
        k = min(k, self.nnz)
        if k == 0:
            return SparseVector.empty(self.size, module_of(self.values))
        threshold = np.partition(magnitudes, -k)[-k]
        is_top = magnitudes > threshold
        is_top[np.flatnonzero(magnitudes == threshold)[: k - int(np.count_nonzero(is_top))]] = True
        return self.where(is_top)

    def without(self, others: "SparseVector") -> "SparseVector":
        """Return the entries whose indices are not in ``others``."""
        return self.where(self._missing_in(others))

    def within(self, others: "SparseVector") -> "SparseVector":
        """Return the entries whose indices are in ``others``."""
        return self.where(~self._missing_in(others))

    def _missing_in(self, others: "SparseVector") -> npt.NDArray[np.bool_]:
        if is_on_gpu(self.values):
            missing: npt.NDArray[np.bool_] = ~np.isin(self.indices_or_range, others.indices_or_range)
            return missing
        return entries.are_missing(self.indices_or_range, others.indices_or_range)

    @property
    def is_finite(self) -> bool:
        """Whether no value is a NaN or an infinity."""
        return is_finite(self.values)

    def divide(self, divisor: int) -> bool:
        """Divide every value in place, in float32; return whether all are finite."""
        if is_on_gpu(self.values):
            self.values[...] /= np.float32(divisor)
            return is_finite(self.values)
        return bool(entries.divide(self.values, divisor))


def is_finite(vector: Float32) -> bool:
    """Return whether no entry of a contiguous vector is a NaN or an infinity."""
    if is_on_gpu(vector):
        return bool(np.isfinite(vector).all())
    return bool(entries.are_finite(vector.view(np.uint32)))


def non_finite(size: int, arrays: ModuleType = np) -> SparseVector:
    """Return the vector that stands for a sum that is not finite: a NaN at index 0."""
    return SparseVector(size, arrays.zeros(1, index_dtype(size)), arrays.full(1, np.nan, np.float32))


def is_one_non_finite(vectors: Sequence[SparseVector]) -> bool:
    """Return whether one of the vectors is ``non_finite``'s; all others are finite."""
    return bool(np.isnan(np.concatenate([vector.values[:1] for vector in vectors])).any())


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
    values = np.concatenate([part.values for part in parts])
    return SparseVector.trusted(size, np.concatenate(indices), values)


def sum_sparse(
    vectors: Sequence[SparseVector],
    *,
    dense: Callable[[int], Float32] | None = None,
    allocate: Allocate = new_array,
) -> SparseVector:
    """Return the sum, added in the order of ``vectors``: the same bits on all ranks that use the same order.

    The result is dense where the entries together could pass δ, or where one of the vectors is.

    Without ``dense`` and ``allocate`` the arrays are new. ``dense(size)`` returns the array for a dense sum,
    which may be the array of the first vector. ``allocate(name, length, dtype)`` returns the arrays for a
    sparse sum, as ``Workspace.get`` does: the sum is valid until the next call with the same workspace.
    Sparse vectors are in host memory; :func:`commlib.kernels.kernels_of` has the sum of vectors on a GPU.

    >>> a = SparseVector(9, np.array([1, 4], np.int32), np.array([2.0, 3.0], np.float32))
    >>> sum_sparse([a, a]).values
    array([4., 6.], dtype=float32)
    """
    sizes = {vector.size for vector in vectors}
    if len(sizes) != 1:
        raise InvalidArgument(f"vectors: expected one or more of equal size, got sizes {sorted(sizes)}")
    size = sizes.pop()
    sparse = [vector.indices for vector in vectors if vector.indices is not None]
    if len(sparse) < len(vectors) or (size and sum(map(len, sparse)) >= delta(size)):
        arrays = module_of(vectors[0].values)
        return _dense_total(vectors, empty(size, arrays) if dense is None else dense(size))
    return _sparse_total(size, sparse, [vector.values for vector in vectors], allocate)


def _dense_total(vectors: Sequence[SparseVector], sums: Float32) -> SparseVector:
    first, *others = vectors
    if not (first.is_dense and not is_on_gpu(sums) and np.may_share_memory(first.values, sums)):
        clear(sums)
        first.add_to(sums)
    for vector in others:
        vector.add_to(sums)
    return SparseVector.trusted(first.size, None, sums)


def _sparse_total(
    size: int, indices: Sequence[Index], values: Sequence[Float32], allocate: Allocate
) -> SparseVector:
    """Merge sorted runs: the values of an index are added in the order of the vectors, from 0 on."""
    ends, dtype = np.cumsum([len(run) for run in indices]), index_dtype(size)
    count = int(ends[-1])
    runs = allocate("indices of runs", count, dtype), allocate("values of runs", count, np.float32)
    merged = allocate("indices of sums", count, dtype), allocate("values of sums", count, np.float32)
    np.concatenate(indices, out=runs[0])
    np.concatenate(values, out=runs[1])
    if not count:
        filled = 0
    elif len(ends) == 2:
        filled = entries.merge_two(*runs, int(ends[0]), *merged)
    else:
        filled = entries.merge_runs(*runs, ends, *merged)
    return SparseVector.trusted(size, merged[0][:filled], merged[1][:filled])


def sum_rows(others: Float32, own: Float32, position: int) -> Float32:
    """Return the sum of ``others``, one or more rows, with ``own`` inserted at ``position``, in that order.

    The first row of ``others`` is overwritten with it. Rows may be longer than ``own``: the rest is ignored.

    >>> sum_rows(np.array([[1e8, 9], [1, 9]], np.float32), np.array([-1e8], np.float32), 1)
    array([1.], dtype=float32)
    """
    rows = list(others[:, : len(own)])
    sums: Float32 = rows[0]
    rows.insert(position, own)
    np.add(rows[0], rows[1], out=sums)
    for row in rows[2:]:  # in order; np.add.reduce would add long columns pairwise
        sums += row
    return sums
