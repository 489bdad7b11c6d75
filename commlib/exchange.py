"""The exchange of a gradient: frameworks submit buckets, and wait for the mean over all ranks.

A bucket is a contiguous part of the gradient with its own reducer. Without ``overlap`` the exchange happens
in ``wait``. With ``overlap`` a background thread exchanges each bucket as soon as it is submitted, while the
caller computes others.

>>> import numpy as np
>>> from commlib import Topology, transport
>>> def step(comm):
...     with BucketExchange(Topology(comm), [2, 4], {"name": "dense"}) as exchange:
...         exchange.submit(1, np.arange(4.0) * comm.rank)
...         exchange.submit(0, np.arange(2.0))
...         mean, report = exchange.wait()
...         return mean.tolist(), report.finite
>>> transport.simulated.run(step, world_size=2)[0]
([0.0, 1.0, 0.0, 0.5, 1.0, 1.5], True)
"""

import math
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from commlib.agreement import check_settings, differences, differing, digest
from commlib.arrays import clear
from commlib.errors import InvalidArgument, RanksDisagree, UseAfterClose
from commlib.reducers import Reducer, Report, make_reducer, part_of_wrapper, reducer_options
from commlib.reducers.base import added_residual
from commlib.reducers.mean import MeanBuffers
from commlib.reducers.report import merged
from commlib.topology import Topology
from commlib.trace import Recorder
from commlib.transport import simulated
from commlib.transport.base import Closing, Communicator
from commlib.vectors import VALUE_BYTES, Float32, SparseVector, non_finite

Found = TypeVar("Found")
Shapes = Sequence[tuple[int, ...]]  # of the variables of a bucket

NUMBER_OF_A_LAYER = re.compile(r"_\d+(?=/|:|$)")
ALL_ROWS = {"name": "ssar_split", "selector": "all", "density": 1.0}  # the reducer of a table


class Exchange(Closing, ABC):
    """Averages the gradient of each step over all ranks. ``guard``: a context in which ranks wait."""

    guard: Callable[[], AbstractContextManager[Any]] = staticmethod(nullcontext)

    @abstractmethod
    def submit(self, bucket: int, gradient: Any) -> None:
        """Give the gradient of one bucket, once a step, in any order and from any thread.

        ``gradient``: an array or a :class:`commlib.SparseVector`. It is not copied: it must stay as it is
        until ``wait`` returns.
        """

    @abstractmethod
    def wait(self) -> tuple[Any, Report]:
        """Return the mean of the whole gradient, float32 of shape ``(size,)``, and the report of the step.

        The mean is all NaN where the step is skipped (``report.finite`` is false). Where it is
        writeable the caller may write to it; its memory is used again when nobody refers to it.
        """


