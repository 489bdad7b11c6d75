"""Messages with checksums: to find a network card, a memory module or a driver that corrupts data.

TCP's own checksum has 16 bits and ends at the network card. Here a digest of 64 bits (XXH3) follows every
message; the sender computes it and the receiver compares it with the digest of what arrived.
"""

import numpy as np
from xxhash import xxh3_64_intdigest

from commlib.arrays import Array, to_host
from commlib.errors import PeerFailed
from commlib.transport.base import Communicator, ForwardingCommunicator, Request, Requests

VERIFY = "CLOUDTRAIN_VERIFY"


class _Checked(Requests):
    """A message and its digest under way."""

    def __init__(self, message: Request, digest: Request, array: Array, sent: Array, what: str) -> None:
        super().__init__([message, digest])
        self._array, self._sent, self._what = array, sent, what

    def wait(self) -> None:
        super().wait()
        sent, arrived = int(self._sent[0]), _digest(self._array)
        if sent != arrived:
            size = f"{self._array.nbytes} bytes"
            raise PeerFailed(
                f"{self._what}: {size} of digest {sent:016x} were sent, and {arrived:016x} arrived"
            )


class VerifiedCommunicator(ForwardingCommunicator):
    """Ranks that check every message from one rank to another, over another communicator.

    A corrupted message raises :class:`commlib.errors.PeerFailed`, which names both ranks. The few bytes of
    ``allgather_ints``, ``alltoall_ints`` and exchanges of objects have no digest. Digests do not count as
    payload. Arrays on GPUs are copied to host memory to be checked.
    """

    def split(self, color: int) -> "VerifiedCommunicator":
        return VerifiedCommunicator(self._inner.split(color))

    def _send(self, array: Array, destination: int) -> Request:
        digest = np.array([_digest(array)], np.uint64)
        return Requests([self._inner.send(array, destination), self._inner.send_header(digest, destination)])

    def _receive(self, array: Array, source: int) -> Request:
        sent = np.empty(1, np.uint64)
        message, digest = self._inner.receive(array, source), self._inner.receive_header(sent, source)
        what = f"rank {self.rank} of {self.size} on {self.host}, receiving from rank {source}"
        return _Checked(message, digest, array, sent, what)


def verified(comm: Communicator) -> Communicator:
    """Return ``comm`` with a digest after every message (itself if it has them); on all ranks or none.

    >>> from commlib.transport import simulated
    >>> simulated.run(lambda comm: int(verified(comm).allgather_ints([comm.rank]).sum()), world_size=3)
    [3, 3, 3]
    """
    return comm if isinstance(comm, VerifiedCommunicator) else VerifiedCommunicator(comm)


def _digest(array: Array) -> int:
    return int(xxh3_64_intdigest(to_host(array).reshape(-1).view(np.uint8).data))
