"""The interface of transports: messages between ranks, and the collectives built from them.

A transport implements point-to-point messages, three small exchanges for set-up and lengths, and ``split``.
The collectives below use only those, so that every transport moves the same bytes and adds in the same order:
results are bitwise equal on all ranks, in all runs, and on all transports.
"""

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from commlib.arrays import ROW_MULTIPLE, Array, Workspace, is_on_gpu, module_of
from commlib.errors import InvalidArgument, UseAfterClose
from commlib.kernels import kernels_of
from commlib.network import PIECES
from commlib.transport.watchdog import Watchdog
from commlib.vectors import Float32, Index

Own = TypeVar("Own", bound="Closing")
Integers = npt.NDArray[np.int64]


def check_color(color: int) -> int:
    """Return a color that every transport can split by; MPI has none below 0."""
    if color < 0:
        raise InvalidArgument(f"color: expected at least 0, got {color}")
    return color


class Request(ABC):
    """A message under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the message has arrived (received) or its buffer may be used again (sent).

        Raises :class:`commlib.errors.PeerFailed` where it cannot arrive, or has another length.
        """


class Requests(Request):
    """Some messages under way, as one."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    def wait(self) -> None:
        for request in self._requests:
            request.wait()


class Closing:
    """A context manager that closes itself at the end of the block.

    An exception that leaves the block closes nothing, since the other ranks may not come to ``close``.
    """

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.close()

    def close(self) -> None:
        """Free what it holds; all ranks call it together."""


class Communicator(Closing, ABC):
    """An ordered group of ranks that exchange arrays.

    ``rank`` and ``size`` are this rank's number and the number of ranks; ``host`` names its machine.
    ``sent_bytes`` and ``received_bytes`` count the payload exchanged with each rank since construction:
    int64 arrays of shape ``(size,)``. The few bytes of ``allgather_ints``, ``alltoall_ints``, headers and
    object exchanges are not counted. ``arrays``: the module whose arrays gradients are, NumPy or CuPy.
    ``eager_bytes``: the longest message that is sent without waiting for the receiver's consent.
    ``shares_cores``: whether a machine has more ranks than cores, so that a rank that waits sleeps.
    ``in_pieces``: whether long messages of ``send_message`` travel in pieces. :class:`commlib.Topology` sets
    it where there are several nodes; inside a single node whole messages are faster.
    """

    arrays: ModuleType = np
    eager_bytes: int = sys.maxsize
    shares_cores: bool = False
    in_pieces: bool = False

    def __init__(self, rank: int, size: int, host: str) -> None:
        self.rank = rank
        self.size = size
        self.host = host
        self.sent_bytes = np.zeros(size, np.int64)
        self.received_bytes = np.zeros(size, np.int64)
        self._is_closed = False

    def close(self) -> None:
        """Free the communicator; every later exchange over it raises ``UseAfterClose``.

        Collective, as freeing is in MPI: all its ranks call it, in the same order among their exchanges, and
        with no message under way. The communicators that were split from it stay open; they are closed by the
        code that split them. Calls after the first one, or after MPI was finalized, do nothing.
        """
        if not self._is_closed:
            self._free()
            self._is_closed = True

    @abstractmethod
    def _free(self) -> None:
        """Free what this communicator holds; called once."""

    def _expect_open(self) -> None:
        if self._is_closed:
            raise UseAfterClose(f"rank {self.rank} of {self.size}: the communicator was closed")

    def now(self) -> float:
        """Return the seconds of a clock that only goes forward; differences of it are durations."""
        return time.perf_counter()

    @abstractmethod
    def split(self, color: int) -> "Communicator":
        """Return a communicator of the ranks that gave the same color (0 or more), ordered by rank."""

    def allgather_ints(self, values: Sequence[int]) -> Integers:
        """Return every rank's ``values`` (a few 64-bit integers), shape ``(size, len(values))``."""
        return self.start_allgather_ints(values)()

    @abstractmethod
    def start_allgather_ints(self, values: Sequence[int]) -> Callable[[], Integers]:
        """Start ``allgather_ints``; the call that is returned waits for its result and returns that.

        Other messages may travel meanwhile. All ranks start their exchanges of integers over a communicator
        in the same order.
        """

    @abstractmethod
    def alltoall_ints(self, values: Sequence[int]) -> Integers:
        """Send ``values[r]``, a 64-bit integer, to each rank ``r``; return those received, ``(size,)``."""

    @abstractmethod
    def allgather_objects(self, value: Any) -> list[Any]:
        """Return every rank's picklable ``value``, in rank order. For set-up; never on the data path."""

    @abstractmethod
    def _send(self, array: Array, destination: int) -> Request:
        """See ``send``, which counts the bytes."""

    @abstractmethod
    def _receive(self, array: Array, source: int) -> Request:
        """See ``receive``."""

    def send(self, array: Array, destination: int) -> Request:
        """Start sending a contiguous array, which stays untouched until the request is waited for."""
        assert array.flags.c_contiguous
        self.sent_bytes[destination] += array.nbytes
        return self._send(array, destination)

    def receive(self, array: Array, source: int) -> Request:
        """Start receiving into a contiguous array of exactly the length that was sent.

        Messages of one sender fill the arrays in the order in which these were posted.
        """
        assert array.flags.c_contiguous
        assert getattr(array.flags, "writeable", True)  # CuPy's arrays are, and have no such flag
        self.received_bytes[source] += array.nbytes
        return self._receive(array, source)

    def send_message(self, message: Array, destination: int) -> Request:
        """Start sending contiguous bytes to a rank that does not know how many come.

        Long messages may travel in pieces (``in_pieces``): these need no rendezvous, and the receiver can
        forward each at once. A first piece of full length is followed by the message's length and the rest.
        """
        assert message.flags.c_contiguous
        assert message.dtype == np.uint8
        step = self._piece_bytes
        is_announced = message.nbytes == step or self._goes_in_pieces(message.nbytes)
        first, rest = (message[:step], message[step:]) if is_announced else (message, message[:0])
        requests = [self._send_first(first, destination)]
        if is_announced:
            requests.append(self.send_header(np.array([message.nbytes], np.int64), destination))
        requests += [self.send(piece, destination) for piece in _cut(rest, step)]
        return Requests(requests)

    def _goes_in_pieces(self, length: int) -> bool:
        return self.in_pieces and length >= 2 * self._piece_bytes

    def _send_first(self, piece: Array, destination: int) -> Request:
        self.sent_bytes[destination] += piece.nbytes
        return self._send_message(piece, destination)

    def receive_message(self, source: int, allocate: Callable[[int], Array]) -> Array:
        """Wait for what ``source`` sent with ``send_message``; return it in the array ``allocate(bytes)``.

        Any length is taken: ranks that disagree on it can still find out that they do.
        """
        return self.relay_message(source, allocate, None)[0]

    def relay_message(
        self, source: int, allocate: Callable[[int], Array], destination: int | None
    ) -> tuple[Array, Request]:
        """Receive a message, and send on each piece when it arrives; return also the request of that."""
        step, sent = self._piece_bytes, list[Request]()
        first = self._receive_message(
            source, lambda length: np.empty(length, np.uint8) if length == step else allocate(length)
        )
        self.received_bytes[source] += first.nbytes
        if destination is not None:
            sent.append(self._send_first(first, destination))
        if first.nbytes != step:
            return first, Requests(sent)
        header = np.empty(1, np.int64)
        self.receive_header(header, source).wait()
        if destination is not None:
            sent.append(self.send_header(header, destination))
        message = allocate(int(header[0]))
        message[:step] = first
        pieces = _cut(message[step:], step)
        for piece, receipt in zip(pieces, [self.receive(piece, source) for piece in pieces], strict=True):
            receipt.wait()
            if destination is not None:
                sent.append(self.send(piece, destination))
        return message, Requests(sent)

    @property
    def _piece_bytes(self) -> int:
        """The bytes of a piece of a long message; on a GPU messages are not cut."""
        return max(1, self.eager_bytes // PIECES) if self.arrays is np else sys.maxsize

    def _send_message(self, message: Array, destination: int) -> Request:
        """See ``send_message``. Transports whose receivers have to know lengths send a header ahead."""
        header = self.send_header(np.array([message.nbytes], np.int64), destination)
        return Requests([header, self._send(message, destination)]) if message.nbytes else header

    def _receive_message(self, source: int, allocate: Callable[[int], Array]) -> Array:
        header = np.empty(1, np.int64)
        self.receive_header(header, source).wait()
        message = allocate(int(header[0]))
        if message.nbytes:
            self._receive(message, source).wait()
        return message

    def send_header(self, header: Array, destination: int) -> Request:
        """Start sending the few bytes that announce a message; they do not count as payload."""
        return self._send(header, destination)

    def receive_header(self, header: Array, source: int) -> Request:
        """Start receiving what ``send_header`` sent."""
        return self._receive(header, source)

    def pieces(self, array: Array) -> list[Array]:
        """Cut an array into messages that are sent at once, so that a hop begins while the last one ends."""
        return _cut(array, self.eager_bytes // array.dtype.itemsize)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.allgather_ints([])

    def start_thread(self, body: Callable[[], None]) -> threading.Thread:
        """Return a thread that runs ``body``, which exchanges for this rank while others of it compute."""
        thread = threading.Thread(target=body, name="commlib background", daemon=True)
        thread.start()
        return thread

    def condition(self) -> threading.Condition:
        """Return a condition with which such threads of this rank wait for each other."""
        return threading.Condition()

    def watchdog(self, seconds: float) -> Watchdog:
        """Return a watchdog that ends the job when a rank waits longer than ``seconds``; collective.

        On transports where no rank can wait for ever, such as the simulated one, it does nothing.
        """
        return Watchdog()

    def exchange(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> None:
        """Send ``outgoing[r]`` to every rank ``r`` and fill ``incoming[r]`` with what ``r`` sent here.

        Each rank starts with its right neighbour and goes round, so that no two start with the same rank.
        Empty arrays are not sent. ``incoming`` is overwritten; the own part is copied, unless it is the same
        array.
        """
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        requests = [self.receive(incoming[each], each) for each in reversed(others) if incoming[each].size]
        requests += [self.send(outgoing[each], each) for each in others if outgoing[each].size]
        if incoming[self.rank] is not outgoing[self.rank]:
            incoming[self.rank][...] = outgoing[self.rank]
        Requests(requests).wait()

    def reduce_scatter(
        self, vector: Float32, bounds: npt.NDArray[np.int64], workspace: Workspace | None = None
    ) -> Float32:
        """Return the sum over ranks, in rank order, of ``vector[bounds[rank] : bounds[rank + 1]]``.

        ``vector`` is contiguous float32, shape ``(bounds[-1],)``, and left as it is; ``bounds`` has
        ``size + 1`` entries. Returns a new array, or with ``workspace`` one that the next call overwrites; a
        single rank with a workspace gets a view of ``vector``, to be read only.
        """
        parts = [vector[low:high] for low, high in zip(bounds[:-1], bounds[1:], strict=True)]
        own = parts[self.rank]
        if self.size == 1:
            return own.copy() if workspace is None else own
        arrays, length = module_of(own), -(-len(own) // ROW_MULTIPLE) * ROW_MULTIPLE
        rows = (workspace or Workspace(arrays)).get("rows of the node", (self.size - 1) * length)
        others = rows.reshape(self.size - 1, length)
        received = list(others[:, : len(own)])
        received.insert(self.rank, own)
        self.exchange(parts, received)
        return kernels_of(arrays).sum_rows(others, own, self.rank)

    def allgather(self, own: Array, parts: Sequence[Array]) -> None:
        """Fill ``parts[r]`` with the ``own`` of every rank ``r``, round a ring in the order of the ranks.

        All ranks know all lengths. The own part is copied, unless it is the same array.
        """
        if parts[self.rank] is not own:
            parts[self.rank][...] = own
        Ring(self, range(self.size)).allgather(parts)


class ForwardingCommunicator(Communicator):
    """The ranks of another communicator, ``inner``, which makes the exchanges that no subclass defines.

    Closing it closes ``inner``. Every forwarded exchange calls ``start`` first.
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.size, inner.host)
        self.arrays, self.shares_cores, self._inner = inner.arrays, inner.shares_cores, inner
        self.eager_bytes, self.in_pieces = inner.eager_bytes, inner.in_pieces

    def __str__(self) -> str:
        return str(self._inner)

    def start(self) -> None:  # noqa: B027 - not every subclass queues messages
        """Start the messages that are queued."""

    def _free(self) -> None:
        self._inner.close()

    def now(self) -> float:
        return self._inner.now()

    def start_thread(self, body: Callable[[], None]) -> threading.Thread:
        return self._inner.start_thread(body)

    def condition(self) -> threading.Condition:
        return self._inner.condition()

    def watchdog(self, seconds: float) -> Watchdog:
        return self._inner.watchdog(seconds)

    def start_allgather_ints(self, values: Sequence[int]) -> Callable[[], Integers]:
        self.start()
        return self._inner.start_allgather_ints(values)

    def alltoall_ints(self, values: Sequence[int]) -> Integers:
        self.start()
        return self._inner.alltoall_ints(values)

    def allgather_objects(self, value: Any) -> list[Any]:
        self.start()
        return self._inner.allgather_objects(value)


def _cut(array: Array, length: int) -> list[Array]:
    return [array[start : start + length] for start in range(0, len(array), length)]


class Ring:
    """The ranks of ``comm`` in a ring, in the order ``order``.

    Every rank sends to its right neighbour only, so that no network card receives from several at once. Where
    the ranks of a node are neighbours, all that goes round enters each node once.
    """

    def __init__(self, comm: Communicator, order: Sequence[int]) -> None:
        self._comm = comm
        position = order.index(comm.rank)
        # This rank, its left neighbour, the left neighbour's left neighbour, … its right neighbour.
        self._leftwards = [order[position - step] for step in range(comm.size)]

    def allreduce(
        self,
        given: Sequence[Array],
        sums: Sequence[Array],
        finish: Callable[[Array], None],
        add: np.ufunc = np.add,
    ) -> None:
        """Fill ``sums`` with ``given`` reduced over ranks by ``add``; ``given`` is not changed.

        ``P − 1`` hops of reduce-scatter, then ``P − 1`` of all-gather. Part ``r`` starts at the right
        neighbour of rank ``r``, is summed in the order of the ring, and ends at ``r``, where ``finish``
        changes each piece of the sum before all get it. Pieces begin at ``first_entries``.
        """
        (own, *others), pieces = self._leftwards, self._comm.pieces
        if not others:
            sums[own][...] = given[own]
            finish(sums[own])
            return
        # Nothing of others[0] is summed here, so that its sum can be received at any time.
        receipts = self._receipts([sums[part] for part in (*others[1:], own, others[0])])
        sent = [self._send(piece) for piece in pieces(given[others[0]])]
        for part in others[1:]:
            for total, addend in zip(pieces(sums[part]), pieces(given[part]), strict=True):
                next(receipts).wait()
                sent.append(self._send(add(total, addend, out=total)))
        finished = list[Request]()
        for total, addend in zip(pieces(sums[own]), pieces(given[own]), strict=True):
            next(receipts).wait()
            finish(add(total, addend, out=total))
            finished.append(self._send(total))
        Requests(sent).wait()
        self._forward(sums, chain(receipts, self._receipts([sums[part] for part in others[1:]])))
        Requests(finished).wait()

    def allgather(self, parts: Sequence[Array]) -> None:
        """Fill every ``parts[r]`` with rank ``r``'s, in ``P − 1`` hops; all ranks know all lengths."""
        own, *others = self._leftwards
        if others:
            receipts = self._receipts([parts[rank] for rank in others])
            sent = [self._send(piece) for piece in self._comm.pieces(parts[own])]
            self._forward(parts, receipts)
            Requests(sent).wait()

    def _forward(self, parts: Sequence[Array], receipts: Iterator[Request]) -> None:
        """Receive the parts of the other ranks, and send on those that the right neighbour has not."""
        sent = list[Request]()
        for rank in self._leftwards[1:]:
            for piece in self._comm.pieces(parts[rank]):
                next(receipts).wait()
                if rank != self._leftwards[-1]:
                    sent.append(self._send(piece))
        Requests(sent).wait()

    def first_entries(self, bounds: Index) -> Index:
        """Return where the pieces begin of float32 parts with these bounds."""
        step = self._comm.eager_bytes // np.dtype(np.float32).itemsize
        return np.concatenate([np.arange(low, high, step) for low, high in pairwise(bounds.tolist())])

    def allgather_messages(
        self,
        own: Array,
        allocate: Callable[[int, int], Array],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[Array]:
        """Return the ``own`` of every rank, in ``P − 1`` hops; a rank knows the length of its own only.

        ``allocate(rank, bytes)`` returns memory for the array of ``rank``; the own one is the same array.
        ``meanwhile`` is called when that is on its way.
        """
        comm, (rank, *others) = self._comm, self._leftwards
        if not others:
            return [own]
        left, right = others[0], others[-1]
        messages, sent = {rank: own}, [comm.send_message(own, right)]
        meanwhile()
        for each in others[:-1]:
            messages[each], passed_on = comm.relay_message(left, partial(allocate, each), right)
            sent.append(passed_on)
        messages[right] = comm.receive_message(left, partial(allocate, right))
        Requests(sent).wait()
        return [messages[rank] for rank in range(comm.size)]

    def _send(self, array: Array) -> Request:
        """Start sending to the right neighbour.

        The ring waits for sends after the last hop only: else each hop would wait for both neighbours.
        """
        return self._comm.send(array, self._leftwards[-1])

    def _receipts(self, arrays: Sequence[Array]) -> Iterator[Request]:
        """Return the receipts of the pieces that the left neighbour sends, hop after hop.

        All are posted now, so that a neighbour that is ahead can go on. On a GPU, where messages that are
        posted together wait for each other, each is posted when it is taken.
        """
        left = self._leftwards[1]
        receipts = (self._comm.receive(piece, left) for array in arrays for piece in self._comm.pieces(array))
        return receipts if any(map(is_on_gpu, arrays)) else iter(list(receipts))
