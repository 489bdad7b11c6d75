"""MPI through mpi4py; gradients travel as buffers and are never pickled.

mpi4py is imported by the first call of :func:`world`, since importing it initialises MPI.
"""

import os
import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from commlib.agreement import differences, differing
from commlib.arrays import Array
from commlib.errors import LaunchError, PeerFailed, RanksDisagree
from commlib.network import EAGER_BYTES
from commlib.transport.base import Communicator, Integers, Request, check_color
from commlib.transport.polling import IS_COMPILED, Sleeper
from commlib.transport.verified import VERIFY, verified
from commlib.transport.watchdog import MPIWatchdog, Watch, Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

# An MPI count is a C int; longer messages are sent in pieces of this many bytes.
PIECE_BYTES = 1 << 30

# Set where there are more ranks than cores: Open MPI then yields while it polls. It still polls all the time,
# and slows down the rank that it waits for; so a waiting rank sleeps between polls here. A thread other than
# the main one, such as that of an exchange with ``overlap``, always does.
YIELDS = "OMPI_MCA_mpi_yield_when_idle"

EAGER_LIMIT = "OMPI_MCA_btl_tcp_eager_limit"

# Of a thread that exchanges while others compute. It wakes up hundreds of times a step, for microseconds;
# without precedence it would wait for the core each time.
EXCHANGE_NICENESS = -10

# Set by launchers: how many ranks they started.
WORLD_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "HOROVOD_SIZE", "WORLD_SIZE")
OTHER_LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": "srun without --mpi=pmix",
    "HOROVOD_SIZE": "horovodrun --gloo",
    "WORLD_SIZE": "torchrun",
}


class _MPISent(Request):
    def __init__(self, comm: "MPICommunicator", requests: "list[MPI.Request]", destination: int) -> None:
        self._comm, self._requests, self._destination = comm, requests, destination

    def wait(self) -> None:
        for request in self._requests:
            self._comm.wait_for(request, self._destination)


class _MPIReceipt(Request):
    def __init__(
        self, comm: "MPICommunicator", requests: "list[MPI.Request]", pieces: list[Array], source: int
    ) -> None:
        self._comm, self._requests, self._pieces, self._source = comm, requests, pieces, source

    def wait(self) -> None:
        mpi = self._comm.mpi
        status = mpi.Status()
        for request, piece in zip(self._requests, self._pieces, strict=True):
            try:
                self._comm.wait_for(request, self._source, status)
            except mpi.Exception as error:
                raise PeerFailed(f"{self}, expecting {piece.nbytes} bytes: {error}") from error
            if status.count != piece.nbytes:
                raise PeerFailed(f"{self}: expected {piece.nbytes} bytes, got {status.count}")

    def __str__(self) -> str:
        return f"{self._comm}, receiving from rank {self._source}"


