"""Tensors of TensorFlow, and arrays of NumPy and CuPy that share their memory.

CuPy and TensorFlow hand each other memory of GPUs by DLPack.
"""

import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from commlib.arrays import ALIGNMENT_BYTES, Array, is_on_gpu, module_of
from commlib.errors import InvalidArgument
from commlib.tf_logging import without_noise

with without_noise():
    import tensorflow as tf


def array_of(tensor: Any, arrays: ModuleType = np) -> Array:
    """Return the values of an eager tensor as an array of NumPy or CuPy, without a copy; for reading only.

    With CuPy the tensor is on CuPy's current GPU, and all that TensorFlow does there ends first.
    """
    if arrays is np:
        return np.asarray(tensor)
    return arrays.from_dlpack(tf.experimental.dlpack.to_dlpack(tf.convert_to_tensor(tensor)))  # type: ignore[no-any-return]


def tensor_of(array: Any) -> Any:
    """Return an eager tensor of the values of an array, which is given away and not copied.

    All that was done on CuPy's current stream ends first. TensorFlow copies an array of NumPy that it cannot
    take as it is: one that is not aligned to 64 bytes, or may not be written to.
    """
    if not is_on_gpu(array):
        if array.ctypes.data % ALIGNMENT_BYTES or not array.flags.writeable:
            return tf.convert_to_tensor(array)
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    module_of(array).cuda.get_current_stream().synchronize()
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__(stream=-1))


def cut_up(flat: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Return tensors of these shapes with the entries of ``flat`` in their order.

    In ``tf.function`` those that begin at a multiple of 64 bytes are views of its memory; others are copies.
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


def made_dense(gradient: Any, shape: tuple[int, ...]) -> Any:
    """Return a dense tensor, of zeros where there is no gradient."""
    return tf.zeros(shape) if gradient is None else tf.convert_to_tensor(gradient)


def as_slices(gradient: Any, name: str, shape: tuple[int, ...]) -> Any:
    """Return the IndexedSlices of a table, without rows where there is no gradient; refuse a dense tensor."""
    if gradient is None:
        return tf.IndexedSlices(tf.zeros([0, *shape[1:]]), tf.zeros([0], tf.int64))
    if not isinstance(gradient, tf.IndexedSlices):
        raise InvalidArgument(f"gradients: expected IndexedSlices of {name}, got a dense tensor")
    return gradient


def flattened(tensors: Sequence[Any]) -> Any:
    """Return the entries of tensors, one after the other, as one float32 tensor."""
    if not tensors:
        return tf.zeros([0])
    return tf.concat([tf.cast(tf.reshape(tensor, [-1]), tf.float32) for tensor in tensors], axis=0)


def tensors_of(part: Any) -> list[Any]:
    """Return the tensors of a bucket, which is a list of them or IndexedSlices."""
    return [part.indices, part.values] if isinstance(part, tf.IndexedSlices) else part


def inputs_of(part: Any) -> list[Any]:
    """Return what an operation takes of a bucket: its entries, or of IndexedSlices rows and their values."""
    if not isinstance(part, tf.IndexedSlices):
        return [flattened(part)]
    return [tf.cast(part.indices, tf.int64), tf.cast(part.values, tf.float32)]


def order_of(parts: Sequence[Any]) -> list[int]:
    """Return the numbers of buckets in the order in which the graph yields the last tensor of each.

    The tape adds the operations of backpropagation in the order in which it goes through the model. Without
    a graph the last bucket is first.
    """
    backwards = list(range(len(parts)))[::-1]
    if tf.executing_eagerly():
        return backwards
    graph = tf.compat.v1.get_default_graph()
    places = {id(operation): place for place, operation in enumerate(graph.get_operations())}
    return sorted(backwards, key=lambda each: max(places.get(id(t.op), 0) for t in tensors_of(parts[each])))


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
