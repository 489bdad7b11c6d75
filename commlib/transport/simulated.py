"""Ranks as threads of one process: real algorithms, real data, no launcher, and a clock that predicts.

For tests, including users' own, and for predictions of clusters: each message advances a virtual clock by the
α-β model of its link (see :class:`commlib.network.Network`).
"""

import copy
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from commlib.arrays import Array
from commlib.errors import InvalidArgument, PeerFailed
from commlib.network import Network, node_of_ranks
from commlib.transport.base import Communicator, Integers, Request, check_color
from commlib.transport.machines import Clock, Cluster, Processors, Task, Transfer

Result = TypeVar("Result")


class _Job:
    """State that the ranks of one run share."""

    def __init__(self, cluster: Cluster, processors: Processors | None, arrays: ModuleType) -> None:
        self.cluster, self.clock, self.processors = cluster, cluster.clock, processors
        self.arrays = arrays
        self.mailboxes: defaultdict[tuple[Any, int, int], _Mailbox] = defaultdict(_Mailbox)
        self.meetings: dict[tuple[Any, int], _Meeting] = {}
        self.background: dict[int, Task] = {}  # by the identifiers of their threads

    def task(self, rank: int) -> Task:
        """Return the clock's task of this thread: the rank's own, unless the thread is in the background."""
        return self.background.get(threading.get_ident()) or self.clock.own(rank)