class MPICommunicator(Communicator):
    """Ranks that are processes of one MPI job. ``watch`` detects that one of them has ended."""

    eager_bytes = EAGER_BYTES - (1 << 10)  # the limit includes MPI's header

    def __init__(self, comm: "MPI.Comm", watch: Watch) -> None:
        from mpi4py import MPI

        super().__init__(comm.Get_rank(), comm.Get_size(), socket.gethostname())
        self.mpi = MPI  # an import takes longer than most of what is done with it in a step
        self._handle, self._watch = comm, watch
        self.shares_cores = os.environ.get(YIELDS) == "1"
        world = MPI.COMM_WORLD.Get_group()
        self._world_ranks = list(comm.Get_group().Translate_ranks(None, world))
        self._watchdogs: list[Watchdog] = []
        self._sleeper = Sleeper(MPI)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    @property
    def _comm(self) -> "MPI.Comm":
        self._expect_open()
        return self._handle

    def _free(self) -> None:
        if self.mpi.Is_finalized():
            return
        with self._watch.waiting(self, self._world_ranks):
            for watchdog in self._watchdogs:
                watchdog.close()
            self._handle.Free()

    def split(self, color: int) -> "MPICommunicator":
        with self._watch.waiting(self, self._world_ranks):
            comm = self._comm.Split(check_color(color), self.rank)
        return MPICommunicator(comm, self._watch)

    def start_allgather_ints(self, values: Sequence[int]) -> Callable[[], Integers]:
        mine = np.array([len(values), *values], np.int64)
        everyone = np.empty((self.size, len(mine)), np.int64)
        request = self._comm.Iallgather(mine, everyone)

        def wait() -> Integers:
            self._wait_for_all(request)
            lengths = everyone[:, 0]
            if (lengths != len(values)).any():
                raise PeerFailed(
                    f"{self}: expected {len(values)} integers from every rank, got {lengths.tolist()}"
                )
            return everyone[:, 1:].copy()

        return wait

    def alltoall_ints(self, values: Sequence[int]) -> Integers:
        received = np.empty(self.size, np.int64)
        self._wait_for_all(self._comm.Ialltoall(np.array(values, np.int64), received))
        return received

    def allgather_objects(self, value: Any) -> list[Any]:
        given = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        most = max(1, PIECE_BYTES // self.size)  # in MPI the bytes of all ranks together are a C int, too
        with self._watch.waiting(self, self._world_ranks):
            longest = max(self._comm.allgather(len(given)))
            rounds = [self._comm.allgather(given[start : start + most]) for start in range(0, longest, most)]
        return [pickle.loads(b"".join(pieces)) for pieces in zip(*rounds, strict=True)]  # noqa: S301

    def wait_for(
        self, request: "MPI.Request", peer: int | None = None, status: "MPI.Status | None" = None
    ) -> None:
        """Wait for a request of ``peer``, or of all ranks; asleep, if others need the core."""
        if not request.Test(status):
            self._wait_until(lambda: request.Test(status), lambda: request.Wait(status), peer, request)

    def _wait_until(
        self, test: Callable[[], bool], wait: Callable[[], object], peer: int | None, polled: Any
    ) -> None:
        """Wait for ``peer``, or all ranks, until ``test()``, which ``wait()`` does without sleeping.

        The caller has called ``test()`` just now. ``polled``: the request, or the communicator of a message.
        """
        with self._watch.waiting(self, self._world_ranks if peer is None else (self._world_ranks[peer],)):
            # A thread that waits beside one that computes leaves the core to that one.
            is_alone = not self.shares_cores and threading.current_thread() is threading.main_thread()
            if is_alone or not IS_COMPILED:
                wait()
                return
            self._sleeper.sleep_until(test, polled, peer or 0)

    def _wait_for_all(self, request: "MPI.Request") -> None:
        try:
            self.wait_for(request)
        except self.mpi.Exception as error:
            raise PeerFailed(f"{self}, in an exchange with all ranks: {error}") from error

    def start_thread(self, body: Callable[[], None]) -> threading.Thread:
        def prioritized() -> None:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), EXCHANGE_NICENESS)
            body()

        return super().start_thread(prioritized)

    def watchdog(self, seconds: float) -> Watchdog:
        if self.mpi.Query_thread() < self.mpi.THREAD_MULTIPLE:  # two threads must not call MPI at once
            return super().watchdog(seconds)
        self._watchdogs.append(MPIWatchdog(self._comm.Dup(), seconds, self._watch.waiting_since))
        return self._watchdogs[-1]

    def _send(self, array: Array, destination: int) -> Request:
        requests = [self._comm.Isend(piece, destination) for piece in _pieces(array)]
        return _MPISent(self, requests, destination)

    def _receive(self, array: Array, source: int) -> Request:
        pieces = _pieces(array)
        requests = [self._comm.Irecv(piece, source) for piece in pieces]
        return _MPIReceipt(self, requests, pieces, source)

    def _goes_in_pieces(self, length: int) -> bool:
        return length > PIECE_BYTES or super()._goes_in_pieces(length)

    def _send_message(self, message: Array, destination: int) -> Request:
        return _MPISent(self, [self._comm.Isend(message, destination)], destination)

    def _receive_message(self, source: int, allocate: Callable[[int], Array]) -> Array:
        status, found = self.mpi.Status(), list["MPI.Message"]()

        def probe() -> bool:
            message = self._comm.Improbe(source, status=status)
            if message is None:
                return False
            found.append(message)
            return True

        def wait() -> None:
            found.append(self._comm.Mprobe(source, status=status))

        try:
            if not probe():
                self._wait_until(probe, wait, source, self._comm)
            message = allocate(status.count)  # a matched message has a length
            self.wait_for(found[0].Irecv(message), source)
        except self.mpi.Exception as error:
            raise PeerFailed(f"{self}, receiving from rank {source}: {error}") from error
        return message


