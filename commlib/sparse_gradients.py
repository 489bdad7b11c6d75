"""Gradients of tables, of which a step touches few rows: rows in, entries of one vector, rows out.

>>> vector = entries_of_rows([3, 0, 3], [[1, 2], [5, 6], [10, 20]], shape=(4, 2))
>>> vector.indices, vector.values
(array([0, 1, 6, 7], dtype=int32), array([ 5.,  6., 11., 22.], dtype=float32))
>>> rows_of_entries(vector, shape=(4, 2))
(array([0, 3]), array([[ 5.,  6.],
       [11., 22.]], dtype=float32))
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from commlib.arrays import compiled
from commlib.errors import InvalidArgument
from commlib.vectors import Float32, SparseVector, index_dtype

Int64 = npt.NDArray[np.int64]


def entries_of_rows(rows: npt.ArrayLike, values: npt.ArrayLike, shape: Sequence[int]) -> SparseVector:
    """Return the gradient of a table of ``shape`` as a vector, its entries in the order of the table's.

    ``rows``: integers, in any order; ``values``: of shape ``(len(rows), *shape[1:])``. Values of one row are
    added up in the order given, in float32. All entries of a row that is given are stored.
    """
    numbers, given = np.asarray(rows), np.asarray(values, np.float32)
    height, width = shape[0], int(np.prod(shape[1:], dtype=np.int64))
    if numbers.size and numbers.dtype.kind not in "iu":
        raise InvalidArgument(f"rows: expected integers, got {numbers.dtype}")
    if numbers.ndim != 1 or given.shape != (len(numbers), *shape[1:]):
        expected = f"{(len(numbers), *shape[1:])} for {len(numbers)} rows"
        raise InvalidArgument(f"values: expected shape {expected}, got {given.shape}")
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < height):
        raise InvalidArgument(f"rows: expected 0 … {height - 1}, got one outside")
    order = np.argsort(numbers, kind="stable")
    unique = np.empty(len(order), np.int64)
    sums = np.empty((len(order), width), np.float32)
    sorted_rows, flat = numbers[order].astype(np.int64), np.ascontiguousarray(given).reshape(-1, width)
    filled = _add_up_rows(sorted_rows, order, flat, unique, sums) if len(order) else 0
    dtype = index_dtype(height * width)
    first = (unique[:filled] * width).astype(dtype)
    indices = (first[:, None] + np.arange(width, dtype=dtype)).reshape(-1)
    return SparseVector.trusted(height * width, indices, sums[:filled].reshape(-1))


def rows_of_entries(vector: SparseVector, shape: Sequence[int]) -> tuple[Int64, Float32]:
    """Return the rows, sorted, of a table of ``shape`` in which ``vector`` has entries, and their values.

    The values have the shape ``(len(rows), *shape[1:])``; entries that are not stored are 0. Of a dense
    vector, the rows are those that are not all 0.
    """
    width = int(np.prod(shape[1:], dtype=np.int64))
    if vector.indices is None:
        table = vector.values.reshape(-1, width)
        rows: Int64 = np.flatnonzero(table.any(axis=1)).astype(np.int64)
        return rows, table[rows].reshape(-1, *shape[1:])
    of_entries = vector.indices // width
    is_first = np.ones(len(of_entries), np.bool_)
    is_first[1:] = of_entries[1:] != of_entries[:-1]
    rows = of_entries[is_first].astype(np.int64)
    values = np.zeros((len(rows), width), np.float32)
    values[np.cumsum(is_first) - 1, vector.indices - of_entries * width] = vector.values
    return rows, values.reshape(-1, *shape[1:])


@compiled
def _add_up_rows(rows: Int64, order: Int64, values: Float32, unique: Int64, sums: Float32) -> int:
    """Fill ``unique`` and ``sums`` from sorted ``rows``, which were ``values[order]``; return how many."""
    filled = 0
    for i in range(len(rows)):
        given = values[order[i]]
        if filled and unique[filled - 1] == rows[i]:
            for column in range(len(given)):
                sums[filled - 1, column] += given[column]
        else:
            unique[filled] = rows[i]
            for column in range(len(given)):
                sums[filled, column] = given[column]
            filled += 1
    return filled
