"""The simulated cluster: a virtual clock, ports and network cards, and the cores that ranks share.

Events run in the order of the clock's time, one thread at a time, so runs are deterministic.
"""

import heapq
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count

from commlib.errors import PeerFailed
from commlib.network import Network

Action = Callable[[], None]


class Task:
    """A thread of a rank, as the clock sees it. It acquires ``gate`` before it runs, and after each wait.

    The run does not wait for threads ``in_background``.
    """

    def __init__(self, rank: int, *, in_background: bool = False) -> None:
        self.rank, self.in_background = rank, in_background
        self.gate = threading.Semaphore(0)
        self.waits_for: tuple[Callable[[], bool], str] | None = None


class Clock:
    """The scheduler of ``size`` ranks, each a thread, or more. ``time``: seconds since the run began.

    A thread runs until it waits or ends, while the clock stands still: the earliest thread runs, and the
    earliest event happens. Computing that takes virtual time waits for its end.
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

    def end(self, task: Task) -> None:
        """Let others run, as a thread in the background has ended."""
        self._tasks[task.rank].remove(task)
        self.next()

    def at(self, time: float, action: Action, task: Task | None = None) -> None:
        """Schedule ``action`` at ``time``, which is not before now; it resumes ``task`` if there is one."""
        heapq.heappush(self._events, (time, next(self._order), task, action))

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
        self.at(self.time, task.gate.release, task)


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


SLICE_SECONDS = 2e-3  # time slice of a rank on a shared core


@dataclass(frozen=True)
class Transfer:
    """One message as the virtual clock saw it: world ranks, bytes, and seconds since the run began.

    ``left``: its last byte left the sender's card; ``arrived``: it was whole at the receiver.
    """

    source: int
    destination: int
    message_bytes: int
    is_inter: bool
    sent: float
    left: float
    arrived: float


class Cluster:
    """Moves messages: each queues for its rank's port, its node's card and the receiver's card."""

    def __init__(
        self, clock: Clock, nodes: Sequence[int], network: Network, record: list[Transfer] | None
    ) -> None:
        self.clock, self.nodes = clock, nodes
        self._network, self._record = network, record
        self._lines: defaultdict[tuple[str, bool, int], Line] = defaultdict(Line)
        self._taken_in: defaultdict[tuple[bool, int], float] = defaultdict(float)
        # Messages that have left cards, by destination and source.
        self._heading_for: defaultdict[tuple[bool, int], Counter[int]] = defaultdict(Counter)

    def transfer(self, source: int, destination: int, size: int, on_left: Action, on_arrived: Action) -> None:
        """Send ``size`` bytes now: ``on_left`` happens when the sender is done, then ``on_arrived``."""
        clock, sent = self.clock, self.clock.time
        is_inter = self.nodes[source] != self.nodes[destination]
        link = self._network.link(is_inter=is_inter)
        # Inside a node each rank has its own links; all ranks of a node share one card to other nodes.
        out, into = (self.nodes[source], self.nodes[destination]) if is_inter else (source, destination)
        port, card = self._lines["port", is_inter, source], self._lines["card", is_inter, out]
        heading = self._heading_for[is_inter, into]
        heading[out] += 1

        def begin() -> None:
            begun = clock.time
            clock.at(begun + link.alpha - link.busy, lambda: card.enter(lambda: take_card(begun)))
            if link.gap is not None:
                clock.at(begun + link.gap, port.leave)

        def leave(begun: float) -> None:
            left = clock.time
            heading[out] -= 1
            arrived = max(left, begun + link.alpha, self._taken_in[is_inter, into] + size * link.beta)
            self._taken_in[is_inter, into] = arrived
            if self._record is not None:
                self._record.append(Transfer(source, destination, size, is_inter, sent, left, arrived))
            clock.at(arrived, on_arrived)
            on_left()
            card.leave()
            if link.gap is None:
                port.leave()

        def take_card(begun: float) -> None:
            crowding = link.incast if sum(count > 0 for count in heading.values()) > 1 else 1.0
            clock.at(clock.time + size * link.beta * crowding, lambda: leave(begun))

        port.enter(begin)

    def meeting_seconds(self, members: Sequence[int], integers: int) -> float:
        """Return the seconds that an exchange of a few integers among ranks takes."""
        is_inter = len({self.nodes[rank] for rank in members}) > 1
        return self._network.link(is_inter=is_inter).agreement_seconds(len(members), integers)


class Processors:
    """Cores that all ranks share: computing takes as much virtual time as processor time on this machine."""

    def __init__(self, clock: Clock, cores: int) -> None:
        self._clock, self._line = clock, Line(cores)
        self._counted_until: dict[Task, float] = {}
        self._outside: Counter[Task] = Counter()  # nesting depth of calls of the transport

    @contextmanager
    def pause(self, task: Task) -> Iterator[None]:
        """Charge the computing of a thread so far to the clock; the transport's work in the body is free."""
        if not self._outside[task]:
            self._catch_up(task, time.thread_time() - self._counted_until[task])
        self._outside[task] += 1
        try:
            yield
        finally:
            self._outside[task] -= 1
            if not self._outside[task]:
                self.begin(task)

    def _catch_up(self, task: Task, seconds: float) -> None:
        clock, is_done = self._clock, [False]

        def end() -> None:
            is_done[0] = True
            self._line.leave()
            clock.wake(task.rank)

        while seconds > 0:
            length, is_done[0] = min(seconds, SLICE_SECONDS), False
            self._line.enter(lambda length=length: clock.at(clock.time + length, end))  # type: ignore[misc]
            clock.wait(task, lambda: is_done[0], "computing")
            seconds -= length

    def begin(self, task: Task) -> None:
        """Count the computing of a thread, which calls this, from here on."""
        self._counted_until[task] = time.thread_time()