def _pieces(array: Array) -> list[Array]:
    data = array.reshape(-1).view(np.uint8)
    return [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]


LAUNCH = "start them with: cloudtrain launch -np {0} CONFIG, or: cloudtrain launch -np {0} -- python my.py"


def _check_launch(size: int) -> None:
    """Raise ``LaunchError`` where a launcher has started another number of ranks than MPI sees."""
    if size == 1 and os.environ.get("HOROVOD_ELASTIC") == "1":
        raise LaunchError(
            "HOROVOD_ELASTIC says that this is an elastic job, and MPI sees 1 rank; expected a fixed number: "
            f"{LAUNCH.format(4)}"
        )
    for name in WORLD_SIZES:
        started = os.environ.get(name, str(size))
        # Variables may be left over from other launchers: they count only if this process sees no other rank.
        if started != str(size) and (size == 1 or name == "HOROVOD_SIZE"):
            launcher = OTHER_LAUNCHERS.get(name, "the launcher of another MPI")
            raise LaunchError(
                f"{name} says that {started} ranks were started and MPI sees {size} ({launcher}?): "
                f"{LAUNCH.format(started)}"
            )


def _cores_here() -> int:
    """Return the cores that ranks here share: those of the launcher, if it has bound this rank to one."""
    cores = len(os.sched_getaffinity(0))
    if cores == 1:
        with suppress(OSError):  # without a launcher, the parent may have ended
            return len(os.sched_getaffinity(os.getppid()))
    return cores


@cache
def _watch() -> Watch:
    """Return the watch of this job, made by the first call, which is collective."""
    from mpi4py import MPI

    return Watch(MPI.COMM_WORLD.Dup())


def world(*, verify: bool = False) -> Communicator:
    """Return a communicator of all ranks of the job (one, when started without mpirun or horovodrun).

    ``verify``, or ``CLOUDTRAIN_VERIFY=1`` in the environment: every message is checked by a digest
    (:mod:`commlib.transport.verified`); equal on all ranks, else :class:`commlib.errors.RanksDisagree`.

    All ranks call it together. Every call duplicates ``MPI.COMM_WORLD``, so that messages cannot meet
    Horovod's; the caller owns the duplicate, and ``close()`` or the end of the process frees it.

    From the first call on, the ranks end together: an uncaught exception ends the job with one traceback, and
    a rank that ends while others wait for it ends the job with one line (:mod:`commlib.transport.watchdog`).

    Raises :class:`commlib.errors.LaunchError` where the launcher has started another number of ranks than MPI
    sees, as ``horovodrun --gloo`` and its elastic jobs do, or the ``mpirun`` of another MPI.
    """
    if int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")) > _cores_here():
        os.environ.setdefault(YIELDS, "1")
    os.environ.setdefault(EAGER_LIMIT, str(EAGER_BYTES))
    from mpi4py import MPI

    _check_launch(MPI.COMM_WORLD.Get_size())
    comm = MPICommunicator(MPI.COMM_WORLD.Dup(), _watch())
    wanted = verify or os.environ.get(VERIFY) == "1"
    everywhere = comm.allgather_ints([wanted])[:, 0]
    if differing(everywhere):
        settings = [{"verify": bool(each)} for each in everywhere]
        raise RanksDisagree(f"messages are checked by some ranks only: {differences(settings)}")
    return verified(comm) if wanted else comm


def fail(line: str) -> None:
    """Abort the job for an error of this rank, which one line tells; with one rank nothing is done.

    Where several ranks call it, only the lowest prints.
    """
    _watch().fail_with(line)


def interrupt() -> None:
    """Abort the job as an interrupted rank, with one line that names it; with one rank nothing is done.

    For programs that catch ``KeyboardInterrupt``: uncaught, it does so by itself.
    """
    _watch().fail(KeyboardInterrupt(), lambda: None)
