"""The two halves of a ring all-reduce: ``P − 1`` hops that add up, ``P − 1`` that hand round.

Every rank talks to the same two neighbours all the time, so no card receives from many at once.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from commlib.transport.base import Communicator
from commlib.vectors import Float32


@dataclass(frozen=True)
class Ring:
    """The ranks of ``comm`` in a circle: this one at ``place``, between the ranks ``left`` and ``right``."""

    comm: Communicator
    place: int
    left: int
    right: int

    @classmethod
    def of(cls, comm: Communicator, order: "list[int] | range") -> "Ring":
        """Return the ring that visits the ranks of ``comm`` in ``order``."""
        place = order.index(comm.rank)
        return cls(comm, place, order[place - 1], order[(place + 1) % len(order)])

    @property
    def own(self) -> int:
        """Return the part that is complete here after ``reduce_scatter``."""
        return (self.place + 1) % self.comm.size

    def reduce_scatter(self, given: list[Float32], sums: list[Float32]) -> None:
        """Leave in ``sums[own]`` the sum of that part over ranks, added in the order of the ring.

        ``given``: this rank's vector in ``P`` parts, left as it is; the rest of ``sums`` is overwritten.
        """
        outgoing = given[self.place]
        if self.comm.size == 1:
            sums[0][...] = outgoing
        for step in range(self.comm.size - 1):
            place = (self.place - step - 1) % self.comm.size
            self._pass_on(outgoing, sums[place])
            outgoing = np.add(sums[place], given[place], out=sums[place])

    def allgather(self, parts: list[Float32]) -> None:
        """Fill all ``parts`` with those that are complete at their owners."""
        for step in range(self.comm.size - 1):
            own = parts[(self.own - step) % self.comm.size]
            self._pass_on(own, parts[(self.place - step) % self.comm.size])

    def _pass_on(self, outgoing: Float32, incoming: Float32) -> None:
        """Send to the right neighbour what came from the left one a step ago."""
        requests = []
        if len(incoming):
            requests.append(self.comm.receive(incoming, self.left))
        if len(outgoing):
            requests.append(self.comm.send(outgoing, self.right))
        for request in requests:
            request.wait()


def parts_of(vector: Float32, bounds: npt.NDArray[np.int64]) -> list[Float32]:
    """Return the consecutive parts of ``vector`` that ``bounds`` cut; they share its memory."""
    return np.split(vector, bounds[1:-1])