class BucketExchange(Exchange):
    """Averages a gradient in buckets of ``sizes`` entries, each with a reducer of its own.

    ``config``: the reducer's ``name`` and options, as for :func:`commlib.make_reducer`. Wrappers surround the
    reducer of each bucket; a norm for local clipping is divided among the buckets by ``√(d_b/d)``. The
    buckets ``tables`` are exempt: each takes a ``SparseVector`` and has the reducer ``table_config``. A step
    counts when all buckets are finite on all ranks; else no reducer changes its state. ``shapes``: of the
    variables in each bucket, in order, for reducers that take them.

    ``overlap``: exchange each bucket in a background thread. The order in which rank 0 receives the buckets
    of the first step is recorded, and is the order of the exchanges on all ranks from then on. While a step
    is under way the thread owns the communicators of the topology. Without ``overlap``, the last bucket is
    exchanged first.

    ``slices`` are the entries of each bucket in the mean, ``reducers`` their reducers.
    """

    def __init__(
        self,
        topology: Topology,
        sizes: Sequence[int],
        config: Mapping[str, Any],
        *,
        shapes: Sequence[Shapes] | None = None,
        tables: Collection[int] = (),
        table_config: Mapping[str, Any] = ALL_ROWS,
        overlap: bool = False,
    ) -> None:
        if not sizes:
            raise InvalidArgument("sizes: expected at least one bucket, got none")
        self.topology, self.sizes, self._shapes = topology, list(sizes), shapes
        ends = list(accumulate(sizes))
        self.slices = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self.size = ends[-1]
        self.overlaps = overlap and topology.world.size > 1
        self.order: list[int] = [] if self.overlaps else list(range(len(self.sizes)))[::-1]
        self._tables = {number: _make(table_config, topology, sizes[number]) for number in sorted(tables)}
        self._recorder: Recorder | None = None
        self._make_reducers(config)
        self._means = MeanBuffers(self.size, topology.world.arrays)
        self._mean: Any = None  # the array for the mean of the step that is under way
        self._submitted: dict[int, Any] = {}  # gradients of the step that is under way, by bucket
        self._takers: dict[int, Callable[[Float32], None]] = {}  # of the means of buckets, in this step
        self._given: list[int] | None = None  # its buckets in order, where ``submit_part`` began it
        self._samples: Sequence[int] | None = None  # of these buckets, the other way round
        self._results: dict[int, tuple[Any, Report]] = {}  # of the latest step that is over
        self._world = topology.world
        self._changed = self._world.condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_closed = self._is_over = False
        self._busy_seconds = self._over_at = 0.0

    # ------------------------------------------------------------------------------------ a step

    def submit(
        self,
        bucket: int,
        gradient: npt.ArrayLike | SparseVector,
        take: Callable[[Float32], None] | None = None,
    ) -> None:
        """See :meth:`Exchange.submit`. Raises ``InvalidArgument`` for a bucket that was submitted already.

        ``take`` is called with the mean of a dense bucket as soon as that is made, by the thread that
        exchanges, before it is known whether the step counts; with ``overlap``, and where the exchange fails
        or is closed, with the gradient. From then on the gradient may change.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._is_closed:
                raise UseAfterClose("the exchange was closed")
            if bucket in self._submitted or not 0 <= bucket < len(self.sizes):
                expected = f"one of the {len(self.sizes)} buckets that was not submitted in this step"
                raise InvalidArgument(f"bucket: expected {expected}, got {bucket}")
            if not self._submitted:
                self._mean, self._is_over = self._means.array(), False
            self._submitted[bucket] = gradient
            if take is not None:
                self._takers[bucket] = take
            if self.overlaps and self._thread is None:
                self._thread = self._world.start_thread(self._run)
            self._changed.notify_all()

    def submit_part(self, entries: slice, gradient: Float32, samples: Sequence[int] | None = None) -> None:
        """Submit a step of only the buckets inside ``entries``, with their part of the gradient.

        Other entries of the mean are undefined, and other reducers do not change. The last bucket is first.

        ``samples``: for each of these buckets, the samples that weight this rank's gradient. The gradient is
        then overwritten: rank ``r`` of ``R`` multiplies it by ``nᵣ·R/Σ n``. All ranks give samples, or none.
        """
        assert not self._submitted
        inside = {
            number: gradient[own.start - entries.start : own.stop - entries.start]
            for number, own in enumerate(self.slices)
            if entries.start <= own.start and own.stop <= entries.stop
        }
        self._given, self._samples = list(inside)[::-1], samples
        for number in self._given:
            self.submit(number, inside[number])

    def wait(self, since: float | None = None) -> tuple[Float32, Report]:
        """See :meth:`Exchange.wait`; the means of tables are made dense.

        ``since``: when the caller began to wait, by the clock of the transport; now by default.
        """
        mean, entries, report = self.wait_sparse(since)
        for number, vector in entries.items():
            part = mean[self.slices[number]]
            clear(part)
            vector.write_to(part)
        return mean, report

    def wait_sparse(self, since: float | None = None) -> tuple[Float32, dict[int, SparseVector], Report]:
        """Wait as ``wait`` does, but return the means of buckets that were given as entries apart.

        Their parts of the dense mean are undefined.
        """
        waited = 0.0
        if self.overlaps:
            waited = self._wait_for_thread(since)
        else:
            with self.guard():
                self._exchange_step()
        mean, self._mean = self._mean, None
        results, self._results = self._results, {}  # which refer to the memory of the mean
        report = merged([results[number][1] for number in sorted(results)])
        if self.overlaps:
            busy = self._busy_seconds
            report = replace(report, busy=busy, hidden=max(0.0, busy - waited))
        means = {number: results[number][0] for number in sorted(results)}
        entries = {number: each for number, each in means.items() if isinstance(each, SparseVector)}
        if not report.finite:
            mean.fill(np.nan)
            entries = {number: non_finite(each.size, self.arrays) for number, each in entries.items()}
        return mean, entries, report

    def _exchange_step(self) -> bool:
        """Reduce all buckets in order, and commit or discard the step; return false when it was closed."""
        results, begun = dict[int, tuple[Any, Report]](), self._world.now()
        given, self._given = self._given, None
        factors = self._factors(given)
        busy = self._world.now() - begun
        for turn in range(len(given or self.sizes)):
            if not given and turn == len(self.order) and not self._record_next():
                return False
            number = (given or self.order)[turn]
            gradient = self._gradient_of(number)
            if gradient is None:
                return False
            start = self._world.now()
            if (factor := factors.get(number, 1)) != 1:
                gradient *= factor
            out = None if isinstance(gradient, SparseVector) else self._mean[self.slices[number]]
            results[number] = self.reducers[number].propose(gradient, out)
            if number in self._takers:
                self._takers.pop(number)(results[number][0])
            end = self._world.now()
            busy += end - start
            if self._recorder is not None:
                self._recorder.add(f"bucket {number}", start, end)
        if given and self._recorder is not None:  # of a fragment, whose buckets these are
            low, high = self.slices[given[-1]].start, self.slices[given[0]].stop
            self._recorder.add(f"entries {low} to {high}", begun, end)
        is_finite = all(report.finite for _, report in results.values())
        for number, (_, report) in results.items():
            if is_finite:
                self.reducers[number].commit()
            elif report.finite:  # the others have discarded their step already
                self.reducers[number].discard()
        self._results, self._busy_seconds = results, busy
        self._submitted.clear()
        return True

    def _factors(self, given: Sequence[int] | None) -> dict[int, np.float32]:
        """Return by what this rank multiplies the gradient of each bucket, where samples weigh."""
        samples, self._samples = self._samples, None
        if given is None or samples is None:
            return {}
        of_ranks = self._world.allgather_ints(samples)
        of_ranks = np.where(of_ranks.any(axis=0), of_ranks, 1)  # none on any rank: all weigh the same
        factors = of_ranks[self._world.rank] * self._world.size / of_ranks.sum(axis=0)
        return dict(zip(given[::-1], factors.astype(np.float32), strict=True))

    def _gradient_of(self, number: int) -> Any:
        """Return the gradient of a bucket; the thread waits for it until the exchange is closed."""
        if self.overlaps:
            return self._wait_until(lambda: self._submitted.get(number))
        if number not in self._submitted:
            raise InvalidArgument(f"bucket: expected all {len(self.sizes)} in a step, {number} is missing")
        return self._submitted[number]

    # ----------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        """Exchange one step after the other: the body of the thread."""
        try:
            while self._wait_until(lambda: self._submitted or None) is not None:
                with self.guard():
                    if not self._exchange_step():
                        return
                with self._changed:
                    self._is_over, self._over_at = True, self._world.now()
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            for bucket, take in self._takers.items():  # so that nobody waits for a step that has failed
                with suppress(Exception):
                    take(self._submitted[bucket])

    def _wait_for_thread(self, since: float | None) -> float:
        """Wait until the step is over; return the seconds from ``since`` until it was, 0 if it was before.

        Raises what the thread has raised.
        """
        start = self._world.now() if since is None else since
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._error is not None or self._is_closed)
        if self._error is not None:
            raise self._error
        if not self._is_over:
            raise UseAfterClose("the exchange was closed before the step was over")
        return max(0.0, self._over_at - start)

    def _record_next(self) -> bool:
        """Record the bucket that rank 0 receives next as the next in order; false when it was closed."""
        first: int | None = 0
        if self._world.rank == 0:
            first = self._wait_until(
                lambda: next((number for number in self._submitted if number not in self.order), None)
            )
        if first is None:
            return False
        self.order.append(int(self._world.allgather_ints([first])[0, 0]))
        return True

    def _wait_until(self, find: Callable[[], Found | None]) -> Found | None:
        """Wait until ``find`` returns something, and return it; ``None`` when the exchange was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or find() is not None)
            return find()

    def close(self) -> None:
        """See :meth:`Exchange.close`. The topology stays open.

        A step of which only some buckets were submitted stays without a result, and the thread may go on
        waiting for other ranks.
        """
        self._end_thread(is_failing=False)
        for reducer in self.reducers:
            reducer.close()

    def __exit__(self, kind: object, *error: object) -> None:
        """Close the exchange; after an exception only end the thread, without waiting for a step."""
        if kind is None:
            self.close()
        else:
            self._end_thread(is_failing=True)

    def _end_thread(self, *, is_failing: bool) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            is_waiting = is_failing or bool(self._submitted)  # perhaps for a rank that has failed, too
        if self._thread is not None and not is_waiting:
            self._thread.join()

    # ---------------------------------------------------------------------------- the reducers

    def _make_reducers(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        takes_shapes = self._shapes is not None and "shapes" in reducer_options(config["name"])
        total = self.size - sum(self.sizes[number] for number in self._tables)

        def made(number: int, size: int) -> Reducer:
            wrappers = [part_of_wrapper(record, size / total) for record in config.get("wrappers", ())]
            shapes = {"shapes": self._shapes[number]} if self._shapes and takes_shapes else {}
            return _make({**shapes, **config, "wrappers": wrappers}, self.topology, size)

        tables = self._tables
        self.reducers = [tables.get(number) or made(number, size) for number, size in enumerate(self.sizes)]
        self.record(self._recorder)

    def switch(self, config: Mapping[str, Any]) -> None:
        """Replace the reducers; the first step of the new ones applies the residuals of the old ones.

        The reducers of tables stay. All ranks call it together, between two steps.
        """
        before = self.reducers
        self._make_reducers(config)
        for old, new in zip(before, self.reducers, strict=True):
            if old is not new:
                new.add_residual(old.residual)
                old.close()

    def record(self, recorder: Recorder | None) -> None:
        """Give a span of each stage and bucket to ``recorder``, or to none; between two steps."""
        self._recorder = recorder
        for reducer in self.reducers:
            reducer.record(recorder)

    @property
    def arrays(self) -> Any:
        """The array module of gradients and means, NumPy or CuPy."""
        return self.topology.world.arrays

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return self.reducers[0].steps

    @property
    def sparse(self) -> bool:
        """Whether a reducer sends a part of the gradient, and has a residual."""
        return any(reducer.sparse for reducer in self.reducers)

    @property
    def _selecting(self) -> list[Any]:
        """The reducers whose density can change: all, unless some send everything and others do not."""
        return [each for each in self.reducers if not getattr(each, "sends_all", False)] or self.reducers

    @property
    def density(self) -> float:
        """The density of the next step; only sparse reducers have one."""
        return float(self._selecting[0].density)

    def set_density(self, density: float) -> None:
        """Select another share of the entries from the next step on."""
        for reducer in self._selecting:
            reducer.set_density(density)

    @property
    def residual(self) -> Float32:
        """What this rank has not sent: a new float32 array of shape ``(size,)``."""
        residuals = [reducer.residual for reducer in self.reducers]
        residual: Float32 = residuals[0] if len(residuals) == 1 else self.arrays.concatenate(residuals)
        return residual

    def add_residual(self, residual: Float32) -> None:
        """Add a vector of shape ``(size,)`` to this rank's next gradient that counts."""
        whole = added_residual(None, residual, self.size, self.arrays)
        for reducer, part in zip(self.reducers, self.slices, strict=True):
            reducer.add_residual(whole[part])

    def settings(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks, by name; each bucket's in ``buckets``."""
        own = {"reducer": "Buckets", "size": self.size, "nodes": self.topology.nodes}
        return own | {"buckets": [reducer.settings() for reducer in self.reducers]}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the only reducer, or the states of several in ``buckets``."""
        states = [reducer.state_dict() for reducer in self.reducers]
        if len(states) == 1:
            return states[0]
        return {"settings": self.settings(), "steps": self.steps, "carried": None, "buckets": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned; ``ValueError`` for other buckets, reducers or nodes."""
        if len(self.reducers) == 1:
            self.reducers[0].load_state_dict(state)
            return
        check_settings(state["settings"], self.settings())
        for reducer, each in zip(self.reducers, state["buckets"], strict=True):
            reducer.load_state_dict(each)


class Piece(NamedTuple):
    """A variable, or some rows of it. ``start``: the first entry, in the vector of all variables."""

    variable: int
    rows: slice
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def pieces_of(shapes: Shapes, cuts: Collection[int]) -> list[Piece]:
    """Return variables of ``shapes``, in order, cut at the entries ``cuts``, each of which is between rows.

    >>> [(piece.variable, piece.rows, piece.shape) for piece in pieces_of([(2,), (4, 3)], [2, 8])]
    [(0, slice(0, 2, None), (2,)), (1, slice(0, 2, None), (2, 3)), (1, slice(2, 4, None), (2, 3))]
    """
    pieces, end = list[Piece](), 0
    for number, shape in enumerate(shapes):
        start, end = end, end + math.prod(shape)
        rows = shape[0] if shape else 1
        ends = [(cut - start) * rows // (end - start) for cut in sorted(cuts) if start < cut < end]
        for low, high in pairwise([0, *ends, rows]):
            own = (high - low, *shape[1:]) if shape else shape
            pieces.append(Piece(number, slice(low, high), own, start))
            start += pieces[-1].size
    return pieces


LEAST_HALF_BYTES = 1 << 20  # less is not worth another message


def bucket_bounds(sizes: Sequence[int], most_bytes: int) -> list[int]:
    """Return the bounds, in entries, of the buckets of variables of ``sizes`` entries.

    Backpropagation yields the gradients of the last variables first, so buckets are filled from the end. A
    bucket has at most ``most_bytes`` of float32 values, unless a single variable has more, and at most half
    of what is left, if that is 1 MiB or more: the last one, which nothing is left to hide, is small.

    >>> bucket_bounds([10, 20, 30, 5], most_bytes=4 * 40)
    [0, 30, 65]
    >>> bucket_bounds([100_000] * 16, most_bytes=25 << 20)
    [0, 400000, 800000, 1600000]
    """
    if most_bytes < 1:
        raise InvalidArgument(f"bucket_bytes: expected at least 1, got {most_bytes!r}")
    ends = np.cumsum([0, *sizes]).tolist()
    bounds = [ends[-1]]
    for low, variable_low in zip(ends[-2::-1], ends[-3::-1] + [0], strict=False):
        left = VALUE_BYTES * bounds[0]
        most = min(most_bytes, left // 2 if left >= 2 * LEAST_HALF_BYTES else left)
        if low < bounds[0] and VALUE_BYTES * (bounds[0] - variable_low) > most:
            bounds.insert(0, low)
    return bounds if bounds[0] == 0 else [0, *bounds]


def check_variables(world: Communicator, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise ``RanksDisagree``, on all ranks, unless all have the same variables in the same order.

    The numbers that Keras appends to the names of a process' second layer of a kind are not compared.
    """
    plain = [NUMBER_OF_A_LAYER.sub("", name) for name in names]
    own = [f"{name} of shape {shape}" for name, shape in zip(plain, shapes, strict=True)]
    if not differing(world.allgather_ints([digest([repr(own).encode()])])[:, 0]):
        return
    everywhere = world.allgather_objects(own)
    most = max(map(len, everywhere))
    settings = [
        {f"number {place}": each[place] if place < len(each) else "none" for place in range(most)}
        for each in everywhere
    ]
    first = differences(settings).split("; ")[0]
    raise RanksDisagree(f"variables: expected the same on all ranks, in the same order: {first}")


def check_config(config: Mapping[str, Any], topology: Topology | None = None) -> dict[str, Any]:
    """Return a copy of a reducer's configuration; a wrong one is refused here, and not in the first step.

    ``topology``: the topology to make the reducer on; without one nothing is sent, and the configuration is
    checked on a single rank.
    """
    if not isinstance(config, Mapping) or "name" not in config:
        raise InvalidArgument(f'config: expected {{"name": a reducer, its options: …}}, got {config!r}')
    if topology is None:
        simulated.run(lambda comm: _make(config, Topology(comm), 1), 1)
    else:
        _make(config, topology, 1)
    return dict(config)


def _make(config: Mapping[str, Any], topology: Topology, size: int) -> Reducer:
    options = dict(config)
    return make_reducer(options.pop("name"), topology, size, **options)
