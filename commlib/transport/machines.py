"""The simulated hardware: ports and network cards of a cluster, and the cores that its ranks share."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from commlib.network import Network
from commlib.transport.clock import Action, Clock, Line, Task

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
        self._heading_for: defaultdict[tuple[bool, int], Counter[int]] = defaultdict(
            Counter
        )  # messages leaving cards

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

        def leave() -> None:
            left = clock.time
            heading[out] -= 1
            arrived = max(left, self._taken_in[is_inter, into] + size * link.beta)
            self._taken_in[is_inter, into] = arrived
            if self._record is not None:
                self._record.append(Transfer(source, destination, size, is_inter, sent, left, arrived))
            clock.at(arrived, on_arrived)
            on_left()
            card.leave()
            port.leave()

        def take_card() -> None:
            card.enter(lambda: clock.at(clock.time + size * link.beta * crowding(), leave))

        def crowding() -> float:
            return link.incast if sum(count > 0 for count in heading.values()) > 1 else 1.0

        port.enter(lambda: clock.at(clock.time + link.alpha, take_card))

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
