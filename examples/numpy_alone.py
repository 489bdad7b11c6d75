"""Least squares with NumPy alone: ranks hold different rows, and send one entry in twenty of their gradients.

mpirun -np 4 python examples/numpy_alone.py      (needs: pip install .)
"""

import numpy as np

import commlib

topology = commlib.Topology(commlib.transport.mpi.world(), ranks_per_node=2)
rank, size = topology.world.rank, 1000
truth = np.random.default_rng(1).normal(size=size)
rows = np.random.default_rng(2 + rank).normal(size=(2000, size)) / np.sqrt(2000)
targets = rows @ truth

weights, sent = np.zeros(size), 0
with commlib.make_reducer("hitopk", topology, size, density=0.05) as reducer:
    for _ in range(300):
        gradient = rows.T @ (rows @ weights - targets)
        weights -= 0.1 * reducer.reduce(gradient)
        sent += reducer.last.traffic.sent.inter
error = np.linalg.norm(weights - truth) / np.linalg.norm(truth)
print(f"rank {rank}: error {error:.4f}, {sent:,} bytes sent to the other node")
