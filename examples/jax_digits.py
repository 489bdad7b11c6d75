"""Handwritten digits with JAX and optax: two percent of the gradient for four epochs, then all of it.

mpirun -np 4 python examples/jax_digits.py      (needs: pip install '.[jax]' optax scikit-learn)
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import commlib
from commlib.jax import DistributedGradients, broadcast

topology = commlib.Topology(commlib.transport.mpi.world(), ranks_per_node=2)
rank, ranks = topology.world.rank, topology.world.size

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
order = np.random.default_rng(1).permutation(len(images))
train, test = order[:1500], order[1500:]


def initial(key):
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (64, 256)) / 8,
        "bias": jnp.zeros(256),
        "logits": jax.random.normal(second, (256, 10)) / 16,
    }


def logits_of(parameters, inputs):
    return jax.nn.relu(inputs @ parameters["hidden"] + parameters["bias"]) @ parameters["logits"]


def loss(parameters, inputs, targets):
    logits = logits_of(parameters, inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


gradient_of = jax.jit(jax.grad(loss))
optimizer = optax.sgd(0.1, momentum=0.9)


@jax.jit
def update(parameters, state, mean):
    changes, state = optimizer.update(mean, state)
    return optax.apply_updates(parameters, changes), state


parameters = broadcast(initial(jax.random.key(rank)), topology)
state = optimizer.init(parameters)
gradients = DistributedGradients(parameters, topology, {"name": "hitopk", "density": 0.02})
for epoch in range(6):
    if epoch == 4:
        gradients.switch({"name": "dense"})  # its first step sends what was held back
    sent = 0
    shuffled = np.random.default_rng(epoch).permutation(train)
    for batch in np.split(shuffled[: len(shuffled) // 60 * 60], len(shuffled) // 60):
        own = batch[rank::ranks]  # each rank takes its part of a batch
        mean = gradients.reduce(gradient_of(parameters, images[own], labels[own]))
        if gradients.finite:
            parameters, state = update(parameters, state, mean)
        sent += gradients.report.traffic.sent.inter
    right = np.mean(np.argmax(logits_of(parameters, images[test]), 1) == labels[test])
    if rank == 0:
        print(f"epoch {epoch + 1}: accuracy {right:.3f}, {sent:,} bytes from rank 0 to the other node")

gradients.close()
