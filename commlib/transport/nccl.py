"""NCCL through CuPy: arrays on GPUs are sent from GPU to GPU, arrays in host memory by MPI.

CuPy is imported by the first call of :func:`world`. Each communicator has its own CUDA stream. Its
work there starts after the work that the caller's current stream holds at that moment, and the caller's
stream waits for its end: so results are used like those of any kernel, and the host does not wait. The host
waits for ``allgather_ints``, ``alltoall_ints`` and objects, which go by MPI.

**The same bits in all runs.** NCCL adds nothing: parts are exchanged and added in the
order of the ranks, as on every transport, so sums are bitwise those of ``mpi`` and ``simulated``, on all
ranks, in all runs, whatever algorithm and protocol NCCL picks (``NCCL_ALGO`` and ``NCCL_PROTO`` change the
speed and nothing else). ``ncclReduceScatter`` moves no fewer bytes over the links, and adds in an order that
depends on both.

**Messages that are posted together travel together.** ``send`` and ``receive`` only queue a message; the
first ``wait``, or any other call of this communicator, starts all queued messages as one group. A rank must
not wait for a message before it has posted those that its peers' groups need: ``exchange`` and the ring obey
that. Unlike MPI, NCCL hangs if a message has another length than its receipt.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from commlib.arrays import Array, is_on_gpu
from commlib.errors import InvalidArgument, PeerFailed
from commlib.transport import mpi
from commlib.transport.base import Communicator, ForwardingCommunicator, Request, Requests
from commlib.transport.verified import VerifiedCommunicator, verified

GPUArray: TypeAlias = Any  # CuPy's arrays, which have no types

BETWEEN = ("nccl", "mpi")
HOST_ID = "NCCL_HOSTID"  # overrides the machine's name for NCCL


class _Posted(Request):
    """A queued message, started with all others of its group."""

    def __init__(self, comm: "GPUCommunicator", array: GPUArray, peer: int, *, sends: bool) -> None:
        self.array, self.peer, self.sends = array, peer, sends
        self.done: Any = None
        self._comm = comm

    def wait(self) -> None:
        """Make the current stream wait for the message; the host does not wait."""
        if self.done is None:
            self._comm.start()
        self._comm.arrays.cuda.get_current_stream().wait_event(self.done)


class GPUCommunicator(ForwardingCommunicator):
    """Ranks that have a GPU each; ``control`` moves everything that is not on a GPU.

    ``device``: this rank's GPU. All calls come from threads whose current CUDA device it is. ``between``:
    the transport between GPUs of different machines, ``nccl`` or ``mpi``. Closing it closes ``control``.
    """

    def __init__(self, control: Communicator, between: str) -> None:
        super().__init__(control)
        self.arrays, self.eager_bytes = _cupy(), Communicator.eager_bytes  # of NCCL, not of MPI
        self.device = self.arrays.cuda.Device()
        self.between = between
        self._stream = self.arrays.cuda.Stream(non_blocking=True)
        self._posted: list[_Posted] = []

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} on {self.host}, GPU {self.device.id}"

    def _free(self) -> None:
        self._stream.synchronize()
        super()._free()

    def split(self, color: int) -> "GPUCommunicator":
        self.start()
        return _communicator(self._inner.split(color), self.between)

    def _send(self, array: Array, destination: int) -> Request:
        return self._post(array, destination) if is_on_gpu(array) else self._inner.send(array, destination)

    def _receive(self, array: Array, source: int) -> Request:
        if is_on_gpu(array):
            return self._post(array, source, sends=False)
        return self._inner.receive(array, source)

    def _post(self, array: GPUArray, peer: int, *, sends: bool = True) -> Request:
        self._expect_open()
        message = _Posted(self, array, peer, sends=sends)
        self._posted.append(message)
        return message

    def start(self) -> None:
        """Start the messages that are queued."""
        messages, self._posted = self._posted, []
        if messages:
            done = self._on_stream(lambda: self._move(messages))
            for message in messages:
                message.done = done

    def _on_stream(self, launch: Callable[[], None]) -> Any:
        """Launch work on the own stream, after that of the current one; return the event of its end."""
        event = self.arrays.cuda.Event
        self._stream.wait_event(self.arrays.cuda.get_current_stream().record(event(disable_timing=True)))
        launch()
        return self._stream.record(event(disable_timing=True))

    def _move(self, messages: Sequence[_Posted]) -> None:
        """Put a group of messages on the own stream."""
        raise NotImplementedError


class NCCLCommunicator(GPUCommunicator):
    """GPUs that NCCL connects, inside a node or across nodes."""

    def __init__(self, control: Communicator, between: str) -> None:
        super().__init__(control, between)
        # Costs time and memory: a single rank needs it only to send to itself.
        self._connected: Any = self._connect() if self.size > 1 else None

    def _free(self) -> None:
        super()._free()
        if self._connected is not None:
            self._connected.destroy()

    @property
    def _nccl(self) -> Any:
        """NCCL's own communicator."""
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    def _connect(self) -> Any:
        nccl = self.arrays.cuda.nccl
        made = nccl.get_unique_id() if self.rank == 0 else None
        identity = self._inner.allgather_objects(made)[0]
        with _nccl_errors(self, "connecting", InvalidArgument):
            return nccl.NcclCommunicator(self.size, identity, self.rank)

    def _move(self, messages: Sequence[_Posted]) -> None:
        with self._group("messages"):
            for message in messages:
                start = self._nccl.send if message.sends else self._nccl.recv
                start(*self._bytes_of(message.array), message.peer, self._stream.ptr)

    def allgather(self, own: GPUArray, parts: Sequence[GPUArray]) -> None:
        """See :meth:`Communicator.allgather`; one call of NCCL, its bytes counted as those of the ring."""
        if not is_on_gpu(own):
            super().allgather(own, parts)
            return
        if parts[self.rank] is not own:
            parts[self.rank][...] = own
        lengths = [part.nbytes for part in parts]
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.sent_bytes[right] += sum(lengths) - lengths[right]
        self.received_bytes[left] += sum(lengths) - lengths[self.rank]
        if self.size == 1 or not any(lengths):
            return
        self.start()
        done = self._on_stream(lambda: self._gather(parts))
        self.arrays.cuda.get_current_stream().wait_event(done)

    def _gather(self, parts: Sequence[GPUArray]) -> None:
        with self._group("all-gather"):
            if _are_contiguous(parts):
                address, length, kind = self._bytes_of(parts[self.rank])
                self._nccl.allGather(address, parts[0].data.ptr, length, kind, self._stream.ptr)
                return
            for source, part in enumerate(parts):
                if part.nbytes:
                    address, length, kind = self._bytes_of(part)
                    self._nccl.broadcast(address, address, length, kind, source, self._stream.ptr)

    def _bytes_of(self, array: GPUArray) -> tuple[int, int, int]:
        assert array.flags.c_contiguous
        return array.data.ptr, array.nbytes, self.arrays.cuda.nccl.NCCL_UINT8

    @contextmanager
    def _group(self, what: str) -> Iterator[None]:
        nccl = self.arrays.cuda.nccl
        with _nccl_errors(self, what, PeerFailed):
            nccl.groupStart()
            try:
                yield
            finally:
                nccl.groupEnd()


