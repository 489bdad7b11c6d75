"""MPI through mpi4py: buffers on the data path, nothing pickled there.

mpi4py is imported by the first call of :func:`world`, since importing it initialises MPI.
"""

import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from commlib.arrays import Array
from commlib.errors import PeerFailed
from commlib.transport.base import Communicator, Request, check_color
from commlib.transport.watchdog import Watchdog, watchdog_of

if TYPE_CHECKING:
    from mpi4py import MPI

# An MPI count is a C int; longer messages go in pieces of this many bytes.
PIECE_BYTES = 1 << 30

# Where Open MPI is told to yield while it polls, there are more ranks than cores. It still polls all the
# time, and the one it waits for computes at a fraction of the speed: better asleep between two looks.
YIELDS = "OMPI_MCA_mpi_yield_when_idle"
SHORTEST_NAP_SECONDS, LONGEST_NAP_SECONDS = 20e-6, 200e-6

LAST_SPEAKS_AFTER_SECONDS = 3.0


class _Sent(Request):
    def __init__(self, requests: "list[MPI.Request]") -> None:
        self._requests = requests

    def wait(self) -> None:
        for request in self._requests:
            _wait(request)


class _Receipt(Request):
    def __init__(self, requests: "list[MPI.Request]", pieces: list[Array], what: str) -> None:
        self._requests, self._pieces, self._what = requests, pieces, what

    def wait(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        for request, piece in zip(self._requests, self._pieces, strict=True):
            try:
                _wait(request, status)
            except MPI.Exception as error:
                raise PeerFailed(f"{self._what}, expecting {piece.nbytes} bytes: {error}") from error
            if status.count != piece.nbytes:
                raise PeerFailed(f"{self._what}: expected {piece.nbytes} bytes, got {status.count}")


class MPICommunicator(Communicator):
    """Ranks that are processes of one MPI job."""

    def __init__(self, comm: "MPI.Comm") -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), socket.gethostname())
        self._comm = comm

    def split(self, color: int) -> "MPICommunicator":
        """See :meth:`Communicator.split`."""
        return MPICommunicator(self._comm.Split(check_color(color), self.rank))

    def agree(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """See :meth:`Communicator.agree`."""
        if not values:
            _wait(self._comm.Ibarrier())
            return np.empty((self.size, 0), np.int64)
        mine = np.array(values, np.int64)
        everyone = np.empty((self.size, len(mine)), np.int64)
        _wait(self._comm.Iallgather(mine, everyone))
        return everyone

    def swap(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """See :meth:`Communicator.swap`."""
        received = np.empty(self.size, np.int64)
        _wait(self._comm.Ialltoall(np.array(values, np.int64), received))
        return received

    def allgather_objects(self, value: Any) -> list[Any]:
        """See :meth:`Communicator.allgather_objects`."""
        return list(self._comm.allgather(value))

    def watchdog(self, seconds: float) -> Watchdog:
        """See :meth:`Communicator.watchdog`."""
        return watchdog_of(self._comm, seconds)

    def _send(self, array: Array, destination: int) -> Request:
        return _Sent([self._comm.Isend(piece, destination) for piece in _pieces(array)])

    def _receive(self, array: Array, source: int) -> Request:
        pieces = _pieces(array)
        requests = [self._comm.Irecv(piece, source) for piece in pieces]
        return _Receipt(requests, pieces, f"rank {self.rank} of {self.size}, receiving from rank {source}")


def _wait(request: "MPI.Request", status: "MPI.Status | None" = None) -> None:
    """Wait for a request; asleep, where somebody else needs the core."""
    if os.environ.get(YIELDS) != "1":
        request.Wait(status)
        return
    seconds = SHORTEST_NAP_SECONDS
    while not request.Test(status):
        time.sleep(seconds)
        seconds = min(2 * seconds, LONGEST_NAP_SECONDS)


def _pieces(array: Array) -> list[Array]:
    data = array.reshape(-1).view(np.uint8)
    return [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]


def _yield_when_oversubscribed() -> None:
    """Make waiting ranks give up the processor where a node has more of them than cores.

    Open MPI polls while it waits; with more ranks than cores the poller holds up the one it waits for.
    """
    ranks_here = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    if ranks_here > len(os.sched_getaffinity(0)):
        os.environ.setdefault(YIELDS, "1")


def world() -> MPICommunicator:
    """Return a communicator of all ranks of the job (one, when started without mpirun or horovodrun).

    It is a duplicate of ``MPI.COMM_WORLD``: its messages cannot meet Horovod's.
    """
    _yield_when_oversubscribed()
    from mpi4py import MPI

    return MPICommunicator(MPI.COMM_WORLD.Dup())


@contextmanager
def abort_on_error() -> Iterator[None]:
    """End the whole job when the body raises, with this rank's traceback: else the others wait for ever.

    Where several ranks raise, the lowest of them speaks: the higher ones wait a moment, and are ended by it.
    """
    try:
        yield
    except Exception:
        from mpi4py import MPI

        rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        if size == 1:
            raise
        time.sleep(LAST_SPEAKS_AFTER_SECONDS * rank / size)
        text = f"rank {rank} of {size} on {socket.gethostname()} failed:\n{traceback.format_exc()}"
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
