"""Messages whose lengths only their senders know, and the balancing of entries among ranks.

In host memory a message tells its length when it arrives. NCCL has to know lengths beforehand, and starts
messages in groups that all ranks have to start alike: messages on GPUs follow an exchange of their lengths.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from commlib.arrays import Array, Workspace, is_on_gpu, module_of
from commlib.cost import doubling
from commlib.transport.base import Communicator, Request, Ring
from commlib.vectors import Float32, partition
from commlib.wire import Message

WIDEST_BYTES = 8  # a GPU reads numbers only from addresses that are multiples of their size


def gather_messages(
    comm: Communicator,
    message: Message,
    workspace: Workspace,
    allocate: Callable[[int, int], Message] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Message]:
    """Return the message of every rank of ``comm``.

    The message of rank ``r`` is in ``allocate(r, bytes)``, or in the workspace until the next exchange; this
    rank's own message may be returned as it is. In host memory messages go round a ring:
    ``meanwhile`` is called when the own one is on its way.
    """
    if not is_on_gpu(message):
        allocate = allocate or partial(message_buffer, workspace)
        return Ring(comm, range(comm.size)).allgather_messages(message, allocate, meanwhile)
    lengths = comm.allgather_ints([len(message)])[:, 0]
    if allocate is None:
        messages = _buffers_on_gpu(lengths, message, comm.rank)
    else:
        messages = [allocate(rank, int(length)) for rank, length in enumerate(lengths)]
    comm.allgather(message, messages)
    return messages


def message_buffer(workspace: Workspace, rank: int, length: int) -> Message:
    """Return memory of the workspace for the message of a rank."""
    buffer: Message = workspace.get(f"message of {rank}", length, np.uint8)
    return buffer


def swap_messages(comm: Communicator, outgoing: Sequence[Message], workspace: Workspace) -> list[Message]:
    """Send ``outgoing[r]`` to every rank ``r`` of ``comm``; return what each of them sent here.

    The messages lie in the workspace, which the next exchange overwrites; this rank's own is the same array.
    """
    messages = {comm.rank: outgoing[comm.rank]}
    for bucket in swap_in_buckets(comm, outgoing, workspace, comm.size):
        messages |= bucket
    return [messages[rank] for rank in range(comm.size)]


def swap_in_buckets(
    comm: Communicator, outgoing: Sequence[Message], workspace: Workspace, ranks: int
) -> Iterator[dict[int, Message]]:
    """Send ``outgoing[r]`` to every other rank ``r``; yield the messages received, in buckets of ``ranks``.

    Each rank starts with its right neighbour and goes round. While a bucket is under way, the messages of the
    previous bucket are yielded (of the first bucket: none).
    """
    incoming: list[Message] | None = None
    if is_on_gpu(outgoing[comm.rank]):
        lengths = comm.alltoall_ints([len(message) for message in outgoing])
        incoming = _buffers_on_gpu(lengths, outgoing[comm.rank], comm.rank)
    arrived: dict[int, Message] = {}
    for start in range(1, comm.size, ranks):
        distances = range(start, min(comm.size, start + ranks))
        sources = [(comm.rank - away) % comm.size for away in distances]
        to_each = {to: outgoing[to] for to in ((comm.rank + away) % comm.size for away in distances)}
        wait = _start_bucket(comm, to_each, sources, workspace, incoming)
        yield arrived
        arrived = wait()
    yield arrived


def _start_bucket(
    comm: Communicator,
    to_each: Mapping[int, Message],
    sources: Sequence[int],
    workspace: Workspace,
    incoming: Sequence[Message] | None,
) -> Callable[[], dict[int, Message]]:
    """Start sending; return a function that waits and returns the messages of ``sources``.

    ``incoming``: arrays of the lengths that come from each rank, where they are known.
    """
    if incoming is None:
        sent = [comm.send_message(message, to) for to, message in to_each.items()]
        receipts: list[Request] = []
    else:
        receipts = [comm.receive(incoming[source], source) for source in sources if len(incoming[source])]
        sent = [comm.send(message, to) for to, message in to_each.items() if len(message)]

    def wait() -> dict[int, Message]:
        if incoming is None:
            allocators = {source: partial(message_buffer, workspace, source) for source in sources}
            messages = {
                source: comm.receive_message(source, allocate) for source, allocate in allocators.items()
            }
        else:
            messages = {source: incoming[source] for source in sources}
        for request in (*receipts, *sent):
            request.wait()
        return messages

    return wait


def _buffers_on_gpu(lengths: npt.NDArray[np.int64], own: Message, rank: int) -> list[Message]:
    """Return uninitialized arrays of ``lengths[r]`` bytes on the GPU of ``own``."""
    empty = module_of(own).empty
    if (lengths == lengths[0]).all() and lengths[0] % WIDEST_BYTES == 0:
        return list(empty((len(lengths), int(lengths[0])), np.uint8))  # side by side: one call of NCCL
    messages = [empty(int(length), np.uint8) for length in lengths]
    messages[rank] = own
    return messages


def even_out(comm: Communicator, held: Sequence[Array], counts: npt.NDArray[np.int64]) -> list[Array]:
    """Move entries between ranks until all hold equal shares, in the order of the ranks.

    ``held``: arrays of ``counts[comm.rank]`` entries each. All ranks know all counts, and so who sends which
    entries to whom.
    """
    ends = np.concatenate([[0], counts.cumsum()])
    wanted = partition(int(ends[-1]), comm.size)
    first, last = ends[comm.rank : comm.rank + 2]
    cuts = np.clip(wanted, first, last) - first
    come_from = np.diff(np.clip(ends, wanted[comm.rank], wanted[comm.rank + 1]))
    count = int(wanted[comm.rank + 1] - wanted[comm.rank])
    evened = [module_of(array).empty(count, array.dtype) for array in held]
    for array, received in zip(held, evened, strict=True):
        comm.exchange(np.split(array, cuts[1:-1]), np.split(received, come_from.cumsum()[:-1]))
    return evened


def gather_entries(
    comm: Communicator, held: Sequence[Array], counts: npt.NDArray[np.int64], workspace: Workspace
) -> list[Array]:
    """Return the arrays of all ranks put together, in the order of the ranks.

    ``held``: arrays of ``counts[comm.rank]`` entries each. They travel in one message, one after the other.
    The arrays are in the workspace, until the next call.
    """
    entry_bytes = sum(array.itemsize for array in held)
    lengths = (entry_bytes * counts).tolist()
    messages = [workspace.get(f"entries of {rank}", each, np.uint8) for rank, each in enumerate(lengths)]
    own = messages[comm.rank]
    np.concatenate([array.view(np.uint8) for array in held], out=own)
    comm.allgather(own, messages)
    gathered, starts = [], np.zeros_like(counts)
    for number, array in enumerate(held):
        ends = starts + array.itemsize * counts
        cuts = zip(messages, starts.tolist(), ends.tolist(), strict=True)
        parts = [message[start:end].view(array.dtype) for message, start, end in cuts]
        together = workspace.get(f"gathered {number}", int(counts.sum()), array.dtype)
        gathered.append(np.concatenate(parts, out=together))
        starts = ends
    return gathered


def receive_message(comm: Communicator, source: int, workspace: Workspace) -> Message:
    """Return the message that ``source`` sent, in memory that the next message overwrites."""
    return comm.receive_message(source, lambda length: workspace.get("message", length, np.uint8))


def exchange_message(
    comm: Communicator, message: Message, to: int, source: int, workspace: Workspace
) -> Message:
    """Send a message to rank ``to``; return what ``source`` sent here, as ``receive_message`` does."""
    request = comm.send_message(message, to)
    received = receive_message(comm, source, workspace)
    request.wait()
    return received


def exchange_packed(
    comm: Communicator, messages: Sequence[Message], to: int, source: int, workspace: Workspace, count: int
) -> list[Message]:
    """Send messages as one to rank ``to``; return the ``count`` messages that ``source`` sent here.

    Sent are the length of each, then all of them. They lie in the workspace until the next exchange.
    """
    lengths = np.array([len(message) for message in messages], np.int32)
    packed = np.concatenate([lengths.view(np.uint8), *messages])
    received = exchange_message(comm, packed, to, source, workspace)
    start = count * lengths.itemsize
    return np.split(received[start:], received[:start].view(np.int32).cumsum()[:-1])


def gather_doubling(
    comm: Communicator, ranks: Sequence[int], message: Message, workspace: Workspace
) -> list[Message]:
    """Return the message of each of ``ranks``, in their order: Bruck's all-gather in ``⌈log₂ P⌉`` rounds."""
    own, held = ranks.index(comm.rank), [message]  # held[i]: that of the rank i places to the right
    while len(held) < len(ranks):
        distance = len(held)
        count = min(distance, len(ranks) - distance)
        to, source = (ranks[(own + away) % len(ranks)] for away in (-distance, distance))
        received = exchange_packed(comm, held[:count], to, source, workspace, count)
        held += [each.copy() for each in received]
    return [held[(place - own) % len(ranks)] for place in range(len(ranks))]