class StagedCommunicator(GPUCommunicator):
    """GPUs on several nodes whose messages go by MPI, through pinned buffers in host memory.

    For networks that NCCL does not support, or uses worse than MPI. The host waits for each
    group of messages.
    """

    def __init__(self, control: Communicator, between: str) -> None:
        super().__init__(control, between)
        self._staged: list[Array] = []  # alive until the copies out of them are done

    def _move(self, messages: Sequence[_Posted]) -> None:
        stream, control = self._stream, self._inner
        pinned, lengths = self.arrays.cuda.alloc_pinned_memory, [each.array.nbytes for each in messages]
        buffers = [np.frombuffer(pinned(length), np.uint8, length) for length in lengths]
        for message, buffer in zip(messages, buffers, strict=True):
            if message.sends:
                message.array.data.copy_to_host_async(buffer.ctypes.data, len(buffer), stream)
        stream.synchronize()
        receipts, sent = [], []
        for message, buffer in zip(messages, buffers, strict=True):
            if message.sends:
                sent.append(control.send(buffer, message.peer))
            else:
                receipts.append((control.receive(buffer, message.peer), message, buffer))
        for receipt, message, buffer in receipts:
            receipt.wait()
            message.array.data.copy_from_host_async(buffer.ctypes.data, len(buffer), stream)
        Requests(sent).wait()
        self._staged = buffers


