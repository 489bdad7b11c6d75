"""A loop of one's own in TensorFlow, whose gradients a sparse reducer averages.

mpirun -np 2 python examples/tensorflow_loop.py      (needs: pip install '.[train]')
"""

import keras
import tensorflow as tf

import commlib
from commlib.keras import broadcast_variables
from commlib.tensorflow import DistributedGradients

topology = commlib.Topology(commlib.transport.mpi.world())
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.05)
optimizer.build(model.trainable_variables)
broadcast_variables(model.weights, topology)
gradients = DistributedGradients(topology, model.trainable_variables, {"name": "oktopk", "density": 0.25})


@tf.function
def step(inputs, targets):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(inputs) - targets) ** 2)
    means, finite = gradients.reduce(tape.gradient(loss, model.trainable_variables))
    if finite:  # no NaN and no infinity on any rank
        optimizer.apply(means, model.trainable_variables)
    return loss


for _ in range(200):
    inputs = tf.random.normal((32, 8))
    loss = step(inputs, tf.reduce_sum(inputs, axis=1, keepdims=True))
print(f"rank {topology.world.rank}: loss {loss:.4f}")
