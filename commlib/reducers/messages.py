"""Messages whose lengths only their senders know, and entries that move until all ranks hold equally many."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from commlib.arrays import Array, is_on_gpu, module_of
from commlib.memory import Workspace
from commlib.transport.base import Communicator, Request
from commlib.vectors import partition
from commlib.wire import Message

WIDEST_BYTES = 8  # a GPU reads numbers only from addresses that are multiples of their size


def gather_messages(
    comm: Communicator, message: Message, lengths: npt.NDArray[np.int64], workspace: Workspace
) -> list[Message]:
    """Return the message of every rank of ``comm``, ``lengths[r]`` bytes from rank ``r``.

    They lie in the workspace, that of this rank is the same array: the next exchange overwrites them.
    """
    messages = _room_for(lengths, message, comm.rank, workspace)
    comm.allgather(message, messages)
    return messages


def swap_messages(comm: Communicator, outgoing: Sequence[Message], workspace: Workspace) -> list[Message]:
    """Send ``outgoing[r]`` to every rank ``r`` of ``comm``; return what each of them sent here.

    They lie in the workspace, that of this rank is the same array: the next exchange overwrites them.
    """
    lengths = comm.alltoall_ints([len(message) for message in outgoing])
    incoming = _room_for(lengths, outgoing[comm.rank], comm.rank, workspace)
    comm.exchange(outgoing, incoming)
    return incoming


def _room_for(lengths: npt.NDArray[np.int64], own: Message, rank: int, workspace: Workspace) -> list[Message]:
    """Return arrays of ``lengths[r]`` bytes of whatever values, where ``own`` lies, which is one of them."""
    arrays = module_of(own)
    if is_on_gpu(own) and (lengths == lengths[0]).all() and lengths[0] % WIDEST_BYTES == 0:
        return list(arrays.empty((len(lengths), int(lengths[0])), np.uint8))  # side by side: one call of NCCL
    starts = np.concatenate([[0], np.cumsum(-(-lengths // WIDEST_BYTES) * WIDEST_BYTES)])
    room = workspace.get("messages", int(starts[-1]), np.uint8)
    messages = [room[start : start + length] for start, length in zip(starts[:-1], lengths, strict=True)]
    messages[rank] = own
    return messages


def even_out(comm: Communicator, held: Sequence[Array], counts: npt.NDArray[np.int64]) -> list[Array]:
    """Move entries between ranks until all hold equal shares, in the order of the ranks.

    ``held``: arrays of ``counts[comm.rank]`` entries each. Who sends what to whom follows from the counts
    that all ranks know, so nothing is asked.
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


def send_message(comm: Communicator, message: Message, destination: int) -> None:
    """Send a message to a rank that receives it with ``receive_message``."""
    for request in _start(comm, message, destination):
        request.wait()


def receive_message(comm: Communicator, source: int, workspace: Workspace) -> Message:
    """Return the message that ``source`` sent with ``send_message``; the next one overwrites it."""
    length = np.empty(1, np.int64)
    comm.receive_header(length, source).wait()
    message = workspace.get("message", int(length[0]), np.uint8)
    if len(message):
        comm.receive(message, source).wait()
    return message


def exchange_message(comm: Communicator, message: Message, partner: int, workspace: Workspace) -> Message:
    """Send a message to ``partner``; return the one it sends here, as ``receive_message`` does."""
    requests = _start(comm, message, partner)
    received = receive_message(comm, partner, workspace)
    for request in requests:
        request.wait()
    return received


def _start(comm: Communicator, message: Message, destination: int) -> list[Request]:
    requests = [comm.send_header(np.array([len(message)], np.int64), destination)]
    if len(message):
        requests.append(comm.send(message, destination))
    return requests