class _Meeting:
    """One exchange of values among the ranks of one communicator."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.missing = size
        self.is_over = False


class _Sent(Request):
    def __init__(self, comm: "SimulatedCommunicator") -> None:
        self._comm, self._has_left = comm, False

    def leave(self) -> None:
        self._has_left = True
        self._comm.wake()

    def wait(self) -> None:
        self._comm.pass_time(lambda: self._has_left, "sending")


class _Receipt(Request):
    """What arrives from ``source``, in ``allocate(bytes)``: ``expected`` bytes, or any number."""

    def __init__(
        self,
        comm: "SimulatedCommunicator",
        source: int,
        allocate: Callable[[int], Array],
        expected: int | None = None,
    ) -> None:
        self._comm, self._source, self._allocate, self._expected = comm, source, allocate, expected
        self._arrived_bytes: int | None = None
        self._message: Array | None = None

    def deliver(self, message: Array) -> None:
        self._arrived_bytes = message.nbytes
        if self._expected in (None, message.nbytes):
            self._message = self._allocate(message.nbytes)
            self._message.reshape(-1).view(np.uint8)[...] = message.reshape(-1).view(np.uint8)
        self._comm.wake()

    def wait(self) -> None:
        self.take()

    def take(self) -> Array:
        """Return the message when it has arrived."""
        what = f"receiving from rank {self._source}"
        self._comm.pass_time(lambda: self._arrived_bytes is not None, what)
        if self._message is None:
            expected, got = self._expected, self._arrived_bytes
            raise PeerFailed(f"{self._comm}, {what}: expected {expected} bytes, got {got}")
        return self._message


class _Mailbox:
    """The messages from one rank to another, matched with receipts in order, as in MPI."""

    def __init__(self) -> None:
        self._messages: deque[Array] = deque()
        self._receipts: deque[_Receipt] = deque()

    def put(self, message: Array) -> None:
        if self._receipts:
            self._receipts.popleft().deliver(message)
        else:
            self._messages.append(message)

    def post(self, receipt: _Receipt) -> None:
        if self._messages:
            receipt.deliver(self._messages.popleft())
        else:
            self._receipts.append(receipt)


class _Condition(threading.Condition):
    """Threads of one rank that wait for each other in virtual time; no time passes while one has the lock."""

    def __init__(self, comm: "SimulatedCommunicator") -> None:
        super().__init__()
        self._comm = comm

    def __enter__(self) -> bool:
        self._comm.now()  # charges the computing so far, which may take virtual time
        return super().__enter__()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        self.release()
        try:
            self._comm.pass_time(lambda: bool(predicate()), "waiting for another thread of the rank")
        finally:
            self.acquire()
        return predicate()

    def notify_all(self) -> None:
        self._comm.wake()


class _Background(threading.Thread):
    """A thread of a rank beside its own; both run in virtual time."""

    def __init__(
        self, comm: "SimulatedCommunicator", job: _Job, task: Task, body: Callable[[], None]
    ) -> None:
        super().__init__(name=f"{comm}, background", daemon=True)
        self._comm, self._job, self._task, self._body = comm, job, task, body
        self._has_ended = False

    def run(self) -> None:
        job, task = self._job, self._task
        job.background[threading.get_ident()] = task
        task.gate.acquire()
        if job.processors is not None:
            job.processors.begin(task)
        try:
            self._body()
            self._comm.now()  # charges the last computing
        except BaseException as error:  # noqa: BLE001 - raised again where the ranks were started
            job.clock.fail(error)
            return
        del job.background[threading.get_ident()]
        self._has_ended = True
        self._comm.wake()
        job.clock.end(task)

    def join(self, timeout: float | None = None) -> None:
        self._comm.pass_time(lambda: self._has_ended, "waiting for the end of a thread")


class SimulatedCommunicator(Communicator):
    """Ranks that are threads of this process. ``members``: their ranks in the world."""

    def __init__(self, job: _Job, key: Any, rank: int, members: Sequence[int]) -> None:
        super().__init__(rank, len(members), f"node{job.cluster.nodes[members[rank]]}")
        self.arrays = job.arrays
        self._job, self._key, self._members = job, key, members
        self._world_rank = members[rank]
        self._splits = self._meetings = 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def now(self) -> float:
        """Return the virtual time of this rank in seconds since the run began."""
        with self._transport():
            return self._job.clock.time

    def pass_time(self, is_over: Callable[[], bool], what: str) -> None:
        """Wait in virtual time; see :meth:`Clock.wait`."""
        with self._transport():
            self._job.clock.wait(self._job.task(self._world_rank), is_over, f"{self}, {what}")

    def compute(self, seconds: float) -> None:
        """Let ``seconds`` of virtual time pass for this thread, as for computing on a GPU of its own."""
        if not 0 <= seconds < float("inf"):
            raise InvalidArgument(f"seconds: expected a number from 0, got {seconds!r}")
        clock, end = self._job.clock, self.now() + seconds
        clock.at(end, self.wake)
        self.pass_time(lambda: clock.time >= end, "computing")

    def start_thread(self, body: Callable[[], None]) -> threading.Thread:
        task = self._job.clock.add(Task(self._world_rank, in_background=True))
        thread = _Background(self, self._job, task, body)
        thread.start()
        return thread

    def condition(self) -> threading.Condition:
        return _Condition(self)

    def _transport(self) -> AbstractContextManager[None]:
        """Return a context for work of the transport, which is not computing of the rank."""
        processors = self._job.processors
        return nullcontext() if processors is None else processors.pause(self._job.task(self._world_rank))

    def wake(self) -> None:
        """Resume the threads of this rank whose waits are over."""
        self._job.clock.wake(self._world_rank)

    def _free(self) -> None:
        """Wait for all ranks: freeing is collective under MPI, and tests shall find a rank that does not."""
        self._meet([], 0)

    def split(self, color: int) -> "SimulatedCommunicator":
        colors = self.allgather_objects(check_color(color))
        ranks = [rank for rank, other in enumerate(colors) if other == color]
        self._splits += 1
        key = (self._key, self._splits, color)
        members = [self._members[rank] for rank in ranks]
        return SimulatedCommunicator(self._job, key, ranks.index(self.rank), members)

    def start_allgather_ints(self, values: Sequence[int]) -> Callable[[], Integers]:
        gathered = self._start_meeting(list(values), len(values))

        def wait() -> Integers:
            rows = gathered()
            lengths = [len(row) for row in rows]
            if lengths != [len(values)] * self.size:
                raise PeerFailed(f"{self}: expected {len(values)} integers from every rank, got {lengths}")
            return np.array(rows, np.int64).reshape(self.size, len(values))

        return wait

    def alltoall_ints(self, values: Sequence[int]) -> Integers:
        return np.array([row[self.rank] for row in self._meet(list(values), 1)], np.int64)

    def allgather_objects(self, value: Any) -> list[Any]:
        # Copied here, too: as under MPI, nothing that a rank does to its value later reaches the others.
        return copy.deepcopy(self._meet(copy.deepcopy(value), 1))

    def _meet(self, value: Any, integers: int) -> list[Any]:
        """Return the ``value`` of every rank, in rank order; all ranks share the list."""
        return self._start_meeting(value, integers)()

    def _start_meeting(self, value: Any, integers: int) -> Callable[[], list[Any]]:
        """Contribute ``value`` to a meeting that begins with the last rank's; return the wait for its end."""
        self._expect_open()
        with self._transport():
            self._meetings += 1
            key = self._key, self._meetings
            meeting = self._job.meetings.setdefault(key, _Meeting(self.size))
            meeting.values[self.rank] = value
            meeting.missing -= 1
            if meeting.missing == 0:
                del self._job.meetings[key]
                cluster = self._job.cluster
                end = self.now() + cluster.meeting_seconds(self._members, integers)
                self._job.clock.at(end, lambda: self._end(meeting))

        def wait() -> list[Any]:
            self.pass_time(lambda: meeting.is_over, "meeting the other ranks")
            return meeting.values

        return wait

    def _end(self, meeting: _Meeting) -> None:
        meeting.is_over = True
        for member in self._members:
            self._job.clock.wake(member)

    def _send(self, array: Array, destination: int) -> Request:
        self._expect_open()
        mailbox = self._job.mailboxes[self._key, self.rank, destination]
        request = _Sent(self)
        with self._transport():
            message = array.copy()
            self._job.cluster.transfer(
                self._world_rank,
                self._members[destination],
                array.nbytes,
                on_left=request.leave,
                on_arrived=lambda: mailbox.put(message),
            )
        return request

    def _receive(self, array: Array, source: int) -> Request:
        self._expect_open()
        return self._post(_Receipt(self, source, lambda length: array, array.nbytes), source)

    def _post(self, receipt: _Receipt, source: int) -> _Receipt:
        with self._transport():  # a message that has arrived already is copied now
            self._job.mailboxes[self._key, source, self.rank].post(receipt)
        return receipt

    def _send_message(self, message: Array, destination: int) -> Request:
        return self._send(message, destination)

    def _receive_message(self, source: int, allocate: Callable[[int], Array]) -> Array:
        self._expect_open()
        return self._post(_Receipt(self, source, allocate), source).take()


