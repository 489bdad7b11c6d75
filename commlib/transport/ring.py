"""The ring: every rank sends to its right neighbour only, so no card receives from several at once.

What goes all around enters each node once, where the ranks of a node are neighbours.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from commlib.vectors import Float32

if TYPE_CHECKING:
    from commlib.transport.base import Communicator

Array = npt.NDArray[Any]


class Ring:
    """The ranks of ``comm`` in a circle that visits them in ``order``."""

    def __init__(self, comm: "Communicator", order: Sequence[int]) -> None:
        self._comm = comm
        place = order.index(comm.rank)
        # Seen from here: this rank, its left neighbour, the left neighbour of that, … its right neighbour.
        self._leftwards = [order[place - step] for step in range(comm.size)]

    def reduce_scatter(self, given: Sequence[Float32], sums: Sequence[Float32]) -> None:
        """Leave in ``sums[rank]`` the sum over ranks of ``given[rank]``; the rest of ``sums`` is overwritten.

        ``P − 1`` hops. Part ``r`` sets out from the right neighbour of rank ``r``, is added up in the order
        of the ring, and arrives at ``r``. ``given`` is left as it is.
        """
        own, *others = self._leftwards
        if not others:
            sums[own][...] = given[own]
            return
        outgoing = given[others[0]]
        for part in [*others[1:], own]:
            self._pass_on(outgoing, sums[part])
            outgoing = np.add(sums[part], given[part], out=sums[part])

    def allgather(self, parts: Sequence[Array]) -> None:
        """Fill every ``parts[r]`` with that of rank ``r``, in ``P − 1`` hops; all know all lengths."""
        for outgoing, incoming in zip(self._leftwards[:-1], self._leftwards[1:], strict=True):
            self._pass_on(parts[outgoing], parts[incoming])

    def _pass_on(self, outgoing: Array, incoming: Array) -> None:
        """Send to the right neighbour what came from the left one a hop ago; empty arrays cost no message."""
        requests = []
        if incoming.size:
            requests.append(self._comm.receive(incoming, self._leftwards[1]))
        if outgoing.size:
            requests.append(self._comm.send(outgoing, self._leftwards[-1]))
        for request in requests:
            request.wait()
