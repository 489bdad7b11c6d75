"""Bounded waiting: ends the job when a rank waits too long, and names the ranks that have not come.

Nothing is sent while no wait is long. A rank that has waited for some seconds reports its place to the
others once per interval, so that waiting ranks know each other's places; one that computes reports nothing.
"""

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from commlib.errors import InvalidArgument
from commlib.transport.ending import FAILED, LAST_REPORTS_AFTER_SECONDS, abort

if TYPE_CHECKING:
    from mpi4py import MPI

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
