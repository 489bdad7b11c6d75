"""Reducers inside ``tf.function``. Only this file and :mod:`commlib.keras` import TensorFlow.

Where the topology's transport moves arrays of GPUs, gradients and means stay on the GPU: TensorFlow and CuPy
hand each other their memory by DLPack. TensorFlow tells nobody which streams it computes on, so the host
waits in between, twice a step: until the gradient is there, and until the mean is.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from commlib.arrays import Array, is_on_gpu, module_of
from commlib.engine import Engine, Future
from commlib.errors import InvalidArgument
from commlib.fusion import Buckets, bucket_bounds, check_variables, make_buckets
from commlib.memory import ALIGNMENT_BYTES
from commlib.reducers import Reducer, Report
from commlib.reducers.mean import Means
from commlib.tf_logging import without_noise
from commlib.topology import Topology
from commlib.trace import Recorder
from commlib.vectors import Float32

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


def dense_gradients(
    gradients: Sequence[Any], names: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> list[Any]:
    """Return the gradients of variables as dense tensors; zeros, and a warning, where there is none."""
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
    return [
        tf.zeros(shape) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, shape in zip(gradients, shapes, strict=True)
    ]


def flattened(tensors: Sequence[Any]) -> Any:
    """Return the entries of tensors, one after the other, as one float32 tensor."""
    return tf.concat([tf.cast(tf.reshape(tensor, [-1]), tf.float32) for tensor in tensors], axis=0)


def made_at(tensors: Sequence[Any]) -> int:
    """Return the place in the graph of the operation that yields the last of the tensors; 0 without a graph.

    The tape adds the operations of backpropagation in the order in which it goes through the model.
    """
    if tf.executing_eagerly():
        return 0
    graph = tf.compat.v1.get_default_graph()
    places = {id(operation): place for place, operation in enumerate(graph.get_operations())}
    return max(places.get(id(tensor.op), 0) for tensor in tensors)


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


class DistributedGradients:
    """Averages the gradients of ``variables`` over all ranks of ``topology``.

    ``variables``: tf.Variables or Keras variables of static shape, the same in the same order on all ranks.
    ``config``: the name of a reducer and its options, ``{"name": "hitopk", "density": 0.01}``. All gradients
    travel as one float32 vector of ``size`` entries, ``sizes`` of each variable. ``reducer`` is there, and
    ``config`` is that of it.

    ``bucket_bytes``: the vector is reduced in buckets of so many bytes at most, see
    :func:`commlib.fusion.bucket_bounds`; by default it is one. ``overlap``: each bucket is reduced in the
    background from when the gradients of its variables are there, while others are still computed; the means
    are the same to the bit. ``overlaps`` tells whether that is so: neither is done where there is one rank,
    or where the vector is on GPUs.

    With a transport of GPUs the vector is on this rank's GPU throughout: gradients elsewhere are brought
    there by TensorFlow. Steps then run as ``tf.py_function`` on it, else as ``tf.numpy_function`` on the CPU.
    """

    def __init__(
        self,
        topology: Topology,
        variables: Sequence[Any],
        config: Mapping[str, Any],
        *,
        bucket_bytes: int | None = None,
        overlap: bool = False,
    ) -> None:
        self.topology = topology
        self._names = [str(getattr(variable, "path", variable.name)) for variable in variables]
        self._shapes = [tuple(variable.shape) for variable in variables]
        self.sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self._shapes]
        self.size = sum(self.sizes)
        check_variables(topology.world, self._names, self._shapes)
        self._gpu: Any = None  # CuPy's device
        self._latest: Any = None  # mean on the GPU
        if topology.world.arrays is not np:
            self._gpu = topology.world.arrays.cuda.Device()  # for threads of TensorFlow it is not current
            self._device = tensorflow_device(self._gpu.id)
        self._bounds = [0, self.size]
        if bucket_bytes is not None and topology.world.size > 1 and self._gpu is None:
            self._bounds = bucket_bounds(self.sizes, bucket_bytes)
        self.overlaps = overlap and len(self._bounds) > 2
        # TensorFlow reads means when it likes, and may compute in their memory: they are not the reducer's.
        self._means = Means(self.size, topology.world.arrays)
        self.guard: Callable[[], AbstractContextManager[Any]] = nullcontext  # in which each exchange happens
        self._futures: list[Future] = []  # of the step that is under way
        self._mean: Float32 | None = None  # in which its means are made
        self._lock = threading.Lock()
        self._is_rehearsing = False
        self._engine: Engine | None = None
        self._recorder: Recorder | None = None
        self.reducer = self._make(config)

    def _make(self, config: Mapping[str, Any]) -> Reducer:
        self.config = dict(config)
        options = dict(config)
        reducer = make_buckets(options.pop("name"), self.topology, self._bounds, **options)
        reducer.record(self._recorder)
        if self.overlaps:
            assert isinstance(reducer, Buckets)
            self._engine = Engine(reducer)
            self._engine.guard = lambda: self.guard()  # it is set later
        return reducer

    @property
    def buckets(self) -> int:
        """How many parts of the vector are reduced on their own."""
        return len(self._bounds) - 1

    def switch(self, config: Mapping[str, Any]) -> None:
        """Replace the reducer; what the old one held back goes into the first step of the new one.

        Takes effect in functions that are already traced, too. All ranks call it together.
        """
        if self._gpu is not None:
            self._gpu.synchronize()  # TensorFlow may still read a mean whose memory is free by now
        self._end_engine()
        before, self.reducer = self.reducer, self._make(config)
        self.reducer.add_residual(before.residual)
        before.close()

    def record(self, recorder: Recorder | None) -> None:
        """See :meth:`commlib.Reducer.record`; also of reducers that follow. Between two steps."""
        self._recorder = recorder
        self.reducer.record(recorder)

    def close(self) -> None:
        """Free what the reducer has made; all ranks call it together. The topology stays open."""
        self._end_engine()
        self.reducer.close()

    def _end_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> "DistributedGradients":
        """Return it, to be closed at the end of the block."""
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Free what the reducer has made."""
        if kind is None:  # else the other ranks may not come here
            self.close()

    def reduce(self, gradients: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the mean gradients, in the dtypes and shapes given, and whether the step counts.

        ``gradients`` come in the order of the variables; IndexedSlices are made dense. ``None``, of a
        variable that the loss does not depend on here, is zero in float32, and warned of. The second result
        is a scalar bool tensor: false where a NaN or an infinity on any rank made all of them skip the step.
        The memory of the means is used again for later ones after the tensors are gone, and not before.
        """
        tensors, results = self._tensors(gradients), [tf.float32, tf.bool]
        if self.overlaps:
            mean, finite = tf.numpy_function(self._collect, self._submit_all(tensors), results, stateful=True)
        elif self._gpu is None:
            flat = flattened(tensors)
            mean, finite = tf.numpy_function(self._reduce, [flat], results, stateful=True)
        else:
            flat = flattened(tensors)
            with tf.device(self._device):
                mean, finite = tf.py_function(self._reduce_on_gpu, [flat], results)
        mean.set_shape([self.size])
        finite.set_shape([])
        parts = cut_up(mean, self._shapes)
        means = [tf.cast(part, tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
        return means, finite

    def submit(self, gradients: Sequence[Any]) -> list[Any]:
        """Start the exchange of the gradients in the background, where it ``overlaps``; ``collect`` waits.

        For ``tf.function``, whose graph is not held up: it has an operation for each bucket, which runs as
        soon as the gradients of that are there. The result is there for control dependencies.
        """
        return self._submit_all(self._tensors(gradients))

    def _submit_all(self, tensors: list[Any]) -> list[Any]:
        """Submit the buckets in the order in which the graph yields the last of their gradients."""
        ends = np.cumsum([0, *self.sizes])
        parts = [
            tensors[first:last] for first, last in pairwise(np.searchsorted(ends, self._bounds).tolist())
        ]
        order = sorted(range(len(parts)), key=lambda number: (made_at(parts[number]), -number))
        return [
            tf.numpy_function(
                partial(self._submit, number), [flattened(parts[number])], tf.int64, stateful=True
            )
            for number in order
        ]

    def _submit(self, number: int, flat: Float32) -> np.int64:
        """Give a bucket to the engine: the body of an operation, on a thread of TensorFlow's."""
        assert self._engine is not None
        buckets = self._engine.buckets
        with self._lock:
            if not self._is_rehearsing:
                if self._mean is None:
                    self._mean = self._means.array()
                out = self._mean[buckets.slices[number]]
                # The array is TensorFlow's memory, which the array keeps from being used for another tensor.
                self._futures.append(self._engine.submit(buckets.reducers[number], flat, out))
        return np.int64(number)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Let graphs run without an exchange: what they submit is dropped."""
        self._is_rehearsing = True
        try:
            yield
        finally:
            self._is_rehearsing = False

    def collect(self) -> tuple[Array, Report]:
        """Wait for the means of all that was submitted; return them as :meth:`reduce_flat` does."""
        assert self._engine is not None
        with self._lock:
            (futures, self._futures), (mean, self._mean) = (self._futures, []), (self._mean, None)
        for future in futures:
            future.result()
        report = self.reducer.last
        assert report is not None
        assert mean is not None
        busy = self._engine.busy_seconds
        return mean, replace(report, busy=busy, hidden=max(0.0, busy - self._engine.waited_seconds))

    def _collect(self, *numbers: np.int64) -> tuple[Float32, np.bool_]:
        mean, report = self.collect()
        return mean, np.bool_(report.finite)

    def _tensors(self, gradients: Sequence[Any]) -> list[Any]:
        return dense_gradients(gradients, self._names, self._shapes)

    def reduce_flat(self, flat: Any) -> tuple[Array, Report]:
        """Return the mean of all gradients as one array, and what the reducer did; outside ``tf.function``.

        ``flat``: a float32 tensor of shape ``(size,)``, on the GPU where the transport moves arrays of GPUs.
        The mean is an array of NumPy or CuPy, where ``flat`` is, and the caller may write to it. Its memory
        is used again after the array and all tensors of it (see :func:`tensor_of`) are gone.
        """
        if self._gpu is None:
            mean = self._reduce(array_of(flat))[0]
        else:
            with self._gpu:
                mean = self._reduce(array_of(flat, self.topology.world.arrays))[0]
                # TensorFlow does not wait for CuPy's stream: it may use the gradient's memory again, and
                # still read the mean when the next step begins.
                module_of(mean).cuda.get_current_stream().synchronize()
                self._latest = mean
        assert self.reducer.last is not None
        return mean, self.reducer.last

    def _reduce_on_gpu(self, flat: Any) -> tuple[Any, Any]:
        with self._gpu:
            mean = self._reduce(array_of(flat, self.topology.world.arrays))[0]
            assert self.reducer.last is not None
            return tensor_of(mean), tf.constant(self.reducer.last.finite)

    def _reduce(self, flat: Float32) -> tuple[Float32, np.bool_]:
        with self.guard():
            mean = self.reducer.reduce(flat, out=self._means.array())
        assert self.reducer.last is not None
        return mean, np.bool_(self.reducer.last.finite)