def run(
    function: Callable[[Communicator], Result],
    world_size: int,
    ranks_per_node: int | Sequence[int] | None = None,
    network: Network | None = None,
    record: list[Transfer] | None = None,
    cores: int | None = None,
    arrays: ModuleType = np,
) -> list[Result]:
    """Call ``function(comm)`` on ``world_size`` ranks, a thread each, and return their results in rank order.

    ``ranks_per_node`` places the ranks on nodes (see :func:`commlib.network.node_of_ranks`): ``comm.host``
    differs between nodes, so that ``Topology(comm)`` discovers them. All ranks share one node without it.
    ``network``: the links that ``comm.now()`` and the seconds in reports are predicted for. ``record``: a
    list that is filled with every message. One rank runs at a time; runs repeat exactly.

    Computing takes no virtual time, except ``comm.compute(seconds)``. With ``cores``, the number of cores
    that all ranks share, computing takes as much virtual time as processor time on this machine, and only
    these times differ between runs. With ``overlap``, exchanges run while their rank computes.

    ``arrays``: the module whose arrays gradients are. With ``cupy`` all ranks share the current GPU, and its
    default stream.

    The first rank to raise ends the run, and its exception is raised here; a deadlock raises
    :class:`commlib.errors.PeerFailed`.

    >>> run(lambda comm: int(comm.allgather_ints([comm.rank]).sum()), world_size=3)
    [3, 3, 3]
    """
    if world_size < 1:
        raise InvalidArgument(f"world_size: expected at least 1, got {world_size}")
    nodes = node_of_ranks(world_size, world_size if ranks_per_node is None else ranks_per_node)
    if cores is not None and cores < 1:
        raise InvalidArgument(f"cores: expected at least 1, got {cores}")
    clock = Clock(world_size)
    processors = None if cores is None else Processors(clock, cores)
    job = _Job(Cluster(clock, nodes, network or Network(), record), processors, arrays)
    results: list[Any] = [None] * world_size

    def body(rank: int) -> None:
        clock.own(rank).gate.acquire()
        if clock.failures:
            return
        try:
            if processors is not None:
                processors.begin(clock.own(rank))
            results[rank] = function(SimulatedCommunicator(job, "world", rank, range(world_size)))
            clock.next()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            clock.fail(error)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    clock.next()
    for thread in threads:
        thread.join()
    if clock.failures:
        raise clock.failures[0]
    return results
