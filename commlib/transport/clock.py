"""A virtual clock: events run in the order of its time, one thread at a time, so runs are deterministic."""

import heapq
import threading
from collections import deque
from collections.abc import Callable
from itertools import chain, count

from commlib.errors import PeerFailed

Action = Callable[[], None]


class Task:
    """A thread of a rank, as the clock sees it. Nobody waits for the end of one ``in_background``."""

    def __init__(self, rank: int, *, in_background: bool = False) -> None:
        self.rank, self.in_background = rank, in_background
        self.gate = threading.Semaphore(0)
        self.waits_for: tuple[Callable[[], bool], str] | None = None


class Clock:
    """The scheduler of ``size`` ranks, each a thread, or more. ``time``: seconds since the run began.

    A thread runs until it waits or ends, and the clock stops meanwhile: so the one that runs, and the event
    that happens, is always the earliest one. Computing that takes virtual time is a wait for its end.
    """

    def __init__(self, size: int) -> None:
        self.time = 0.0
        self.failures: list[BaseException] = []
        self._order = count()  # breaks ties: events at the same time run in the order of their creation
        self._events: list[tuple[float, int, Task | None, Action]] = []
        self._tasks: list[list[Task]] = [[] for _ in range(size)]  # of each rank, its own thread first
        for rank in range(size):
            self.add(Task(rank))

    def add(self, task: Task) -> Task:
        """Let a thread begin at this time."""
        self._tasks[task.rank].append(task)
        self._resume(task)
        return task

    def own(self, rank: int) -> Task:
        """Return the thread that ``rank`` has from the start."""
        return self._tasks[rank][0]

    def begin(self, task: Task) -> None:
        """Block until ``task`` may run for the first time."""
        task.gate.acquire()

    def end(self, task: Task) -> None:
        """Let others run, as a thread in the background has ended."""
        self._tasks[task.rank].remove(task)
        self.next()

    def at(self, time: float, action: Action) -> None:
        """Schedule ``action`` at ``time``, which is not before now."""
        self._schedule(time, None, action)

    def wait(self, task: Task, is_over: Callable[[], bool], what: str) -> None:
        """Block until ``is_over()``; others run meanwhile. Code that makes it true calls :meth:`wake`.

        ``what`` names the wait in errors.
        Raises :class:`commlib.errors.PeerFailed` if a rank has failed, or nobody is left to make it true.
        """
        if not self.failures and is_over():
            return
        if not self.failures:
            task.waits_for = is_over, what
            self.next()
            task.gate.acquire()
        if self.failures:
            raise PeerFailed(f"{what}: another rank failed")

    def wake(self, rank: int) -> None:
        """Resume the threads of ``rank`` whose waits are over at this time."""
        for task in self._tasks[rank]:
            if task.waits_for is not None and task.waits_for[0]():
                task.waits_for = None
                self._resume(task)

    def next(self) -> None:
        """Run all events until the next thread may run, and resume that one."""
        while self._events:
            self.time, _, task, action = heapq.heappop(self._events)
            action()
            if task is not None:
                return
        waiting = [task for task in chain(*self._tasks) if task.waits_for and not task.in_background]
        if waiting:
            waits = [task.waits_for[1] for task in self._tasks[waiting[0].rank] if task.waits_for]
            self.fail(PeerFailed(f"{'; '.join(waits)}: it never comes, all others have ended or wait"))

    def fail(self, error: BaseException) -> None:
        """Record an error and end all threads that wait or have not begun."""
        self.failures.append(error)
        for task in chain(*self._tasks):
            task.gate.release()

    def _resume(self, task: Task) -> None:
        self._schedule(self.time, task, task.gate.release)

    def _schedule(self, time: float, task: Task | None, action: Action) -> None:
        heapq.heappush(self._events, (time, next(self._order), task, action))


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
