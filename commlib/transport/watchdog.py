"""Bounded waiting, and the end of an MPI job, which all ranks reach together.

Nothing is sent while no wait is long. A rank that has waited for some seconds reports its place to the
others once per interval, so that waiting ranks know each other's places; one that computes reports nothing.
The job ends when a rank waits too long, and the ranks that have not come are named.

An uncaught exception ends the job with one traceback. A rank that ends in any other way, by
``sys.exit`` or because its script is over, stays until all others have ended, too. Meanwhile rank 0 collects
reports: a rank that has ended says so, and a rank that has waited for some seconds says for which ranks, once
a second, until its wait is over. A wait for a rank that has ended never ends: rank 0 aborts the job and
names the rank that has ended. Ranks that compute for long and wait for no one are left alone.

Waits in Horovod's exchanges are not covered. Where Horovod was initialised after the first communicator was
made, it shuts down before a rank stays here, and such exchanges raise.
"""

import array
import atexit
import fcntl
import itertools
import math
import os
import socket
import sys
import termios
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from commlib.errors import ConcurrentUse, InvalidArgument
from commlib.transport import polling

if TYPE_CHECKING:
    from mpi4py import MPI


FAILED, INTERRUPTED = 1, 130

REPORT_SECONDS = 1.0
LONG_WAIT_SECONDS = 2.0
# Of one wait, after a rank that it waits for has ended: its last message may still be on its way.
REPORTS_OF_A_WAIT = 4
LAST_REPORTS_AFTER_SECONDS = 3.0
POLL_SECONDS = 0.01
READ_WITHIN_SECONDS, PASSED_ON_WITHIN_SECONDS = 3.0, 0.3

HAS_ENDED, WAITS = 1, 2  # tags of the reports


class _Wait:
    """A thread waits for ``ranks`` of the world in an exchange over ``comm``, inside its block.

    ``waits``: all unfinished waits, by thread. A class, since a step has a dozen waits and contexts made of
    generators are slow.
    """

    def __init__(
        self, waits: "dict[int, _Wait]", number: int, comm: object, ranks: Sequence[int], thread: int
    ) -> None:
        self.number, self.comm, self.ranks = number, comm, ranks
        self.since = time.monotonic()
        self._waits, self._thread = waits, thread

    def __enter__(self) -> None:
        self._waits[self._thread] = self

    def __exit__(self, *error: object) -> None:
        del self._waits[self._thread]


