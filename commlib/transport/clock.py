"""Virtual time: events happen in its order and one rank runs at a time, so runs repeat to the last bit."""

import heapq
import threading
from collections import deque
from collections.abc import Callable
from itertools import count

from commlib.errors import PeerFailed

Action = Callable[[], None]


class Clock:
    """What happens next among ``size`` ranks, each a thread. ``time``: seconds since the run began.

    A rank runs until it waits or ends, and time stands still meanwhile: so the rank that runs, and the event
    that happens, is always the earliest that there is. Who says that computing takes time waits for its end.
    """

    def __init__(self, size: int) -> None:
        self.time = 0.0
        self.failures: list[BaseException] = []
        self._gates = [threading.Semaphore(0) for _ in range(size)]
        self._order = count()  # of events at the same time: as they were noted
        self._events: list[tuple[float, int, int | None, Action]] = []
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        for rank, gate in enumerate(self._gates):
            self._note(0.0, rank, gate.release)

    def begin(self, rank: int) -> None:
        """Return when it is the turn of ``rank`` for the first time."""
        self._gates[rank].acquire()

    def at(self, time: float, action: Action) -> None:
        """Let ``action`` happen at ``time``, which is not before now."""
        self._note(time, None, action)

    def wait(self, rank: int, is_over: Callable[[], bool], what: str) -> None:
        """Return when ``is_over()``; others run meanwhile. Who makes it true calls :meth:`wake`.

        ``what`` says in an error what was waited for.
        Raises :class:`commlib.errors.PeerFailed` when a rank has failed, or nobody is left to make it true.
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
        """Let ``rank`` go on, at this time, if what it waits for is over."""
        if rank in self._waiting and self._waiting[rank][0]():
            del self._waiting[rank]
            self._note(self.time, rank, self._gates[rank].release)

    def next(self) -> None:
        """Let everything happen up to the turn of the next rank, and give it that turn."""
        while self._events:
            self.time, _, rank, action = heapq.heappop(self._events)
            action()
            if rank is not None:
                return
        if self._waiting:
            _, what = self._waiting[min(self._waiting)]
            self.fail(PeerFailed(f"{what}: it never comes, all others have ended or wait"))

    def fail(self, error: BaseException) -> None:
        """Note an error and end all ranks that wait or have not begun."""
        self.failures.append(error)
        for gate in self._gates:
            gate.release()

    def _note(self, time: float, rank: int | None, action: Action) -> None:
        heapq.heappush(self._events, (time, next(self._order), rank, action))


class Line:
    """Serves ``places`` at a time, in the order in which they come."""

    def __init__(self, places: int = 1) -> None:
        self._free = places
        self._queue: deque[Action] = deque()

    def enter(self, start: Action) -> None:
        """Call ``start`` as soon as there is a place, after all who came before."""
        if self._free:
            self._free -= 1
            start()
        else:
            self._queue.append(start)

    def leave(self) -> None:
        """End the service of who was served."""
        if self._queue:
            self._queue.popleft()()
        else:
            self._free += 1
