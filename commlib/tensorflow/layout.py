"""Where the gradients of variables are: in one vector, cut into buckets, or in tables of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import numpy as np

from commlib.arrays import Array
from commlib.fusion import bucket_bounds
from commlib.reducers.mean import MeanBuffers
from commlib.sparse_gradients import entries_of_rows, rows_of_entries
from commlib.tensorflow.tensors import apart, as_slices, check_gradients, cut_up, dense_gradients, made_dense
from commlib.tf_logging import without_noise
from commlib.vectors import SparseVector

with without_noise():
    import tensorflow as tf


@dataclass(frozen=True)
class Room:
    """Where means are made: arrays in turn, and the slices of them that the buckets have."""

    means: MeanBuffers
    slices: list[slice]

    @classmethod
    def of(cls, sizes: Sequence[int], arrays: ModuleType) -> "Room":
        """Return room for buckets of so many entries."""
        ends = list(accumulate(sizes))
        slices = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        return cls(MeanBuffers(ends[-1], arrays), slices)


class Layout:
    """The places of the gradients of variables ``names`` of ``shapes``, in the order of the variables.

    ``is_table``: whether the gradient of each is IndexedSlices, and a bucket of its own. The others are one
    vector; ``bounds`` are those of its buckets, which have ``bucket_bytes`` at most (``None``: any number)
    and end where a table is among the variables. ``order`` has for each bucket, in the order of the
    variables, whether it is a table, and its number among the tables or among the buckets of the vector.
    """

    def __init__(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        is_table: Sequence[bool],
        bucket_bytes: int | None,
    ) -> None:
        self._names = names
        self._is_table = is_table
        self._shapes, self.table_shapes = apart(shapes, is_table)
        self.sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
        self._vector_sizes = apart(self.sizes, is_table)[0]
        self.bounds = self._cut(bucket_bytes)
        self.order = self._buckets_in_order()
        self._flags = [is_table for is_table, _ in self.order]

    def _cut(self, bucket_bytes: int | None) -> list[int]:
        """Return the bounds of the vector's buckets, in its entries."""
        bounds = [0, sum(self._vector_sizes)]
        if bucket_bytes is not None and bounds[-1]:
            bounds = bucket_bounds(self._vector_sizes, bucket_bytes)
        return sorted({*bounds, *self._places_of_tables()})

    def _places_of_tables(self) -> list[int]:
        """Return how many entries of the vector come before each table."""
        pairs = zip(self.sizes, self._is_table, strict=True)
        before = np.cumsum([0, *(0 if is_table else size for size, is_table in pairs)]).tolist()
        return apart(before[:-1], self._is_table)[1]

    def _buckets_in_order(self) -> list[tuple[bool, int]]:
        tables = [(place, 0, number) for number, place in enumerate(self._places_of_tables())]
        of_vector = [(low, 1, number) for number, low in enumerate(self.bounds[:-1])]
        return [(not is_later, number) for _, is_later, number in sorted([*tables, *of_vector])]

    def apart(self, buckets: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return what is of the buckets of the vector, and what is of the tables."""
        return apart(buckets, self._flags)

    def in_order(self, of_vector: Sequence[Any], of_tables: Sequence[Any]) -> list[Any]:
        """Return what is of the buckets of the vector and of the tables in the order of all buckets."""
        return [(of_tables if is_table else of_vector)[number] for is_table, number in self.order]

    def tensors(self, gradients: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the gradients of the vector, dense, and those of the tables, as IndexedSlices."""
        if not self.table_shapes:
            return dense_gradients(gradients, self._names, self._shapes), []
        check_gradients(gradients, self._names)
        dense, slices = apart(gradients, self._is_table)
        table_names = apart(self._names, self._is_table)[1]
        return made_dense(dense, self._shapes), [
            as_slices(*each) for each in zip(slices, table_names, self.table_shapes, strict=True)
        ]

    def parts(self, tensors: Sequence[Any], slices: Sequence[Any]) -> list[Any]:
        """Return what is of each bucket: a list of the vector's tensors, or the IndexedSlices of a table."""
        ends = np.cumsum([0, *self._vector_sizes])
        places = np.searchsorted(ends, self.bounds).tolist()
        return self.in_order([tensors[first:last] for first, last in pairwise(places)], slices)

    def entries(self, table: int, rows: Array, values: Array) -> SparseVector:
        """Return the entries of some rows of a table."""
        return entries_of_rows(rows, values, self.table_shapes[table])

    def rows(self, means: Sequence[SparseVector]) -> list[Array]:
        """Return the rows and the values of each table, one after the other."""
        pairs = zip(means, self.table_shapes, strict=True)
        return [array for mean, shape in pairs for array in rows_of_entries(mean, shape)]

    def mean_gradients(
        self, mean: Any, rows: Sequence[Any], tensors: Sequence[Any], slices: Sequence[Any]
    ) -> list[Any]:
        """Return the means of gradients in the order of the variables, each of the type of the gradient.

        ``mean``: a tensor of the vector; ``rows``: those and the values of each table, one after the other.
        """
        mean.set_shape([self.bounds[-1]])
        parts = cut_up(mean, self._shapes)
        of_vector = iter([tf.cast(part, tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)])
        of_tables = iter(self._slices(rows, slices))
        return [next(of_tables if is_table else of_vector) for is_table in self._is_table]

    def _slices(self, rows: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        """Return IndexedSlices of the rows and values of each table, of the types given."""
        made, pairs = [], zip(rows[::2], rows[1::2], strict=True)
        for (numbers, values), each, shape in zip(pairs, given, self.table_shapes, strict=True):
            numbers.set_shape([None])
            values.set_shape([None, *shape[1:]])
            indices = tf.cast(numbers, each.indices.dtype)
            made.append(tf.IndexedSlices(tf.cast(values, each.dtype), indices, tf.constant(shape, tf.int64)))
        return made
