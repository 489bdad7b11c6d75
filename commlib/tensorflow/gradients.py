"""Gradients inside ``tf.function``: from variables to buckets of a reducer, and their means back.

Where the topology's transport moves arrays of GPUs, gradients and means stay on the GPU: TensorFlow and CuPy
hand each other their memory by DLPack. TensorFlow tells nobody which streams it computes on, so the host
waits in between, twice a step: until the gradient is there, and until the mean is.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np

from commlib.arrays import Array, module_of
from commlib.engine import Engine, Future
from commlib.errors import InvalidArgument
from commlib.fusion import Buckets, bucket_bounds, check_variables, make_buckets
from commlib.reducers import Reducer, Report, make_reducer
from commlib.reducers.mean import Means
from commlib.sparse_gradients import entries_of_rows, rows_of_entries
from commlib.tensorflow.tensors import (
    apart,
    array_of,
    as_slices,
    check_gradients,
    cut_up,
    dense_gradients,
    flattened,
    inputs_of,
    made_dense,
    order_of,
    tensor_of,
    tensorflow_device,
)
from commlib.tf_logging import without_noise
from commlib.topology import Topology
from commlib.trace import Recorder
from commlib.vectors import Float32, SparseVector

with without_noise():
    import tensorflow as tf

ALL_ROWS = {"name": "ssar_split", "selector": "all", "density": 1.0}  # the reducer of a table


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

    ``tables``: those of the variables whose gradients are IndexedSlices, and stay so. Each has a reducer of
    its own, by ``table_config``, and is no part of the vector. By default that sends all rows that it is
    given and keeps no residual: no array of a table's size is made. ``reducer`` is then the
    :class:`commlib.Buckets` of the vector's reducers and those of the tables.

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
        tables: Sequence[Any] = (),
        table_config: Mapping[str, Any] = ALL_ROWS,
    ) -> None:
        self.topology = topology
        self._names = [str(getattr(variable, "path", variable.name)) for variable in variables]
        shapes = [tuple(variable.shape) for variable in variables]
        check_variables(topology.world, self._names, shapes)
        self._is_table = [any(variable is table for table in tables) for variable in variables]
        self._shapes, self._table_shapes = apart(shapes, self._is_table)
        self._check_tables(tables)
        self.sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self._shapes]
        self.size = sum(self.sizes)
        self._gpu: Any = None  # CuPy's device
        self._latest: Any = None  # mean on the GPU
        if topology.world.arrays is not np:
            self._gpu = topology.world.arrays.cuda.Device()  # for threads of TensorFlow it is not current
            self._device = tensorflow_device(self._gpu.id)
        self._bounds = [0, self.size] if self.size else [0]
        if bucket_bytes is not None and self.size and topology.world.size > 1 and self._gpu is None:
            self._bounds = bucket_bounds(self.sizes, bucket_bytes)
        self._tables = [self._make_table(shape, table_config) for shape in self._table_shapes]
        self.overlaps = overlap and topology.world.size > 1 and self._gpu is None and self.buckets > 1
        # TensorFlow reads means when it likes, and may compute in their memory: they are not the reducer's.
        self._means = Means(self.size, topology.world.arrays)
        self.guard: Callable[[], AbstractContextManager[Any]] = nullcontext  # in which each exchange happens
        self._futures: dict[int, Future[Any]] = {}  # of the buckets of the step that is under way
        self._mean: Float32 | None = None  # in which its means are made
        self._lock = threading.Lock()
        self._is_rehearsing = False
        self._engine: Engine | None = None
        self._recorder: Recorder | None = None
        self.reducer = self._make(config)

    def _make(self, config: Mapping[str, Any]) -> Reducer:
        self.config = dict(config)
        options = dict(config)
        reducer = self._with_tables(options.pop("name"), options)
        reducer.record(self._recorder)
        if self.overlaps:
            assert isinstance(reducer, Buckets)
            self._engine = Engine(reducer)
            self._engine.guard = lambda: self.guard()  # it is set later
        return reducer

    def _with_tables(self, name: str, options: Mapping[str, Any]) -> Reducer:
        """Return a new reducer of the vector, with those of the tables, which stay."""
        if not self._tables:
            return make_buckets(name, self.topology, self._bounds, **options)
        if not self.size:
            return Buckets(self._tables)
        reducer = make_buckets(name, self.topology, self._bounds, **options)
        return Buckets([*(reducer.reducers if isinstance(reducer, Buckets) else [reducer]), *self._tables])

    def _make_table(self, shape: tuple[int, ...], config: Mapping[str, Any]) -> Reducer:
        options, size = dict(config), int(np.prod(shape, dtype=np.int64))
        return make_reducer(options.pop("name"), self.topology, size, **options)

    def _check_tables(self, tables: Sequence[Any]) -> None:
        found = sum(self._is_table)
        if found != len(tables):
            raise InvalidArgument(f"tables: expected some of the variables, {found} of {len(tables)} are")
        if tables and self.topology.world.arrays is not np:
            raise InvalidArgument("tables: expected none with a transport that moves arrays of GPUs")

    @property
    def buckets(self) -> int:
        """How many parts are reduced on their own: of the vector, and the tables."""
        return len(self._bounds) - 1 + len(self._tables)

    def switch(self, config: Mapping[str, Any]) -> None:
        """Replace the reducer; what the old one held back goes into the first step of the new one.

        Takes effect in functions that are already traced, too. All ranks call it together.
        """
        if self._gpu is not None:
            self._gpu.synchronize()  # TensorFlow may still read a mean whose memory is free by now
        self._end_engine()
        before, self.reducer = self._of_vector(), self._make(config)
        for old, new in zip(before, self._of_vector(), strict=True):
            new.add_residual(old.residual)
            old.close()

    def _of_vector(self) -> list[Reducer]:
        """Return the reducers of the vector's buckets."""
        if not self._tables:
            return [self.reducer]
        assert isinstance(self.reducer, Buckets)
        return self.reducer.reducers[: len(self._bounds) - 1]

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

        ``gradients`` come in the order of the variables; IndexedSlices are made dense, but for those of
        ``tables``: their means are IndexedSlices of the rows that any rank has, sorted and each once.
        ``None``, of a variable that the loss does not depend on here, is zero in float32, and warned of. The
        second result is a scalar bool tensor: false where a NaN or an infinity on any rank made all of them
        skip the step. The memory of the means is used again for later ones after the tensors are gone, and
        not before.
        """
        tensors, slices = self._tensors(gradients)
        results = [tf.float32, tf.bool, *[tf.int64, tf.float32] * len(slices)]
        if self.overlaps:
            submitted = self._submit_all(tensors, slices)
            found = tf.numpy_function(self._collect, submitted, results, stateful=True)
        elif self._gpu is None:
            inputs = [flattened(tensors), *chain.from_iterable(map(inputs_of, slices))]
            found = tf.numpy_function(self._reduce_all, inputs, results, stateful=True)
        else:
            flat = flattened(tensors)
            with tf.device(self._device):
                found = tf.py_function(self._reduce_on_gpu, [flat], results)
        mean, finite, *rows = found
        mean.set_shape([self.size])
        finite.set_shape([])
        parts = cut_up(mean, self._shapes)
        means = iter([tf.cast(part, tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)])
        of_tables = iter(self._slices(rows, slices))
        return [next(of_tables if is_table else means) for is_table in self._is_table], finite

    def _slices(self, rows: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        """Return IndexedSlices of the rows and values of each table, of the types given."""
        made, pairs = [], zip(rows[::2], rows[1::2], strict=True)
        for (numbers, values), each, shape in zip(pairs, given, self._table_shapes, strict=True):
            numbers.set_shape([None])
            values.set_shape([None, *shape[1:]])
            indices = tf.cast(numbers, each.indices.dtype)
            made.append(tf.IndexedSlices(tf.cast(values, each.dtype), indices, tf.constant(shape, tf.int64)))
        return made

    def submit(self, gradients: Sequence[Any]) -> list[Any]:
        """Start the exchange of the gradients in the background, where it ``overlaps``; ``collect`` waits.

        For ``tf.function``, whose graph is not held up: it has an operation for each bucket, which runs as
        soon as the gradients of that are there. The result is there for control dependencies.
        """
        self._expect_no_tables("submit")
        return self._submit_all(*self._tensors(gradients))

    def _expect_no_tables(self, call: str) -> None:
        if self._tables:
            raise InvalidArgument(f"tables: expected none for {call}, whose means are one vector, or reduce")

    def _submit_all(self, tensors: list[Any], slices: list[Any]) -> list[Any]:
        """Submit the buckets in the order in which the graph yields the last of their gradients."""
        ends = np.cumsum([0, *self.sizes])
        parts = [
            *(tensors[first:last] for first, last in pairwise(np.searchsorted(ends, self._bounds).tolist())),
            *slices,
        ]
        return [
            tf.numpy_function(
                partial(self._submit, number), inputs_of(parts[number]), tf.int64, stateful=True
            )
            for number in order_of(parts)
        ]

    def _submit(self, number: int, *arrays: Array) -> np.int64:
        """Give a bucket to the engine: the body of an operation, on a thread of TensorFlow's."""
        assert self._engine is not None
        buckets = self._engine.buckets
        with self._lock:
            if not self._is_rehearsing:
                reducer, table = buckets.reducers[number], number - len(self._bounds) + 1
                if table >= 0:
                    rows, values = arrays
                    entries = entries_of_rows(rows, values, self._table_shapes[table])
                    self._futures[number] = self._engine.submit(reducer, entries)
                    return np.int64(number)
                if self._mean is None:
                    self._mean = self._means.array()
                out = self._mean[buckets.slices[number]]
                # The array is TensorFlow's memory, which the array keeps from being used for another tensor.
                self._futures[number] = self._engine.submit(reducer, arrays[0], out)
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
        return self._wait()[:2]

    def _wait(self) -> tuple[Array, Report, list[SparseVector]]:
        """Return the mean of the vector, what the reducer did, and the means of the tables."""
        assert self._engine is not None
        with self._lock:
            (futures, self._futures), (mean, self._mean) = (self._futures, {}), (self._mean, None)
        means = [futures[number].result() for number in range(self.buckets)]
        report = self.reducer.last
        assert report is not None
        mean = self._means.array() if mean is None else mean  # of a vector without entries
        busy = self._engine.busy_seconds
        report = replace(report, busy=busy, hidden=max(0.0, busy - self._engine.waited_seconds))
        return mean, report, means[len(self._bounds) - 1 :]

    def _collect(self, *numbers: np.int64) -> list[Any]:
        mean, report, of_tables = self._wait()
        return [mean, np.bool_(report.finite), *self._rows(of_tables)]

    def _rows(self, means: Sequence[SparseVector]) -> list[Array]:
        """Return the rows and the values of each table, one after the other."""
        pairs = zip(means, self._table_shapes, strict=True)
        return [array for mean, shape in pairs for array in rows_of_entries(mean, shape)]

    def _tensors(self, gradients: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the gradients of the vector, dense, and those of the tables, as IndexedSlices."""
        if not self._tables:
            return dense_gradients(gradients, self._names, self._shapes), []
        check_gradients(gradients, self._names)
        dense, slices = apart(gradients, self._is_table)
        table_names = apart(self._names, self._is_table)[1]
        return made_dense(dense, self._shapes), [
            as_slices(*each) for each in zip(slices, table_names, self._table_shapes, strict=True)
        ]

    def reduce_flat(self, flat: Any) -> tuple[Array, Report]:
        """Return the mean of all gradients as one array, and what the reducer did; outside ``tf.function``.

        ``flat``: a float32 tensor of shape ``(size,)``, on the GPU where the transport moves arrays of GPUs.
        The mean is an array of NumPy or CuPy, where ``flat`` is, and the caller may write to it. Its memory
        is used again after the array and all tensors of it (see :func:`tensor_of`) are gone.
        """
        self._expect_no_tables("reduce_flat")
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

    def _reduce_all(self, flat: Float32, *pairs: Array) -> list[Any]:
        """Reduce the vector, and the tables of which ``pairs`` are rows and values, as one step."""
        if not self._tables:
            return list(self._reduce(flat))
        buckets, mean, count = self.reducer, self._means.array(), len(self._bounds) - 1
        assert isinstance(buckets, Buckets)
        with self.guard():
            means: list[Float32 | SparseVector] = []
            for rows, values, shape, table in zip(
                pairs[::2], pairs[1::2], self._table_shapes, self._tables, strict=True
            ):
                means.append(table.propose(entries_of_rows(rows, values, shape)))
            for reducer, part in zip(buckets.reducers[:count], buckets.slices[:count], strict=True):
                means.append(reducer.propose(flat[part], out=mean[part]))
            settled: list[Any] = buckets.settle(means)
        assert buckets.last is not None
        return [mean, np.bool_(buckets.last.finite), *self._rows(settled[: len(self._tables)])]
