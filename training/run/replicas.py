"""The model replicas of the ranks: assigned, broadcast, synchronized.

Only Horovod's low-level operations: its wrappers of tapes and optimizers expect Keras 2. One rank needs none.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from commlib import Communicator


def assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Assign values to as many variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def broadcast_weights(model: Any, comm: Communicator) -> None:
    """Broadcast the weights of rank 0.

    Weights, not all variables: the states of random generators must differ between ranks.
    """
    if comm.size == 1:
        return
    import horovod.tensorflow as hvd

    hvd.broadcast_variables([variable.value for variable in model.weights], 0)


def average_statistics(model: Any, comm: Communicator) -> None:
    """Average the BatchNormalization statistics over all ranks."""
    statistics = model.non_trainable_weights
    if not statistics or comm.size == 1:
        return
    import horovod.tensorflow as hvd

    flat = tf.concat([tf.reshape(variable.value, [-1]) for variable in statistics], axis=0)
    mean = hvd.allreduce(flat, op=hvd.Average)
    sizes = [int(np.prod(variable.shape)) for variable in statistics]
    for variable, part in zip(statistics, tf.split(mean, sizes), strict=True):
        variable.assign(tf.reshape(part, variable.shape))