class Watch:
    """What this rank waits for and, on rank 0, which ranks have ended.

    ``comm``: a communicator of all ranks for the watch alone, which MPI frees at the end. With one rank there
    is nothing to watch.
    """

    def __init__(self, comm: "MPI.Comm") -> None:
        self._comm, self._rank, self._size = comm, comm.Get_rank(), comm.Get_size()
        self._host = socket.gethostname()
        self._waits: dict[int, _Wait] = {}  # by thread
        self._numbers = itertools.count()
        self._ended: dict[int, str] = {}  # hosts by rank; on rank 0 only
        self._reports: Counter[tuple[int, int]] = Counter()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlib-watch", daemon=True)
        self._process = os.getpid()  # forks of this process are not ranks
        if self._size > 1:
            self._begin()

    def _begin(self) -> None:
        from mpi4py import MPI

        previous = sys.excepthook

        def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if sys.excepthook is not end:  # that of torch.distributed holds back what this one prints
                sys.stderr = sys.__stderr__
            if os.getpid() == self._process:
                self.fail(error, lambda: previous(kind, error, trace))
            else:
                previous(kind, error, trace)

        sys.excepthook = end
        atexit.register(self._end)
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._thread.start()

    def waiting(self, comm: object, ranks: Sequence[int]) -> AbstractContextManager[None]:
        """Record that this thread waits for ``ranks`` of the world, over ``comm``, inside the block.

        Raises :class:`commlib.errors.ConcurrentUse` if another thread waits over the same communicator.
        """
        thread = threading.get_ident()
        if any(wait.comm is comm and other != thread for other, wait in list(self._waits.items())):
            raise ConcurrentUse(
                f"rank {self._rank} of {self._size}: two threads exchange over one communicator at the same "
                "time; give each thread a topology of its own: Topology(transport.mpi.world())"
            )
        return _Wait(self._waits, next(self._numbers), comm, ranks, thread)

    def waiting_since(self) -> float | None:
        """Return when the oldest wait that is not over began, by the monotonic clock."""
        return min((wait.since for wait in list(self._waits.values())), default=None)

    def fail(self, error: BaseException, report: Callable[[], object]) -> None:
        """Abort the job for an error of this rank, which ``report`` prints below a line that names the rank.

        An interrupt prints that line alone. Where several ranks fail, only the lowest prints: the higher ones
        wait a moment, and are aborted by it. With one rank nothing is done.
        """
        if self._size == 1:
            return
        place = f"rank {self._rank} of {self._size} on {self._host}"
        text, status = f"{place} was interrupted\n", INTERRUPTED
        try:
            time.sleep(LAST_REPORTS_AFTER_SECONDS * self._rank / self._size)
            if not isinstance(error, KeyboardInterrupt):
                text, status = "", FAILED
                sys.stderr.write(f"{place} failed:\n")
                report()
        finally:  # also after a second interrupt: the other ranks wait
            abort(text, status)

    def fail_with(self, line: str) -> None:
        """Abort the job with ``line`` alone, as ``fail`` does."""
        if self._size > 1:
            time.sleep(LAST_REPORTS_AFTER_SECONDS * self._rank / self._size)
            abort(f"{line}\n", FAILED)

    def _end(self) -> None:
        """Stay until all ranks have come here: until then, ranks that wait for this one are detected."""
        from mpi4py import MPI

        if os.getpid() != self._process or MPI.Is_finalized():
            return
        try:
            sent = self._report(HAS_ENDED, self._host)
            barrier = self._comm.Ibarrier()
            while not barrier.Test():
                sent = [each for each in sent if not each.Test()]
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt as error:
            self.fail(error, lambda: None)
        polling.end()  # before Horovod finalizes MPI, if it has initialized it
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        from mpi4py import MPI

        sent: list[MPI.Request] = []
        while not self._is_over.wait(REPORT_SECONDS) and not MPI.Is_finalized():
            now, sent = time.monotonic(), [each for each in sent if not each.Test()]
            for wait in list(self._waits.values()):
                if now - wait.since > LONG_WAIT_SECONDS:
                    sent += self._report(WAITS, (wait.number, wait.ranks))
            status = MPI.Status()
            while self._comm.Iprobe(status=status):
                self._handle(status.source, status.tag, self._comm.recv(source=status.source, tag=status.tag))

    def _report(self, tag: int, content: Any) -> "list[MPI.Request]":
        """Send a report to rank 0; return the requests, which hold the bytes until they are sent."""
        if self._rank > 0:
            return [self._comm.isend(content, 0, tag)]
        self._handle(0, tag, content)
        return []

    def _handle(self, rank: int, tag: int, content: Any) -> None:
        """Handle the report of a rank, on rank 0; abort if it waits for one that has ended."""
        if tag == HAS_ENDED:
            self._ended[rank] = content
            return
        number, ranks = content
        gone = sorted(self._ended.keys() & set(ranks))
        self._reports[rank, number] += bool(gone)
        if self._reports[rank, number] >= REPORTS_OF_A_WAIT:
            place = f"rank {gone[0]} of {self._size} on {self._ended[gone[0]]}"
            complaint = "has ended, and others wait for it: all have to make the same exchanges"
            abort(f"{place} {complaint}\n", FAILED)


def abort(text: str, status: int) -> None:
    """Print ``text`` to standard error and abort the job, even if nothing can be printed any more."""
    from mpi4py import MPI

    for stream, words in ((sys.stdout, ""), (sys.stderr, text)):
        with suppress(AttributeError, OSError, ValueError):  # missing, broken or closed
            stream.write(words)
            stream.flush()
    _wait_for_reader(sys.__stderr__)
    if MPI.Is_finalized():  # by Horovod, where that had initialised it
        os._exit(status)
    MPI.COMM_WORLD.Abort(status)


def _wait_for_reader(stream: TextIO | None) -> None:
    """Wait, for a bounded time, until a pipe is read: mpirun drops what an aborted rank has left in it."""
    unread, until = array.array("i", [0]), time.monotonic() + READ_WITHIN_SECONDS
    try:
        while time.monotonic() < until:
            fcntl.ioctl(stream or -1, termios.FIONREAD, unread)
            if unread[0] == 0:
                break
            time.sleep(POLL_SECONDS)
    except (OSError, ValueError):  # no pipe, or closed
        return
    time.sleep(PASSED_ON_WITHIN_SECONDS)


LONGEST_INTERVAL_SECONDS = 2.0


