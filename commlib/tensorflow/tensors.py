"""Tensors of TensorFlow, and arrays of NumPy and CuPy that share their memory.

CuPy and TensorFlow hand each other memory of GPUs by DLPack.
"""

import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib.arrays import ALIGNMENT_BYTES, Array, compiled, is_on_gpu, module_of
from commlib.errors import InvalidArgument
from commlib.tf_logging import without_noise
from commlib.vectors import Float32, SparseVector, index_dtype

with without_noise():
    import tensorflow as tf

Int64 = npt.NDArray[np.int64]


def array_of(tensor: Any, arrays: ModuleType = np) -> Array:
    """Return the values of an eager tensor as an array of NumPy or CuPy, without a copy; for reading only.

    With CuPy the tensor is on CuPy's current GPU, and all that TensorFlow does there ends first.
    """
    if arrays is np:
        return np.asarray(tensor)
    return arrays.from_dlpack(tf.experimental.dlpack.to_dlpack(tf.convert_to_tensor(tensor)))


def tensor_of(array: Any) -> Any:
    """Return an eager tensor of the values of an array, which is given away and not copied.

    All that was done on CuPy's current stream ends first. TensorFlow copies an array of NumPy that it cannot
    take as it is: one that is not aligned to 64 bytes, or may not be written to and is not ``array_of``'s.
    """
    if not is_on_gpu(array):
        of_tensor = array.base.obj if isinstance(array.base, memoryview) else None
        if isinstance(of_tensor, np.ndarray) and _memory(of_tensor) == _memory(array):
            array = of_tensor  # the memory of a tensor, which NumPy lets nobody write to
        if array.ctypes.data % ALIGNMENT_BYTES or not array.flags.writeable:
            return tf.convert_to_tensor(array)
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    module_of(array).cuda.get_current_stream().synchronize()
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__(stream=-1))


def _memory(array: Array) -> tuple[Any, ...]:
    return array.ctypes.data, array.shape, array.strides, array.dtype


def cut_up(flat: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Return tensors of these shapes with the entries of ``flat`` in their order.

    In ``tf.function`` a tensor at a multiple of 64 bytes is a view of its memory, any other a copy.
    """
    parts, low = [], 0
    for shape in shapes:
        high = low + int(np.prod(shape, dtype=np.int64))
        parts.append(tf.reshape(flat[low:high], shape))
        low = high
    return parts


def check_gradients(gradients: Sequence[Any], names: Sequence[str]) -> None:
    """Raise ``InvalidArgument`` unless there is one of each variable or ``None``; warn of these, by name."""
    if len(gradients) != len(names):
        raise InvalidArgument(
            f"gradients: expected one of each of {len(names)} variables, got {len(gradients)}"
        )
    absent = [name for name, each in zip(names, gradients, strict=True) if each is None]
    if len(absent) == len(names):
        raise InvalidArgument("gradients: no variable has one; expected a loss that depends on them")
    if absent:
        without = ", ".join(absent)
        warnings.warn(f"gradients: the loss does not depend on {without}: taken as zero", stacklevel=4)


def as_tensor(gradient: Any, name: str, shape: tuple[int, ...], is_table: bool) -> Any:
    """Return a dense tensor, or the IndexedSlices of a table; zeros, or no rows, for no gradient."""
    if not is_table:
        return tf.zeros(shape) if gradient is None else tf.convert_to_tensor(gradient)
    if gradient is None:
        return tf.IndexedSlices(tf.zeros([0, *shape[1:]]), tf.zeros([0], tf.int64))
    if not isinstance(gradient, tf.IndexedSlices):
        raise InvalidArgument(f"gradients: expected IndexedSlices of {name}, got a dense tensor")
    return gradient


def inputs_of(bucket: Sequence[Any]) -> list[Any]:
    """Return the inputs of an operation: all entries of tensors, or the rows and values of IndexedSlices."""
    first = bucket[0]
    if isinstance(first, tf.IndexedSlices):
        return [tf.cast(first.indices, tf.int64), tf.cast(first.values, tf.float32)]
    return [tf.concat([tf.cast(tf.reshape(tensor, [-1]), tf.float32) for tensor in bucket], axis=0)]


def order_of(buckets: Sequence[Sequence[Any]]) -> list[int]:
    """Return the numbers of buckets in the order in which the graph yields the last tensor of each.

    The tape adds the operations of backpropagation in the order in which it goes through the model. Without
    a graph the last bucket is first.
    """
    backwards = list(range(len(buckets)))[::-1]
    if tf.executing_eagerly():
        return backwards
    graph = tf.compat.v1.get_default_graph()
    places = {id(operation): place for place, operation in enumerate(graph.get_operations())}
    parts = [tf.nest.flatten(bucket, expand_composites=True) for bucket in buckets]
    return sorted(backwards, key=lambda each: max(places.get(id(tensor.op), 0) for tensor in parts[each]))


def tensorflow_device(gpu: int) -> str:
    """Return TensorFlow's name of the GPU that CUDA numbers so in this process.

    DLPack takes TensorFlow's number of a GPU for CUDA's: ``InvalidArgument`` where they differ.
    """
    numbers = [int(each.name.rsplit(":", 1)[1]) for each in tf.config.get_visible_devices("GPU")]
    if not numbers:
        raise InvalidArgument(
            "topology: its transport moves arrays of GPUs, and TensorFlow sees none: expected one that was "
            "installed with CUDA (tensorflow[and-cuda]), or a transport of host memory (mpi)"
        )
    if gpu >= len(numbers) or numbers[gpu] != gpu:
        raise InvalidArgument(
            f"topology: its transport uses GPU {gpu}, and TensorFlow numbers the GPUs it sees another way "
            f"({numbers}): expected each rank to see its own alone, by CUDA_VISIBLE_DEVICES"
        )
    return f"GPU:{gpu}"


# Gradients of tables, of which a step touches few rows: rows in, entries of one vector, rows out.


def entries_of_rows(rows: npt.ArrayLike, values: npt.ArrayLike, shape: Sequence[int]) -> SparseVector:
    """Return the gradient of a table of ``shape`` as a vector, its entries in the order of the table's.

    ``rows``: integers, in any order; ``values``: of shape ``(len(rows), *shape[1:])``. Values of one row are
    added up in the order given, in float32. All entries of a row that is given are stored.

    >>> vector = entries_of_rows([3, 0, 3], [[1, 2], [5, 6], [10, 20]], shape=(4, 2))
    >>> vector.indices, vector.values
    (array([0, 1, 6, 7], dtype=int32), array([ 5.,  6., 11., 22.], dtype=float32))
    >>> rows_of_entries(vector, shape=(4, 2))
    (array([0, 3]), array([[ 5.,  6.],
           [11., 22.]], dtype=float32))
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
