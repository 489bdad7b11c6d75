"""Gradients inside ``tf.function``: from variables to the buckets of an exchange, and their means back.

Where the topology's transport moves arrays of GPUs, gradients and means stay on the GPU: TensorFlow and CuPy
share their memory by DLPack. TensorFlow does not tell on which streams it computes, so the host waits twice a
step: until the gradient is computed, and until the mean is.
"""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from commlib.arrays import Array, module_of
from commlib.errors import InvalidArgument
from commlib.exchange import (
    ALL_ROWS,
    BucketExchange,
    Exchange,
    Piece,
    bucket_bounds,
    check_variables,
    pieces_of,
)
from commlib.reducers import Report
from commlib.tensorflow.tensors import (
    array_of,
    as_tensor,
    check_gradients,
    cut_up,
    entries_of_rows,
    inputs_of,
    order_of,
    rows_of_entries,
    tensor_of,
    tensorflow_device,
)
from commlib.tf_logging import without_noise
from commlib.topology import Topology
from commlib.trace import Recorder

with without_noise():
    import tensorflow as tf


@dataclass(frozen=True)
class Bucket:
    """A bucket: its variables, or pieces of them. ``table``: its shape, where it is a table."""

    pieces: list[Piece]
    table: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


def buckets_of(
    shapes: Sequence[tuple[int, ...]],
    is_table: Sequence[bool],
    bucket_bytes: int | None,
    cuts: Collection[int] = (),
) -> list[Bucket]:
    """Return the buckets of variables, in the order of the variables; each table is a bucket of its own.

    The others have at most ``bucket_bytes`` of float32 values (``None``: any number), unless a single
    variable has more. A bucket begins at each of the entries ``cuts``, also between rows of a variable; there
    are none where there are tables.
    """
    pieces = pieces_of(shapes, cuts)
    dense_sizes = [0 if is_table[piece.variable] else piece.size for piece in pieces]
    bounds = set(cuts) if bucket_bytes is None else {*cuts, *bucket_bounds(dense_sizes, bucket_bytes)}
    buckets, low = list[list[Piece]](), 0
    for piece, size in zip(pieces, dense_sizes, strict=True):
        is_full = not buckets or is_table[piece.variable] or is_table[buckets[-1][-1].variable]
        if is_full or (low in bounds and any(each.size for each in buckets[-1])):
            buckets.append([])
        buckets[-1].append(piece)
        low += size
    return [Bucket(own, own[0].shape if is_table[own[0].variable] else None) for own in buckets]


