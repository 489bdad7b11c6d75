"""The memory that a reducer takes on a rank, in dense vectors."""

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from commlib import Communicator, Reducer
from commlib.transport.base import Request
from commlib.tuning.probe import Gradients
from commlib.vectors import VALUE_BYTES

STEPS = 2  # the first finds thresholds and regions, the second has a residual from the first


class Meter:
    """Adds up what one rank allocates while it computes; allocations of a transport do not count.

    Simulated ranks share one process, and one of them runs at a time.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin again: memory that is held by now does not count."""
        self._held = 0
        self.peak = 0
        self._resume()

    def _resume(self) -> None:
        tracemalloc.reset_peak()
        self._start, _ = tracemalloc.get_traced_memory()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the body out, in which other ranks may run."""
        now, peak = tracemalloc.get_traced_memory()
        self.peak = max(self.peak, self._held + peak - self._start)
        self._held += now - self._start
        try:
            yield
        finally:
            self._resume()


def _paused(name: str) -> Any:
    """Return a method that calls that of the other communicator, and pauses the meter meanwhile."""

    def call(self: "MeteredCommunicator", *arguments: Any) -> Any:
        with self.meter.pause():
            result = getattr(self.comm, name)(*arguments)
        if isinstance(result, Communicator):
            return MeteredCommunicator(result, self.meter)
        return _MeteredRequest(result, self.meter) if isinstance(result, Request) else result

    return call


class _MeteredRequest(Request):
    def __init__(self, request: Request, meter: Meter) -> None:
        self.comm, self.meter = request, meter

    wait = _paused("wait")


class MeteredCommunicator(Communicator):
    """Forwards everything to another communicator, and pauses the meter meanwhile."""

    def __init__(self, comm: Communicator, meter: Meter) -> None:
        super().__init__(comm.rank, comm.size, comm.host)
        self.comm, self.meter = comm, meter

    _free, split, _send, _receive = map(_paused, ("close", "split", "send_header", "receive_header"))
    allgather_ints, alltoall_ints = _paused("allgather_ints"), _paused("alltoall_ints")
    allgather_objects = _paused("allgather_objects")

    def start_allgather_ints(self, values: Sequence[int]) -> Callable[[], Any]:
        rows = self.allgather_ints(values)
        return lambda: rows


def dense_vectors(comm: Communicator, make: Callable[[Communicator], Reducer], gradients: Gradients) -> float:
    """Return the most that a rank held at a time beyond its gradient, in vectors of ``d`` float32.

    Residual and result count. ``make`` makes the reducer on the communicator that it is given. Memory is
    traced already; what compiled kernels allocate for themselves is not seen. All ranks call it together.
    """
    gradient = gradients.of(comm.rank, 0)
    meter = Meter()
    reducer = make(MeteredCommunicator(comm, meter))
    for _ in range(STEPS):
        reducer.reduce(gradient)
    with meter.pause():
        most: int = max(comm.allgather_objects(meter.peak))
    return most / (VALUE_BYTES * gradients.size)


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
