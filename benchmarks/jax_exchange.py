r"""The exchange of a tree of JAX arrays by ``dense``, and by a bare ``MPI.Allreduce`` of each array: seconds.

    .venv-frameworks/bin/mpirun --allow-run-as-root --bind-to none -np 2 -x OMP_NUM_THREADS=1 \
        .venv-frameworks/bin/python -m benchmarks.jax_exchange

Both begin with arrays of JAX and end with their means as arrays of JAX, in turn. Rank 0 prints a JSON object.
"""

from typing import Any

import jax
import numpy as np
from mpi4py import MPI

import commlib
from commlib.jax import DistributedGradients
from training.bench.record import Record, alternate, elapsed

STEPS = 200
SHAPES = {"w1": (1024, 2048), "b1": (2048,), "w2": (2048, 1000), "b2": (1000,)}  # 16.5 MB


def bare(gradients: dict[str, Any]) -> dict[str, Any]:
    means = {}
    for name, gradient in gradients.items():
        mean = np.empty(gradient.shape, np.float32)
        MPI.COMM_WORLD.Allreduce(np.asarray(gradient), mean)
        mean /= np.float32(MPI.COMM_WORLD.size)
        means[name] = jax.device_put(mean)
    return means


def main() -> None:
    topology = commlib.Topology(commlib.transport.mpi.world())
    world = topology.world
    rng = np.random.default_rng(world.rank)
    gradients = {
        name: jax.device_put(rng.standard_normal(shape, np.float32)) for name, shape in SHAPES.items()
    }
    ours = DistributedGradients(gradients, topology, {"name": "dense"})
    subjects = {"MPI.Allreduce": bare, "dense": ours.reduce}
    means = [jax.tree_util.tree_leaves(reduce(gradients)) for reduce in subjects.values()]
    for one, other in zip(*means, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)

    def of_slowest(reduce: Any, given: dict[str, Any]) -> float:
        world.barrier()
        seconds = elapsed(lambda each: jax.block_until_ready(reduce(each)), given)
        return max(world.allgather_objects(seconds))

    slowest = alternate(subjects, [gradients], STEPS, of_slowest)
    if world.rank == 0:
        case = {"ranks_of_nodes": [len(node) for node in topology.nodes], "size": ours.exchange.size}
        more = {"jax": jax.__version__}
        record = Record("jax_exchange", case, "dense", slowest["dense"], bytes=None, more=more)
        print(record.beside("MPI.Allreduce", slowest["MPI.Allreduce"]).line(), flush=True)


if __name__ == "__main__":
    main()
