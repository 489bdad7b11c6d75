"""``model.fit`` on several ranks, with a sparse reducer in the optimizer.

mpirun -np 2 python examples/keras_fit.py      (needs: pip install '.[train]')
"""

import keras
import numpy as np

import commlib
from commlib.keras import DistributedOptimizer, default_callbacks

topology = commlib.Topology(commlib.transport.mpi.world())
rank = topology.world.rank
keras.utils.set_random_seed(rank)  # dropout differs by rank; the callbacks broadcast rank 0's weights
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
optimizer = DistributedOptimizer(keras.optimizers.Adam(0.05), topology, {"name": "hitopk", "density": 0.25})
model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
inputs = np.random.default_rng(rank).normal(size=(3200, 8))
targets = inputs.sum(axis=1, keepdims=True)
model.fit(inputs, targets, batch_size=32, epochs=2, verbose=0, callbacks=default_callbacks())
print(f"rank {rank}: weights {model.weights[0].numpy().ravel().round(2)}")
