"""The memory that a reducer takes on a rank, in dense vectors."""

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib import Communicator, Reducer
from commlib.arrays import Array
from commlib.transport.base import Request
from commlib.tuning.gradients import Gradients
from commlib.vectors import VALUE_BYTES

STEPS = 2  # the first finds thresholds and regions, the second has a residual from the first


class Meter:
    """Adds up what one rank allocates while it computes; whatever a transport allocates does not count.

    Simulated ranks share one process, and one of them runs at a time.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin again: what is held by now does not count."""
        self._held = 0
        self.peak = 0
        self._resume()

    def _resume(self) -> None:
        tracemalloc.reset_peak()
        self._start, _ = tracemalloc.get_traced_memory()

    def _stop(self) -> None:
        now, peak = tracemalloc.get_traced_memory()
        self.peak = max(self.peak, self._held + peak - self._start)
        self._held += now - self._start

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the body out, in which other ranks may run."""
        self._stop()
        try:
            yield
        finally:
            self._resume()


class _MeteredRequest(Request):
    def __init__(self, request: Request, meter: Meter) -> None:
        self._request, self._meter = request, meter

    def wait(self) -> None:
        with self._meter.pause():
            self._request.wait()


class MeteredCommunicator(Communicator):
    """Passes everything on to another communicator, and pauses the meter meanwhile."""

    def __init__(self, comm: Communicator, meter: Meter) -> None:
        super().__init__(comm.rank, comm.size, comm.host)
        self._comm, self._meter = comm, meter

    def _free(self) -> None:
        self._comm.close()

    def split(self, color: int) -> "MeteredCommunicator":
        """See :meth:`Communicator.split`."""
        with self._meter.pause():
            return MeteredCommunicator(self._comm.split(color), self._meter)

    def allgather_ints(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """See :meth:`Communicator.allgather_ints`."""
        with self._meter.pause():
            return self._comm.allgather_ints(values)

    def alltoall_ints(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """See :meth:`Communicator.alltoall_ints`."""
        with self._meter.pause():
            return self._comm.alltoall_ints(values)

    def allgather_objects(self, value: Any) -> list[Any]:
        """See :meth:`Communicator.allgather_objects`."""
        with self._meter.pause():
            return self._comm.allgather_objects(value)

    def _send(self, array: Array, destination: int) -> Request:
        with self._meter.pause():
            return _MeteredRequest(self._comm.send_header(array, destination), self._meter)

    def _receive(self, array: Array, source: int) -> Request:
        with self._meter.pause():
            return _MeteredRequest(self._comm.receive_header(array, source), self._meter)


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
    """Trace memory within the body."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