class Watchdog:
    """Bounds how long a rank waits for others. This one does nothing: for ranks that cannot wait for ever."""

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """Bound the time of the body, a wait for other ranks; an error names ``place``, such as ``step 7``.

        From the first call on, each exchange outside of such a body is bounded, too.
        """
        yield

    def close(self) -> None:  # noqa: B027 - this one holds nothing
        """Free what the watchdog holds; called when the communicator that made it is closed."""


@dataclass(frozen=True)
class _BoundedWait:
    place: str
    since: float


class MPIWatchdog(Watchdog):
    """Ends the MPI job when this rank has waited longer than ``seconds``.

    ``comm``: used by the watchdog alone. A thread watches the threads that wait. ``waiting_since``: returns
    when the oldest exchange of this rank that is not over began, by the monotonic clock, if there is one.
    """

    def __init__(self, comm: "MPI.Comm", seconds: float, waiting_since: Callable[[], float | None]) -> None:
        self._comm, self._seconds, self._waiting_since = comm, seconds, waiting_since
        self._interval = min(LONGEST_INTERVAL_SECONDS, seconds / 10)
        self._wait: _BoundedWait | None = None
        self._latest = ""  # place
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._sent: list[Any] = []

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        if self._thread is None and self._comm.Get_size() > 1:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        around, self._wait, self._latest = self._wait, _BoundedWait(place, time.monotonic()), place
        try:
            yield
        finally:
            self._wait = around

    def close(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        self._comm.Free()

    def _watch(self) -> None:
        while not self._is_over.wait(self._interval / 4):
            wait = self._current()
            if wait is not None and time.monotonic() - wait.since > self._interval:
                self._inspect(wait)

    def _current(self) -> _BoundedWait | None:
        """Return the wait of the body that is under way, or of an exchange outside of any body."""
        if (wait := self._wait) is not None:
            return wait
        since = self._waiting_since()
        return None if since is None else _BoundedWait(f"an exchange after {self._latest}", since)

    def _inspect(self, wait: _BoundedWait) -> None:
        """Exchange places with the others that wait, until this wait is over or has to end."""
        self._received()  # discard reports of earlier waits
        reports: dict[int, tuple[str, float]] = {}
        reported = -math.inf
        while self._current() == wait:
            now = time.monotonic()
            if now - reported > self._interval:
                self._report(wait.place)
                reported = now
            reports |= {rank: (place, now) for rank, place in self._received().items()}
            places = {rank: place for rank, (place, at) in reports.items() if now - at < 2.5 * self._interval}
            # Not earlier, even if all wait at different places: one may still be in an exchange that others
            # have left. The extra interval is for reports of ranks whose waits are as long.
            if now - wait.since > self._seconds + self._interval and self._current() == wait:
                self._abort(now - wait.since, wait.place, places)
            time.sleep(self._interval / 4)

    def _report(self, place: str) -> None:
        self._sent = [request for request in self._sent if not request.Test()]
        for rank in range(self._comm.Get_size()):
            if rank != self._comm.Get_rank():
                self._sent.append(self._comm.isend(place, rank))

    def _received(self) -> dict[int, str]:
        """Return the latest place of every rank that has reported one since the last call."""
        from mpi4py import MPI

        places, status = {}, MPI.Status()
        while self._comm.iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            places[status.source] = self._comm.recv(source=status.source)
        return places

    def _abort(self, seconds: float, place: str, places: Mapping[int, str]) -> None:
        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        missing = [other for other in range(size) if other != rank and other not in places]
        time.sleep(LAST_REPORTS_AFTER_SECONDS * rank / size)  # usually only the lowest rank prints
        stall = describe_stall(seconds, place, places, missing)
        abort(f"rank {rank} of {size} on {socket.gethostname()} {stall}\n", FAILED)


def describe_stall(seconds: float, place: str, places: Mapping[int, str], missing: list[int]) -> str:
    """Return what a rank that waits at ``place`` knows: ``places`` where others wait, ``missing`` ranks."""
    elsewhere: dict[str, list[int]] = {}
    for rank, there in sorted(places.items()):
        if there != place:
            elsewhere.setdefault(there, []).append(rank)
    parts = [f"ranks {missing} have not come"] if missing else []
    parts += [f"ranks {ranks} wait at {there}" for there, ranks in elsewhere.items()]
    text = "; ".join(parts) or "all have come, and the exchange does not end"
    return f"has waited {seconds:.0f} s for other ranks at {place}; {text}"


def check_seconds(seconds: float) -> float:
    """Return a valid bound of waiting, else raise ``InvalidArgument``."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise InvalidArgument(f"timeout: expected seconds above 0, or None to wait for ever, got {seconds!r}")
    return float(seconds)
