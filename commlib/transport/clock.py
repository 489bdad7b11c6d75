"""A virtual clock: events run in the order of its time, one rank at a time, so runs are deterministic."""

import heapq
import threading
from collections import deque
from collections.abc import Callable
from itertools import count

from commlib.errors import PeerFailed

Action = Callable[[], None]


class Clock:
    """The scheduler of ``size`` ranks, each a thread. ``time``: seconds since the run began.

    A rank runs until it waits or ends, and the clock stops meanwhile: so the rank that runs, and the event
    that happens, is always the earliest one. Computing that takes virtual time is a wait for its end.
    """

    def __init__(self, size: int) -> None:
        self.time = 0.0
        self.failures: list[BaseException] = []
        self._gates = [threading.Semaphore(0) for _ in range(size)]
        self._order = count()  # breaks ties: events at the same time run in the order of their creation
        self._events: list[tuple[float, int, int | None, Action]] = []
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        for rank, gate in enumerate(self._gates):
            self._schedule(0.0, rank, gate.release)

    def begin(self, rank: int) -> None:
        """Block until ``rank`` may run for the first time."""
        self._gates[rank].acquire()

    def at(self, time: float, action: Action) -> None:
        """Schedule ``action`` at ``time``, which is not before now."""
        self._schedule(time, None, action)

    def wait(self, rank: int, is_over: Callable[[], bool], what: str) -> None:
        """Block until ``is_over()``; other ranks run meanwhile. Code that makes it true calls :meth:`wake`.

        ``what`` names the wait in errors.
        Raises :class:`commlib.errors.PeerFailed` if a rank has failed, or no rank is left to make it true.
        """
        if not self.failures and is_over():
            return
        if not self.failures:
            self._waiting[rank] = is_over, what
            self.next()
            self._gates[rank].acquire()
        if self.failures:
            raise PeerFailed(f"{what}: another rank failed")

    def wake(self, rank: int) -> None:
        """Resume ``rank`` at this time if its wait is over."""
        if rank in self._waiting and self._waiting[rank][0]():
            del self._waiting[rank]
            self._schedule(self.time, rank, self._gates[rank].release)

    def next(self) -> None:
        """Run all events until the next rank may run, and resume that rank."""
        while self._events:
            self.time, _, rank, action = heapq.heappop(self._events)
            action()
            if rank is not None:
                return
        if self._waiting:
            _, what = self._waiting[min(self._waiting)]
            self.fail(PeerFailed(f"{what}: it never comes, all others have ended or wait"))

    def fail(self, error: BaseException) -> None:
        """Record an error and end all ranks that wait or have not begun."""
        self.failures.append(error)
        for gate in self._gates:
            gate.release()

    def _schedule(self, time: float, rank: int | None, action: Action) -> None:
        heapq.heappush(self._events, (time, next(self._order), rank, action))


class Line:
    """A queue with ``servers``: serves that many at a time, first come, first served."""

    def __init__(self, servers: int = 1) -> None:
        self._free = servers
        self._queue: deque[Action] = deque()

    def enter(self, start: Action) -> None:
        """Call ``start`` as soon as a server is free, in the order of the calls."""
        if self._free:
            self._free -= 1
            start()
        else:
            self._queue.append(start)

    def leave(self) -> None:
        """Free a server, and start the next in the queue."""
        if self._queue:
            self._queue.popleft()()
        else:
            self._free += 1
