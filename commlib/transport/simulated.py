"""Ranks as threads of one process: real algorithms, real data, no launcher. For tests, also users' own."""

import copy
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from commlib.errors import InvalidArgument, PeerFailed
from commlib.topology import node_of_ranks
from commlib.transport.base import Array, Communicator, Request, check_color

Result = TypeVar("Result")

_POLL_SECONDS = 0.2


class _Job:
    """What the ranks of one run share: its mailboxes, its groups, and whether one of them failed."""

    def __init__(self, patience_seconds: float) -> None:
        self.patience_seconds = patience_seconds
        self.failed = threading.Event()
        self._lock = threading.Lock()
        self._mailboxes: dict[tuple[Any, int, int], _Mailbox] = {}
        self._groups: dict[Any, _Group] = {}

    def mailbox(self, group: Any, source: int, destination: int) -> "_Mailbox":
        with self._lock:
            return self._mailboxes.setdefault((group, source, destination), _Mailbox())

    def group(self, key: Any, size: int) -> "_Group":
        with self._lock:
            group = self._groups.setdefault(key, _Group(size))
            if self.failed.is_set():
                group.barrier.abort()
            return group

    def fail(self) -> None:
        with self._lock:
            self.failed.set()
            for group in self._groups.values():
                group.barrier.abort()


class _Group:
    """The place where the ranks of one communicator lay down a value each."""

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)


class _Sent(Request):
    def wait(self) -> None:
        """Return at once: the message was copied when it was sent."""


class _Receipt(Request):
    def __init__(self, job: _Job, array: Array, what: str) -> None:
        self._job, self._array, self._what = job, array, what
        self._arrived = threading.Event()
        self._bytes = 0

    def deliver(self, message: Array) -> None:
        self._bytes = message.nbytes
        if message.nbytes == self._array.nbytes:
            self._array.reshape(-1).view(np.uint8)[...] = message.reshape(-1).view(np.uint8)
        self._arrived.set()

    def wait(self) -> None:
        waited = 0.0
        while not self._arrived.wait(_POLL_SECONDS):
            waited += _POLL_SECONDS
            if self._job.failed.is_set():
                raise PeerFailed(f"{self._what}: another rank failed")
            if waited > self._job.patience_seconds:
                raise PeerFailed(f"{self._what}: nothing came in {self._job.patience_seconds} s")
        if self._bytes != self._array.nbytes:
            raise PeerFailed(f"{self._what}: expected {self._array.nbytes} bytes, got {self._bytes}")


class _Mailbox:
    """The messages from one rank to another: like MPI's, they meet the receipts in the order of both."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: deque[Array] = deque()
        self._receipts: deque[_Receipt] = deque()

    def put(self, message: Array) -> None:
        with self._lock:
            if self._receipts:
                self._receipts.popleft().deliver(message)
            else:
                self._messages.append(message.copy())

    def post(self, receipt: _Receipt) -> None:
        with self._lock:
            if self._messages:
                receipt.deliver(self._messages.popleft())
            else:
                self._receipts.append(receipt)


class SimulatedCommunicator(Communicator):
    """Ranks that are threads of this process."""

    def __init__(self, job: _Job, key: Any, rank: int, size: int, host: str) -> None:
        super().__init__(rank, size, host)
        self._job = job
        self._key = key
        self._group = job.group(key, size)
        self._splits = 0

    def split(self, color: int) -> "SimulatedCommunicator":
        """See :meth:`Communicator.split`."""
        colors = self.allgather_objects(check_color(color))
        members = [rank for rank, other in enumerate(colors) if other == color]
        self._splits += 1
        key = (self._key, self._splits, color)
        return SimulatedCommunicator(self._job, key, members.index(self.rank), len(members), self.host)

    def agree(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """See :meth:`Communicator.agree`."""
        return np.array(self.allgather_objects(list(values)), np.int64).reshape(self.size, len(values))

    def swap(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """See :meth:`Communicator.swap`."""
        return np.array([given[self.rank] for given in self.allgather_objects(list(values))], np.int64)

    def allgather_objects(self, value: Any) -> list[Any]:
        """See :meth:`Communicator.allgather_objects`."""
        self._group.slots[self.rank] = value
        self._meet()
        values = copy.deepcopy(self._group.slots)
        self._meet()
        return values

    def _meet(self) -> None:
        try:
            self._group.barrier.wait(self._job.patience_seconds)
        except threading.BrokenBarrierError:
            raise PeerFailed(f"rank {self.rank} of {self.size}: another rank did not come") from None

    def _send(self, array: Array, destination: int) -> Request:
        self._job.mailbox(self._key, self.rank, destination).put(array)
        return _Sent()

    def _receive(self, array: Array, source: int) -> Request:
        what = f"rank {self.rank} of {self.size}, receiving from rank {source}"
        receipt = _Receipt(self._job, array, what)
        self._job.mailbox(self._key, source, self.rank).post(receipt)
        return receipt


def run(
    function: Callable[[Communicator], Result],
    world_size: int,
    ranks_per_node: int | Sequence[int] | None = None,
    patience_seconds: float = 60.0,
) -> list[Result]:
    """Call ``function(comm)`` on ``world_size`` ranks, a thread each, and return their results in rank order.

    ``ranks_per_node`` places the ranks on nodes (see :func:`commlib.topology.node_of_ranks`): ``comm.host``
    differs between nodes, so that ``Topology(comm)`` discovers them. All ranks share one node without it.
    The first rank to raise ends the run and its exception is raised here; a rank that waits longer than
    ``patience_seconds`` raises :class:`commlib.errors.PeerFailed`.

    >>> run(lambda comm: int(comm.agree([comm.rank]).sum()), world_size=3)
    [3, 3, 3]
    """
    if world_size < 1:
        raise InvalidArgument(f"world_size: expected at least 1, got {world_size}")
    nodes = node_of_ranks(world_size, world_size if ranks_per_node is None else ranks_per_node)
    job = _Job(patience_seconds)
    results: list[Any] = [None] * world_size
    failures: list[BaseException] = []

    def body(rank: int) -> None:
        comm = SimulatedCommunicator(job, "world", rank, world_size, f"node{nodes[rank]}")
        try:
            results[rank] = function(comm)
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            failures.append(error)
            job.fail()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