def all_reduce_doubling(comm: Communicator, vector: Float32, workspace: Workspace) -> Float32:
    """Return the sum of a vector over the ranks of ``comm``, to the bit the same on all of them.

    The rounds of Bruck's all-gather backwards, a reduce-scatter, then those of the all-gather: in each of
    ``2·⌈log₂ P⌉`` rounds a rank sends to one other and receives from one other. The sum is in the workspace.
    """
    rank, bounds = comm.rank, partition(len(vector), comm.size)
    sums: Float32 = workspace.get("sums", len(vector))
    held: Float32 = workspace.get("held", len(vector))  # the own part first, then that of the right neighbour
    np.concatenate([vector[bounds[rank] :], vector[: bounds[rank]]], out=held)
    ends = np.concatenate([[0], np.roll(np.diff(bounds), -rank).cumsum()])
    rounds = list(doubling(comm.size))
    for distance, count in reversed(rounds):
        own, received = held[: ends[count]], sums[: ends[count]]
        _exchange(comm, held[ends[distance] : ends[distance + count]], received, distance)
        own += received
    for distance, count in rounds:
        _exchange(comm, held[: ends[count]], held[ends[distance] : ends[distance + count]], -distance)
    return np.concatenate([held[len(held) - bounds[rank] :], held[: len(held) - bounds[rank]]], out=sums)


def _exchange(comm: Communicator, outgoing: Array, incoming: Array, distance: int) -> None:
    """Send to the rank ``distance`` to the right, and receive from the one as far to the left."""
    source, to = ((comm.rank + each) % comm.size for each in (-distance, distance))
    receipts = [comm.receive(piece, source) for piece in comm.pieces(incoming)]
    for request in [*receipts, *(comm.send(piece, to) for piece in comm.pieces(outgoing))]:
        request.wait()
