"""Dense all-reduce: every entry, every step. The baseline that the others are measured against."""

from typing import ClassVar

import numpy as np

from commlib.reducers.base import Outcome, Reducer
from commlib.topology import Topology
from commlib.vectors import Float32, partition


class Dense(Reducer):
    """A ring: ``P − 1`` steps that add up, ``P − 1`` that hand round; ``2·d·(P − 1)/P`` values a rank.

    The ring goes through one node after the other: ``m`` of its ``P`` links lie between nodes. Each part is
    added up in the order of the ring, so the sum does not depend on MPI's choice of algorithm.
    """

    sparse: ClassVar[bool] = False

    def __init__(self, topology: Topology, size: int) -> None:
        super().__init__(topology, size)
        world_size = topology.world.size
        ring = [rank for node in topology.nodes for rank in node]
        self._place = ring.index(topology.world.rank)
        self._left, self._right = ring[self._place - 1], ring[(self._place + 1) % world_size]
        self._bounds = partition(size, world_size)

    def _reduce(self, gradient: Float32) -> Outcome:
        world, link = self.topology.world, self.topology.slowest_link
        mean = gradient.copy()
        parts = np.split(mean, self._bounds[1:-1])
        arriving = np.empty(max(map(len, parts)), np.float32)
        for step in range(world.size - 1):
            into = parts[(self._place - step - 1) % world.size]
            with self.measure(link):
                self._pass_on(parts[(self._place - step) % world.size], arriving[: len(into)])
            with self.measure("combine"):
                np.add(arriving[: len(into)], into, out=into)
        complete = parts[(self._place + 1) % world.size]
        with self.measure("combine"):
            complete /= np.float32(world.size)
            finite = bool(np.isfinite(complete).all())
        if self.agree(finite) is None:
            return Outcome(None)
        with self.measure(link):
            for step in range(world.size - 1):
                own = parts[(self._place + 1 - step) % world.size]
                self._pass_on(own, parts[(self._place - step) % world.size])
        return Outcome(mean, selected=self.size, applied=self.size)

    def _pass_on(self, outgoing: Float32, incoming: Float32) -> None:
        """Send to the right neighbour what came from the left one a step ago."""
        requests = []
        if len(incoming):
            requests.append(self.topology.world.receive(incoming, self._left))
        if len(outgoing):
            requests.append(self.topology.world.send(outgoing, self._right))
        for request in requests:
            request.wait()