def world(*, between: str = "nccl", share_gpus: bool = False) -> Communicator:
    """Return a communicator of all ranks of the MPI job, each with a GPU of its machine.

    Rank ``r`` of a machine takes the ``r``-th GPU that it sees, modulo their number, and makes it current in
    this thread. ``between``: how communicators that span machines move arrays on GPUs, by ``nccl`` or,
    through host memory, by ``mpi``: exchanges over the world, as those of ``dense`` and ``allgather``, then
    go by MPI between ranks of one machine, too. ``share_gpus``: let several ranks share a GPU, for tests:
    NCCL sees each of these on a machine of its own.

    Raises ``InvalidArgument`` where there is no GPU, CuPy or NCCL, or where ranks share a GPU.
    """
    return over(mpi.world(), between=between, share_gpus=share_gpus)


def over(control: Communicator, *, between: str = "nccl", share_gpus: bool = False) -> Communicator:
    """Return the communicator of :func:`world` of ``control``'s ranks; ``control`` moves host memory.

    Where ``control`` checks its messages, those between GPUs are checked, too. Closing the result closes
    ``control``.
    """
    if between not in BETWEEN:
        raise InvalidArgument(f"between: expected one of {', '.join(BETWEEN)}, got {between!r}")
    problem = obstacle(control, share_gpus=share_gpus)
    if problem is not None:
        raise InvalidArgument(f"nccl: {problem}")
    gpus = _communicator(control, between)
    return verified(gpus) if isinstance(control, VerifiedCommunicator) else gpus


def obstacle(control: Communicator, *, share_gpus: bool = False) -> str | None:
    """Make this rank's GPU current; return why the ranks of ``control`` cannot use NCCL together.

    ``None`` where they can. The same on all ranks, which call it together.
    """
    for rank, each in enumerate(control.allgather_objects(missing())):
        if each is not None:
            return f"rank {rank}: {each}"
    cuda = _cupy().cuda
    hosts = control.allgather_objects(control.host)
    number = hosts[: control.rank].count(control.host)
    device = cuda.Device(number % cuda.runtime.getDeviceCount())
    device.use()
    if share_gpus:
        os.environ[HOST_ID] = f"{control.host}-{number}"
    own = control.host, os.environ.get(HOST_ID, control.host), device.pci_bus_id
    gpus = control.allgather_objects(own)
    for rank, (host, host_for_nccl, gpu) in enumerate(gpus):
        first = gpus.index((host, host_for_nccl, gpu))
        if first < rank:
            return (
                f"ranks {first} and {rank} share GPU {gpu} of {host}, and NCCL wants one for each rank: "
                "start fewer there, or, for tests, nccl.world(share_gpus=True)"
            )
    return None


def missing() -> str | None:
    """Return in one line why this process cannot use NCCL, or ``None`` if it can; imports CuPy."""
    try:
        cupy = _cupy()
    except ImportError as error:
        return f"CuPy cannot be imported ({_first_line(error)}): pip install 'cloudtrain[gpu]'"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # noqa: BLE001 - of a driver, or of a library that it loads
        return f"CuPy finds no GPU ({_first_line(error)})"
    if count == 0:
        return "CuPy finds no GPU"
    if not cupy.cuda.nccl.available:
        cuda = cupy.cuda.runtime.runtimeGetVersion() // 1000
        return f"this CuPy has no NCCL: pip install nvidia-nccl-cu{cuda}"
    return None


def _cupy() -> ModuleType:
    import cupy
    import cupy.cuda.nccl  # not imported by cupy itself

    return cupy


def _communicator(control: Communicator, between: str) -> GPUCommunicator:
    spans_machines = len(set(control.allgather_objects(control.host))) > 1
    return (StagedCommunicator if spans_machines and between == "mpi" else NCCLCommunicator)(control, between)


@contextmanager
def _nccl_errors(comm: GPUCommunicator, what: str, kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except comm.arrays.cuda.nccl.NcclError as error:
        raise kind(f"{comm}, {what}: {_first_line(error)} (NCCL_DEBUG=WARN says more)") from error


def _are_contiguous(parts: Sequence[GPUArray]) -> bool:
    """Return whether the parts have equal lengths and follow each other in memory."""
    length, first = parts[0].nbytes, parts[0].data.ptr
    return all(
        part.nbytes == length and part.data.ptr == first + position * length
        for position, part in enumerate(parts)
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
