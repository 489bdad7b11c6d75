"""Reductions in the background: while a rank computes, a thread of its own exchanges what is ready.

>>> import numpy as np
>>> from commlib import Topology, make_reducer, transport
>>> def step(comm):
...     topology = Topology(comm)
...     first, second = (make_reducer("dense", topology, size) for size in (2, 4))
...     with Engine(Buckets([first, second])) as engine:
...         futures = [engine.submit(second, np.arange(4.0)), engine.submit(first, np.arange(2.0))]
...         return [future.result().tolist() for future in futures]
>>> transport.simulated.run(step, world_size=2)[0]
[[0.0, 1.0, 2.0, 3.0], [0.0, 1.0]]
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, overload

import numpy.typing as npt

from commlib.errors import InvalidArgument, UseAfterClose
from commlib.fusion import Buckets
from commlib.reducers.base import Reducer
from commlib.reducers.mean import MeanBuffers
from commlib.vectors import Float32, SparseVector

Found = TypeVar("Found")
Mean = TypeVar("Mean", Float32, SparseVector)


class Future(Generic[Mean]):
    """The mean of a gradient that was submitted."""

    def __init__(self, engine: "Engine", step: int) -> None:
        self._engine, self._step = engine, step
        self.mean: Any = None  # until the step is over

    def result(self) -> Mean:
        """Wait until the whole step is over; return the mean, all NaN where the step is skipped.

        That of a ``SparseVector`` is as :meth:`commlib.Reducer.reduce` returns it. Raises what the exchange
        of any bucket of the step, or of an earlier one, has raised on this rank.
        """
        self._engine.wait_for(self._step)
        return self.mean  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Submission:
    """A gradient that waits for its turn, where its mean is written, and who asks for that."""

    gradient: npt.ArrayLike | SparseVector
    out: Float32 | None
    future: Future[Any]


class Engine:
    """Reduces the buckets of a step in a thread, each as soon as it is submitted, in one order on all ranks.

    A step is one submission of each of ``buckets.reducers``, in any order and from any thread. The order in
    which rank 0 gets them in the first step is recorded there, and is the order of the exchanges on all ranks
    from then on. The step is committed, or discarded, when all its buckets are reduced.

    While a step is under way the thread owns the communicators of the topology: nothing else may exchange
    over them. ``busy_seconds``: how long the thread took for the buckets of the latest step;
    ``waited_seconds``: how long results of it were waited for; both by the transport's clock.

    ``guard``: a context in which the thread takes each step, such as a watchdog's.

    A context manager. ``close()`` ends the thread; reducers and topology stay open.
    """

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self.order: list[int] = []
        self.busy_seconds = self.waited_seconds = 0.0
        self._numbers = {id(reducer): number for number, reducer in enumerate(buckets.reducers)}
        self._means = [MeanBuffers(reducer.size, reducer.arrays) for reducer in buckets.reducers]
        self._submitted: dict[int, _Submission] = {}  # of the step that is under way, in the order of arrival
        self.guard: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._steps = 0  # that are over
        self._error: BaseException | None = None
        self._is_closed = False
        self._world = buckets.topology.world
        self._changed = self._world.condition()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Engine":
        """Return it, to be closed at the end of the block."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the thread; a step that is under way is not waited for where an exception leaves the block."""
        self._end(is_failing=error[0] is not None)

    def close(self) -> None:
        """End the thread; all ranks call it between two steps.

        A step of which only some buckets were submitted stays without a result, and the thread may go on
        waiting for other ranks.
        """
        self._end(is_failing=False)

    @overload
    def submit(self, reducer: Reducer, gradient: SparseVector) -> Future[SparseVector]: ...

    @overload
    def submit(
        self, reducer: Reducer, gradient: npt.ArrayLike, out: Float32 | None = None
    ) -> Future[Float32]: ...

    def submit(
        self, reducer: Reducer, gradient: npt.ArrayLike | SparseVector, out: Float32 | None = None
    ) -> Future[Any]:
        """Give the gradient of one bucket to the thread; return at once.

        ``gradient``, an array or a ``SparseVector``, is not copied: it stays as it is until the step is over.
        ``out``: as for :meth:`commlib.Reducer.reduce`; without it the mean is memory that is used again once
        nobody holds it. Raises ``InvalidArgument`` for a reducer that is none of the step's, or was submitted
        in it already.
        """
        number = self._numbers.get(id(reducer))
        if number is None:
            raise InvalidArgument(f"reducer: expected one of the engine's {len(self._numbers)}, got another")
        with self._changed:
            if self._is_closed:
                raise UseAfterClose("the engine was closed")
            if number in self._submitted:
                raise InvalidArgument(f"reducer: bucket {number} was submitted in this step already")
            if not self._submitted:
                self.busy_seconds = self.waited_seconds = 0.0
            if out is None and not isinstance(gradient, SparseVector):
                out = self._means[number].array()
            future: Future[Any] = Future(self, self._steps)
            self._submitted[number] = _Submission(gradient, out, future)
            if self._thread is None:
                self._thread = self._world.start_thread(self._run)
            self._changed.notify_all()
            return future

    def wait_for(self, step: int) -> None:
        """Wait until a step is over; raise what went wrong in the thread."""
        start = self._world.now()
        with self._changed:
            self._changed.wait_for(lambda: self._steps > step or self._error is not None or self._is_closed)
        waited = self._world.now() - start
        with self._changed:
            self.waited_seconds += waited
            if self._error is not None:
                raise self._error
            if self._steps <= step:
                raise UseAfterClose("the engine was closed before the step was over")

    def _run(self) -> None:
        """Take one step after the other: the thread's body."""
        try:
            while self._step():
                pass
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _step(self) -> bool:
        """Reduce all buckets of a step, and settle it; return false where the engine was closed."""
        if self._wait_for(lambda: self._submitted or None) is None:
            return False
        with self.guard():
            means = self._reduce()
            if means is None:
                return False
            settled = self.buckets.settle(means)
        with self._changed:
            for number, mean in zip(self.order, settled, strict=True):
                self._submitted[number].future.mean = mean
            self._submitted.clear()
            self._steps += 1
            self._changed.notify_all()
        return True

    def _reduce(self) -> list[Float32 | SparseVector] | None:
        """Return the means of all buckets of a step, proposed; none where the engine was closed."""
        busy, means = 0.0, list[Float32 | SparseVector]()
        for turn in range(len(self._numbers)):
            if turn == len(self.order) and not self._record_next():
                return None
            number = self.order[turn]
            submission = self._wait_for(partial(self._submitted.get, number))
            if submission is None:
                return None
            start = self._world.now()
            means.append(self.buckets.propose_bucket(number, submission.gradient, out=submission.out))
            busy += self._world.now() - start
        self.busy_seconds = busy
        return means

    def _record_next(self) -> bool:
        """Record the bucket that rank 0 gets next as the next in the order; false where it was closed."""
        comm, first = self.buckets.topology.world, 0
        if comm.rank == 0:
            found = self._wait_for(self._first_unordered)
            if found is None:
                return False
            first = found
        self.order.append(int(comm.allgather_ints([first])[0, 0]))
        return True

    def _first_unordered(self) -> int | None:
        return next((number for number in self._submitted if number not in self.order), None)

    def _wait_for(self, find: Callable[[], Found | None]) -> Found | None:
        """Wait until ``find`` returns something, and return it; none where the engine was closed first."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or find() is not None)
            return find()

    def _end(self, *, is_failing: bool) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            is_waiting = is_failing or bool(self._submitted)  # perhaps for a rank that has failed, too
        if self._thread is not None and not is_waiting:
            self._thread.join()
