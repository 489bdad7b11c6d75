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
from itertools import chain
from typing import Any

import numpy as np

from commlib.arrays import Array, module_of
from commlib.engine import Engine, Future
from commlib.errors import InvalidArgument
from commlib.fusion import Buckets, check_variables, make_buckets
from commlib.reducers import Reducer, Report, make_reducer
from commlib.tensorflow.layout import Layout, Room
from commlib.tensorflow.tensors import (
    array_of,
    flattened,
    inputs_of,
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
    travel as one float32 vector; ``size`` are the entries of all variables, ``sizes`` those of each.
    ``reducer`` is there, and ``config`` is that of it.

    ``bucket_bytes``: the vector is reduced in buckets of so many bytes at most, see
    :func:`commlib.fusion.bucket_bounds`; by default it is one. ``overlap``: each bucket is reduced in the
    background from when the gradients of its variables are there, while others are still computed; the means
    are the same to the bit. ``overlaps`` tells whether that is so: neither is done where there is one rank,
    or where the vector is on GPUs.

    ``tables``: those of the variables whose gradients are IndexedSlices, and stay so. Each has a reducer of
    its own, by ``table_config``, and is no part of the vector, which is cut where a table is among its
    variables. By default that sends all rows that it is given and keeps no residual: ``reduce`` makes no
    array of a table's size. ``reducer`` is then the :class:`commlib.Buckets` of the vector's reducers and
    those of the tables, in the order of the variables.

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
        names = [str(getattr(variable, "path", variable.name)) for variable in variables]
        shapes = [tuple(variable.shape) for variable in variables]
        check_variables(topology.world, names, shapes)
        is_table = [any(variable is table for table in tables) for variable in variables]
        self._check_tables(len(tables), sum(is_table))
        self._gpu: Any = None  # CuPy's device
        self._latest: Any = None  # mean on the GPU
        if topology.world.arrays is not np:
            self._gpu = topology.world.arrays.cuda.Device()  # for threads of TensorFlow it is not current
            self._device = tensorflow_device(self._gpu.id)
        is_cut = topology.world.size > 1 and self._gpu is None
        self._layout = Layout(names, shapes, is_table, bucket_bytes if is_cut else None)
        self.sizes = self._layout.sizes
        self.size = sum(self.sizes)
        self._tables = [self._make_table(shape, table_config) for shape in self._layout.table_shapes]
        self.overlaps = overlap and topology.world.size > 1 and self._gpu is None and self.buckets > 1
        self.guard: Callable[[], AbstractContextManager[Any]] = nullcontext  # in which each exchange happens
        self._futures: dict[int, Future[Any]] = {}  # of the buckets of the step that is under way
        self._mean: Float32 | None = None  # in which its means are made
        self._lock = threading.Lock()
        self._is_rehearsing = False
        self._engine: Engine | None = None
        self._recorder: Recorder | None = None
        self.reducer = self._make(config)
        # TensorFlow reads means when it likes, and may compute in their memory: they are not the reducer's.
        sizes = [reducer.size for reducer in self._reducers]
        of_vector = self._layout.in_order(self._layout.apart(sizes)[0], [0] * len(tables))
        self._vector, self._whole = (Room.of(each, topology.world.arrays) for each in (of_vector, sizes))

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
        of_vector: list[Reducer] = []
        if self._layout.bounds[-1]:
            reducer = make_buckets(name, self.topology, self._layout.bounds, **options)
            if not self._tables:
                return reducer
            of_vector = reducer.reducers if isinstance(reducer, Buckets) else [reducer]
        return Buckets(self._layout.in_order(of_vector, self._tables))

    def _make_table(self, shape: tuple[int, ...], config: Mapping[str, Any]) -> Reducer:
        options, size = dict(config), int(np.prod(shape, dtype=np.int64))
        return make_reducer(options.pop("name"), self.topology, size, **options)

    def _check_tables(self, given: int, found: int) -> None:
        if found != given:
            raise InvalidArgument(f"tables: expected some of the variables, {found} of {given} are")
        if given and self.topology.world.arrays is not np:
            raise InvalidArgument("tables: expected none with a transport that moves arrays of GPUs")

    @property
    def buckets(self) -> int:
        """How many parts are reduced on their own: of the vector, and the tables."""
        return len(self._layout.order)

    def switch(self, config: Mapping[str, Any]) -> None:
        """Replace the reducer; what the old one held back goes into the first step of the new one.

        Takes effect in functions that are already traced, too. All ranks call it together.
        """
        if self._gpu is not None:
            self._gpu.synchronize()  # TensorFlow may still read a mean whose memory is free by now
        self._end_engine()
        before, self.reducer = self._reducers, self._make(config)
        pairs = list(zip(before, self._reducers, strict=True))
        for old, new in self._layout.apart(pairs)[0]:
            new.add_residual(old.residual)
            old.close()

    @property
    def _reducers(self) -> list[Reducer]:
        """The reducer of each bucket."""
        return self.reducer.reducers if isinstance(self.reducer, Buckets) else [self.reducer]

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
        tensors, slices = self._layout.tensors(gradients)
        results = [tf.float32, tf.bool, *[tf.int64, tf.float32] * len(slices)]
        if self.overlaps:
            submitted = self._submit_all(tensors, slices, self._vector)
            found = tf.numpy_function(self._collect, submitted, results, stateful=True)
        elif self._gpu is None:
            inputs = _inputs(tensors, slices)
            found = tf.numpy_function(self._reduce_all, inputs, results, stateful=True)
        else:
            flat = flattened(tensors)
            with tf.device(self._device):
                found = tf.py_function(self._reduce_on_gpu, [flat], results)
        mean, finite, *rows = found
        finite.set_shape([])
        return self._layout.mean_gradients(mean, rows, tensors, slices), finite

    def submit(self, gradients: Sequence[Any]) -> list[Any]:
        """Start the exchange of the gradients in the background, where it ``overlaps``; ``collect`` waits.

        For ``tf.function``, whose graph is not held up: it has an operation for each bucket, which runs as
        soon as the gradients of that are there. The result is there for control dependencies.
        """
        return self._submit_all(*self._layout.tensors(gradients), self._whole)

    def inputs(self, gradients: Sequence[Any]) -> list[Any]:
        """Return what ``reduce_flat`` takes: the vector, then rows and values of each table."""
        return _inputs(*self._layout.tensors(gradients))

    def _submit_all(self, tensors: list[Any], slices: list[Any], room: Room) -> list[Any]:
        """Submit the buckets in the order in which the graph yields the last of their gradients."""
        parts = self._layout.parts(tensors, slices)
        return [
            tf.numpy_function(
                partial(self._submit, number, room), inputs_of(parts[number]), tf.int64, stateful=True
            )
            for number in order_of(parts)
        ]

    def _submit(self, number: int, room: Room, *arrays: Array) -> np.int64:
        """Give a bucket to the engine: the body of an operation, on a thread of TensorFlow's."""
        assert self._engine is not None
        if self._is_rehearsing:
            return np.int64(number)
        reducer, (is_table, table) = self._engine.buckets.reducers[number], self._layout.order[number]
        # An array is TensorFlow's memory, which the array keeps from being used for another tensor.
        gradient: Any = arrays[0]
        if is_table:
            gradient = self._layout.entries(table, arrays[0], arrays[1])
        with self._lock:
            if self._mean is None:
                self._mean = room.means.array()
            out = None if is_table else self._mean[room.slices[number]]
            self._futures[number] = self._engine.submit(reducer, gradient, out)
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
        mean, report, of_tables = self._wait()
        self._write_tables(mean, of_tables)
        return mean, report

    def _write_tables(self, mean: Array, of_tables: Sequence[SparseVector]) -> None:
        """Write the means of the tables where they are in that of all variables."""
        for vector, part in zip(of_tables, self._layout.apart(self._whole.slices)[1], strict=True):
            mean[part].fill(0)
            vector.write_to(mean[part])

    def _wait(self) -> tuple[Array, Report, list[SparseVector]]:
        """Return the array of means, what the reducer did, and the means of the tables."""
        assert self._engine is not None
        with self._lock:
            (futures, self._futures), (mean, self._mean) = (self._futures, {}), (self._mean, None)
        means = [futures[number].result() for number in range(self.buckets)]
        report = self.reducer.last
        assert report is not None and mean is not None
        busy = self._engine.busy_seconds
        report = replace(report, busy=busy, hidden=max(0.0, busy - self._engine.waited_seconds))
        return mean, report, self._layout.apart(means)[1]

    def _collect(self, *numbers: np.int64) -> list[Any]:
        mean, report, of_tables = self._wait()
        return [mean, np.bool_(report.finite), *self._layout.rows(of_tables)]

    def reduce_flat(self, flat: Any, *tables: Any) -> tuple[Array, Report]:
        """Return the mean of all gradients as one array, and what the reducer did; outside ``tf.function``.

        ``flat``: a float32 tensor of the vector, on the GPU where the transport moves arrays of GPUs.
        ``tables``: rows and values of each table, one after the other; see :meth:`inputs`. The mean, of shape
        ``(size,)``, has the gradients of all variables in their order. It is an array of NumPy or CuPy, where
        ``flat`` is, and the caller may write to it. Its memory is used again after the array and all tensors
        of it (see :func:`tensor_of`) are gone.
        """
        if self._tables:
            mean, of_tables = self._reduce_parts(self._whole, *map(array_of, (flat, *tables)))
            self._write_tables(mean, of_tables)
        elif self._gpu is None:
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
            mean = self.reducer.reduce(flat, out=self._vector.means.array())
        assert self.reducer.last is not None
        return mean, np.bool_(self.reducer.last.finite)

    def _reduce_all(self, flat: Float32, *pairs: Array) -> list[Any]:
        """Reduce the vector, and the tables of which ``pairs`` are rows and values, as one step."""
        if not self._tables:
            return list(self._reduce(flat))
        mean, of_tables = self._reduce_parts(self._vector, flat, *pairs)
        assert self.reducer.last is not None
        return [mean, np.bool_(self.reducer.last.finite), *self._layout.rows(of_tables)]

    def _reduce_parts(self, room: Room, flat: Float32, *pairs: Array) -> tuple[Float32, list[SparseVector]]:
        """Return the array of means of a step, and the means of the tables."""
        buckets, mean = self.reducer, room.means.array()
        assert isinstance(buckets, Buckets)
        given = list(zip(pairs[::2], pairs[1::2], strict=True))
        with self.guard():
            means: list[Any] = []
            for place, (is_table, number) in enumerate(self._layout.order):
                if is_table:
                    means.append(buckets.propose_bucket(place, self._layout.entries(number, *given[number])))
                else:
                    part, out = flat[self._vector.slices[place]], mean[room.slices[place]]
                    means.append(buckets.propose_bucket(place, part, out))
            settled: list[Any] = buckets.settle(means)
        return mean, self._layout.apart(settled)[1]


def _inputs(tensors: Sequence[Any], slices: Sequence[Any]) -> list[Any]:
    """Return the vector of some gradients, and rows and values of the others."""
    return [flattened(tensors), *chain.from_iterable(map(inputs_of, slices))]
