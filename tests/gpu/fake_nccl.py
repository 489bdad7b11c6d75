"""NCCL among the threads of a simulated world, as strict as NCCL: lengths match, groups have to progress.

What a rank puts on a stream is done at once, or as soon as the others have sent; the host waits meanwhile,
where NCCL's would go on. So that no test passes because of that, ``expect_progress`` plays the groups again
as NCCL does, where a group ends when all its messages have been met by started groups of the others.
"""

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

ID_BYTES = 128


class NcclError(RuntimeError):
    """As NCCL's own: what failed, in a word."""


@dataclass(frozen=True)
class Call:
    """One call of a group: what it sends to whom, and what it receives from whom; addresses and bytes."""

    sends: tuple[tuple[int, int, int], ...] = ()  # destination, address, length
    receives: tuple[tuple[int, int, int], ...] = ()  # source, address, length


class FakeNccl(ModuleType):
    """The module ``cupy.cuda.nccl``. Each rank's thread says with ``speaks_as`` who it is."""

    NCCL_UINT8 = 1
    available = True
    NcclError = NcclError

    def __init__(self, cupy: Any) -> None:
        super().__init__("cupy.cuda.nccl")
        self.cupy = cupy
        self.local = threading.local()
        self.mailboxes: defaultdict[Any, deque[bytes]] = defaultdict(deque)
        self.members: defaultdict[bytes, dict[int, Any]] = defaultdict(dict)
        self.groups: defaultdict[tuple[bytes, int], list[list[tuple[str, int]]]] = defaultdict(list)
        self.launches: list[str] = []
        self._names = iter(number.to_bytes(ID_BYTES, "little") for number in range(1 << 30))

    def speaks_as(self, comm: Any) -> None:
        """Let this thread be the rank of a simulated communicator, by which it waits."""
        self.local.comm, self.local.group = comm, None

    def get_unique_id(self) -> bytes:
        return next(self._names)

    def groupStart(self) -> None:  # noqa: N802 - as CuPy has it
        assert self.local.group is None, "a group inside a group"
        self.local.group = []

    def groupEnd(self) -> None:  # noqa: N802
        group, self.local.group = self.local.group, None
        for comm in dict.fromkeys(comm for comm, _, _ in group):
            comm.run([(call, stream) for other, call, stream in group if other is comm])

    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int) -> "FakeCommunicator":  # noqa: N802, N803
        if len(commId) != ID_BYTES:
            raise ValueError(f"commId length {len(commId)}")
        return FakeCommunicator(self, ndev, commId, rank)

    def expect_progress(self) -> None:
        """Raise where groups wait for each other: NCCL would hang."""
        names = {name for name, _ in self.groups}
        for name in names:
            replay({rank: list(groups) for (other, rank), groups in self.groups.items() if other == name})


class FakeCommunicator:
    """One rank of a clique."""

    def __init__(self, nccl: FakeNccl, size: int, name: bytes, rank: int) -> None:
        self.nccl, self.size, self.name, self.rank = nccl, size, name, rank
        self._comm = nccl.local.comm
        members = nccl.members[name]
        assert rank not in members, f"rank {rank} connects twice"
        members[rank] = self._comm
        for other in members.values():
            other.wake()
        self._comm.pass_time(lambda: len(members) == size, "NCCL, connecting")

    def destroy(self) -> None:
        assert self.nccl.members[self.name].pop(self.rank) is self._comm, "destroyed twice"

    def send(self, address: int, length: int, kind: int, peer: int, stream: int) -> None:
        self._add("send", Call(sends=((peer, address, length),)), stream)

    def recv(self, address: int, length: int, kind: int, peer: int, stream: int) -> None:
        self._add("recv", Call(receives=((peer, address, length),)), stream)

    def allGather(self, own: int, whole: int, length: int, kind: int, stream: int) -> None:  # noqa: N802
        assert own == whole + self.rank * length, "in place, as it is called here"
        sends = tuple((other, own, length) for other in self._others())
        receives = tuple((other, whole + other * length, length) for other in self._others())
        self._add("allGather", Call(sends, receives), stream)

    def broadcast(self, given: int, taken: int, length: int, kind: int, root: int, stream: int) -> None:
        assert given == taken, "in place, as it is called here"
        if root == self.rank:
            call = Call(sends=tuple((other, given, length) for other in self._others()))
        else:
            call = Call(receives=((root, taken, length),))
        self._add("broadcast", call, stream)

    def _others(self) -> Iterator[int]:
        return (other for other in range(self.size) if other != self.rank)

    def _add(self, what: str, call: Call, stream: int) -> None:
        assert self.nccl.local.group is not None, f"{what} outside of a group"
        self.nccl.launches.append(what)
        self.nccl.local.group.append((self, call, stream))

    def run(self, calls: list[tuple[Call, int]]) -> None:
        """Send all of a group, then receive all of it."""
        self.nccl.groups[self.name, self.rank].append(
            [("s", each[0]) for call, _ in calls for each in call.sends]
            + [("r", each[0]) for call, _ in calls for each in call.receives]
        )
        for call, stream in calls:
            for peer, address, length in call.sends:
                self._touch(stream, address, writes=False)
                self.nccl.mailboxes[self.name, self.rank, peer].append(ctypes.string_at(address, length))
                self.nccl.members[self.name][peer].wake()
        for call, stream in calls:
            for peer, address, length in call.receives:
                mailbox = self.nccl.mailboxes[self.name, peer, self.rank]
                self._comm.pass_time(lambda mailbox=mailbox: bool(mailbox), f"NCCL, receiving from {peer}")
                message = mailbox.popleft()
                assert len(message) == length, f"NCCL hangs: {length} bytes expected, {len(message)} sent"
                self._touch(stream, address, writes=True)
                ctypes.memmove(address, message, length)

    def _touch(self, stream: int, address: int, *, writes: bool) -> None:
        cupy = self.nccl.cupy
        memory = [cupy.memory_at(address)]
        cupy.streams[stream].launch([] if writes else memory, memory if writes else [])


def replay(groups: dict[int, list[list[tuple[str, int]]]]) -> None:
    """Let each rank start its next group when the one before has ended, until all have, or none can."""
    started: defaultdict[tuple[int, int, str], int] = defaultdict(int)  # by (source, destination, side)
    ends: dict[int, dict[tuple[int, int, str], int]] = {}
    at = dict.fromkeys(groups, -1)

    def enter(rank: int) -> None:
        at[rank] += 1
        if at[rank] < len(groups[rank]):
            for side, peer in groups[rank][at[rank]]:
                started[(rank, peer, "s") if side == "s" else (peer, rank, "r")] += 1
            ends[rank] = {
                key: count for key, count in started.items() if key[0 if key[2] == "s" else 1] == rank
            }

    def has_ended(rank: int) -> bool:
        other = {"s": "r", "r": "s"}
        return all(
            started[source, target, other[side]] >= n for (source, target, side), n in ends[rank].items()
        )

    for rank in groups:
        enter(rank)
    moving = True
    while moving:
        moving = False
        for rank in groups:
            while at[rank] < len(groups[rank]) and has_ended(rank):
                enter(rank)
                moving = True
    stuck = [rank for rank in groups if at[rank] < len(groups[rank])]
    assert not stuck, f"groups of ranks {stuck} wait for each other"