class DistributedGradients(Exchange):
    """Averages the gradients of ``variables`` over all ranks of ``topology``.

    ``variables``: tf.Variables or Keras variables of static shape, the same in the same order on all ranks.
    ``config``: the name of a reducer and its options, ``{"name": "hitopk", "density": 0.01}``. ``size``: the
    entries of all variables; ``sizes`` and ``shapes``: of each. ``exchange``: the :class:`BucketExchange`
    below.

    ``bucket_bytes``: the gradient is reduced in buckets of at most so many bytes, see
    :func:`commlib.exchange.bucket_bounds`; by default it is one bucket. ``overlap``: each bucket is exchanged
    in the background as soon as the gradients of its variables are computed; the means are the same to the
    bit. ``overlaps`` is true where that happens: not with one bucket, on one rank, or on GPUs.

    ``cuts``: see :func:`buckets_of`. ``background``: a step that is submitted bucket by bucket, outside of
    graphs, is exchanged in the background, too, over communicators of its own: the caller may exchange other
    things until ``wait``. Where gradients are on GPUs, and on one rank, it is exchanged in ``wait``.

    ``tables``: variables whose gradients are IndexedSlices, and stay so. Each is a bucket of its own, with
    the reducer ``table_config``. By default that sends all rows and keeps no residual: ``reduce`` makes no
    array of a table's size.

    With a transport of GPUs the gradient is one vector on this rank's GPU; TensorFlow brings gradients from
    elsewhere there. Steps then run as ``tf.py_function`` on it, else as ``tf.numpy_function`` on the CPU.

    ``reduce`` is for a graph of one's own. A training loop has a graph that ends with ``submit_in_graph``
    (where ``overlaps``) or returns ``inputs``, which are given to ``submit_inputs``; then it calls ``wait``.
    """

    def __init__(
        self,
        topology: Topology,
        variables: Sequence[Any],
        config: Mapping[str, Any],
        *,
        bucket_bytes: int | None = None,
        overlap: bool = False,
        tables: Sequence[Any] = (),
        table_config: Mapping[str, Any] = ALL_ROWS,
        cuts: Collection[int] = (),
        background: bool = False,
    ) -> None:
        self.topology = topology
        self._names = [str(getattr(variable, "path", variable.name)) for variable in variables]
        self.shapes = [tuple(variable.shape) for variable in variables]
        check_variables(topology.world, self._names, self.shapes)
        self._is_table = [any(variable is table for table in tables) for variable in variables]
        if sum(self._is_table) != len(tables):
            found = f"{sum(self._is_table)} of {len(tables)} are"
            raise InvalidArgument(f"tables: expected some of the variables, {found}")
        self._gpu: Any = None  # CuPy's device
        self._latest: Any = None  # mean on the GPU, which TensorFlow may still read
        if topology.world.arrays is not np:
            if tables:
                raise InvalidArgument("tables: expected none with a transport that moves arrays of GPUs")
            self._gpu = topology.world.arrays.cuda.Device()  # for threads of TensorFlow it is not current
            self._device = tensorflow_device(self._gpu.id)
        is_cut = topology.world.size > 1 and self._gpu is None
        self._buckets = buckets_of(self.shapes, self._is_table, bucket_bytes if is_cut else None, cuts)
        self.overlaps = overlap and is_cut and len(self._buckets) > 1
        self._own = topology.copy() if background and is_cut else None
        self.exchange = BucketExchange(
            self._own or topology,
            [bucket.size for bucket in self._buckets],
            config,
            shapes=[[piece.shape for piece in bucket.pieces] for bucket in self._buckets],
            tables=[number for number, bucket in enumerate(self._buckets) if bucket.table is not None],
            table_config=table_config,
            overlap=self.overlaps or self._own is not None,
        )
        self.exchange.guard = lambda: self.guard()  # which is set later
        self.sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self.shapes]
        self.size = self.exchange.size
        self._lock = threading.Lock()
        self._is_rehearsing = False

    @property
    def config(self) -> dict[str, Any]:
        """The name and the options of the reducer."""
        return self.exchange.config

    @property
    def buckets(self) -> int:
        """The number of parts that are reduced on their own."""
        return len(self._buckets)

    def switch(self, config: Mapping[str, Any]) -> None:
        """Replace the reducer, on all ranks together, as :meth:`BucketExchange.switch` does.

        Functions that are traced already use the new one, too.
        """
        if self._gpu is not None:
            self._gpu.synchronize()  # TensorFlow may still read a mean whose memory is free by now
        self.exchange.switch(config)

    def record(self, recorder: Recorder | None) -> None:
        """Record a span of each stage in ``recorder`` from the next step on, or stop recording."""
        self.exchange.record(recorder)

    def close(self) -> None:
        """Free what the reducers have made; all ranks call it together. The topology stays open."""
        self.exchange.close()
        if self._own is not None:
            self._own.close()
            self._own.world.close()

    # ------------------------------------------------------------------------- in a graph

    def reduce(self, gradients: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the mean gradients, in the dtypes and shapes given, and whether the step counts.

        ``gradients`` come in the order of the variables; IndexedSlices are made dense, unless their variable
        is one of ``tables``: these means are IndexedSlices of the rows that any rank has, sorted, each row
        once. ``None``, of a variable that the loss does not depend on, is zero in float32, and warned of. The
        second result is a scalar bool tensor: false where a NaN or an infinity on any rank made all ranks
        skip the step. The memory of the means is used again when the tensors are gone.
        """
        tensors = self._tensors(gradients)
        slices = [tensor for tensor, table in zip(tensors, self._is_table, strict=True) if table]
        results = [tf.float32, tf.bool, *[tf.int64, tf.float32] * len(slices)]
        if self._gpu is not None:
            with tf.device(self._device):
                found = tf.py_function(self._exchange_on_gpu, self.inputs(tensors), results)
        else:
            given = self.submit_in_graph(tensors) if self.overlaps else self.inputs(tensors)
            found = tf.numpy_function(self._exchange, given, results, stateful=True)
        mean, finite, *rows = found
        mean.set_shape([self.size])
        finite.set_shape([])
        parts = cut_up(mean, self.shapes)
        of_tables = iter(zip(rows[::2], rows[1::2], strict=True))
        return [
            _slices(*next(of_tables), tensor, shape) if table else tf.cast(part, tensor.dtype)
            for part, tensor, table, shape in zip(parts, tensors, self._is_table, self.shapes, strict=True)
        ], finite

    def inputs(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the arguments of ``submit_inputs``: a float32 vector of all but tables, rows and values."""
        tensors = self._tensors(gradients)
        dense = [each for each in tensors if not isinstance(each, tf.IndexedSlices)]
        tables = [[each] for each in tensors if isinstance(each, tf.IndexedSlices)]
        return [array for part in [dense, *tables] if part for array in inputs_of(part)]

    def submit_in_graph(self, gradients: Sequence[Any]) -> list[Any]:
        """Submit each bucket by an operation that runs as soon as the bucket's gradients are computed.

        For ``tf.function``, where it ``overlaps``; the results are for control dependencies.
        """
        parts = self._by_bucket(self._tensors(gradients))
        return [
            tf.numpy_function(
                partial(self._submit, number), inputs_of(parts[number]), tf.int64, stateful=True
            )
            for number in order_of(parts)
        ]

    def _tensors(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients of tables as IndexedSlices, all others as dense tensors."""
        check_gradients(gradients, self._names)
        given = zip(gradients, self._names, self.shapes, self._is_table, strict=True)
        return [as_tensor(*each) for each in given]

    def _by_bucket(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """Return the gradients of each bucket: tensors, or one IndexedSlices."""

        def part_of(piece: Piece) -> Any:
            whole = piece.shape == self.shapes[piece.variable]
            return tensors[piece.variable] if whole else tensors[piece.variable][piece.rows]

        return [[part_of(piece) for piece in bucket.pieces] for bucket in self._buckets]

    # ------------------------------------------------------------------------ outside of graphs

    def submit(self, bucket: int, gradient: Any) -> None:
        self.exchange.submit(bucket, gradient)

    def submit_inputs(self, inputs: Sequence[Any]) -> None:
        """Submit the whole gradient as ``inputs`` returned it: eager tensors, or arrays."""
        arrays = [array_of(each, self.topology.world.arrays) for each in inputs]
        dense = 0 if all(self._is_table) else 1
        of_tables, low = iter(arrays[dense:]), 0
        for number, bucket in enumerate(self._buckets):
            if bucket.table is not None:
                self.exchange.submit(number, self._gradient(number, next(of_tables), next(of_tables)))
            else:
                self.exchange.submit(number, arrays[0][low : low + bucket.size])
                low += bucket.size

    def wait(self) -> tuple[Array, Report]:
        """See :meth:`Exchange.wait`; the mean is an array of NumPy or CuPy, as gradients are exchanged."""
        if self._gpu is None:
            return self.exchange.wait()
        with self._gpu:
            mean, report = self.exchange.wait()
            # TensorFlow does not wait for CuPy's stream: it may use the gradient's memory again, and
            # still read the mean when the next step begins.
            module_of(mean).cuda.get_current_stream().synchronize()
            self._latest = mean
        return mean, report

    def sum_of(self, inputs: Sequence[Any], more: Sequence[Any]) -> list[Any]:
        """Return the sum of two gradients, as ``inputs`` returns them; rows of tables follow each other."""
        pairs = list(zip(inputs, more, strict=True))
        dense = [] if all(self._is_table) else [inputs[0] + more[0]]
        return dense + [tf.concat(pair, axis=0) for pair in pairs[len(dense) :]]

    def divided(self, inputs: Sequence[Any], parts: int) -> list[Any]:
        """Return a gradient, as ``inputs`` returns it, divided by ``parts``."""
        return [each if each.dtype.is_integer else each / parts for each in inputs]

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Let graphs run without an exchange: submitted gradients are dropped."""
        self._is_rehearsing = True
        try:
            yield
        finally:
            self._is_rehearsing = False

    # ------------------------------------------------------------------- bodies of operations

    def _submit(self, number: int, *arrays: Array) -> np.int64:
        """Submit a bucket, on a thread of TensorFlow's; an array keeps TensorFlow's memory in use."""
        if not self._is_rehearsing:
            gradient = self._gradient(number, *arrays)
            with self._lock:
                self.exchange.submit(number, gradient)
        return np.int64(number)

    def _exchange(self, *given: Any) -> list[Any]:
        """Exchange the gradient ``given``, or the buckets of these numbers, which were submitted already."""
        if not self.overlaps:
            self.submit_inputs(given)
        mean, entries, report = self.exchange.wait_sparse()
        rows = [
            array
            for number, vector in entries.items()
            for array in rows_of_entries(vector, self._buckets[number].table or ())
        ]
        return [mean, np.bool_(report.finite), *rows]

    def _exchange_on_gpu(self, flat: Any) -> tuple[Any, Any]:
        with self._gpu:
            self.submit_inputs([flat])
            mean, report = self.exchange.wait()
            return tensor_of(mean), tf.constant(report.finite)

    def _gradient(self, bucket: int, *arrays: Array) -> Any:
        shape = self._buckets[bucket].table
        return arrays[0] if shape is None else entries_of_rows(arrays[0], arrays[1], shape)


def _slices(rows: Any, values: Any, given: Any, shape: tuple[int, ...]) -> Any:
    """Return IndexedSlices of rows and values, of the types given."""
    rows.set_shape([None])
    values.set_shape([None, *shape[1:]])
    indices = tf.cast(rows, given.indices.dtype)
    return tf.IndexedSlices(tf.cast(values, given.dtype), indices, tf.constant(shape, tf.int64))
