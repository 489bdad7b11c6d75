"""A reducer of one's own: it averages signs of the gradient, and keeps what they leave out for later steps.

mpirun -np 4 python examples/own_reducer.py      (needs: pip install .)

A configuration names it by its import path: ``reducer: {name: "examples.own_reducer:Signs"}``.
"""

import numpy as np

import commlib
from commlib.reducers.dense import Dense


class Signs(Dense):
    """Sends ``±s`` for each entry; ``s`` is the mean magnitude on the rank (signSGD with error feedback)."""

    def __init__(self, topology, size):
        super().__init__(topology, size)
        self.held = self.arrays.zeros(size, "float32")

    def _reduce(self, gradient, buffer):
        total = gradient + self.held
        sent = np.copysign(np.float32(abs(total).mean()), total)
        self.held_next = total - sent
        return super()._reduce(sent, buffer)

    def _commit(self):
        self.held = self.held_next

    @property
    def residual(self):
        """What this rank has not sent: float32 of shape ``(size,)``."""
        return self.held.copy()


if __name__ == "__main__":
    topology = commlib.Topology(commlib.transport.mpi.world())
    rank, size = topology.world.rank, 300
    truth = np.random.default_rng(1).normal(size=size)
    rows = np.random.default_rng(2 + rank).normal(size=(500, size)) / np.sqrt(500)
    weights = np.zeros(size)
    with Signs(topology, size) as reducer:
        for _ in range(400):
            weights -= 0.1 * reducer.reduce(rows.T @ (rows @ (weights - truth)))
    print(f"rank {rank}: error {np.linalg.norm(weights - truth) / np.linalg.norm(truth):.4f}")
