"""Messages whose lengths only their senders know."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from commlib.transport.base import Communicator, Request
from commlib.wire import Message


def gather_messages(comm: Communicator, message: Message, lengths: npt.NDArray[np.int64]) -> list[Message]:
    """Return the message of every rank of ``comm``, ``lengths[r]`` bytes from rank ``r``."""
    messages = [np.empty(length, np.uint8) for length in lengths]
    comm.allgather(message, messages)
    return messages


def swap_messages(comm: Communicator, outgoing: Sequence[Message]) -> list[Message]:
    """Send ``outgoing[r]`` to every rank ``r`` of ``comm``; return what each of them sent here."""
    lengths = comm.swap([len(message) for message in outgoing])
    incoming = [np.empty(length, np.uint8) for length in lengths]
    comm.exchange(outgoing, incoming)
    return incoming


def send_message(comm: Communicator, message: Message, destination: int) -> None:
    """Send a message to a rank that receives it with ``receive_message``."""
    for request in _start(comm, message, destination):
        request.wait()


def receive_message(comm: Communicator, source: int) -> Message:
    """Return the message that ``source`` sent with ``send_message``."""
    length = np.empty(1, np.int64)
    comm.receive_header(length, source).wait()
    message = np.empty(int(length[0]), np.uint8)
    if len(message):
        comm.receive(message, source).wait()
    return message


def exchange_message(comm: Communicator, message: Message, partner: int) -> Message:
    """Send a message to ``partner`` and return the one it sends here at the same time."""
    requests = _start(comm, message, partner)
    received = receive_message(comm, partner)
    for request in requests:
        request.wait()
    return received


def _start(comm: Communicator, message: Message, destination: int) -> list[Request]:
    requests = [comm.send_header(np.array([len(message)], np.int64), destination)]
    if len(message):
        requests.append(comm.send(message, destination))
    return requests
