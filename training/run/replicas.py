"""The model replicas of the ranks: assigned, broadcast, synchronized.

Only Horovod's low-level operations: its wrappers of tapes and optimizers expect Keras 2. One rank needs none.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from commlib import Communicator


def assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Assign values to as many variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


@contextmanager
def running_horovod(comm: Communicator) -> Iterator[Any]:
    """Start Horovod for the block, unless it runs already, and yield it; collective.

    Its thread meets those of all ranks each millisecond, and waits for them in a busy loop: where ranks share
    cores, that takes up to two thirds of one. It starts and ends in milliseconds.
    """
    import horovod.tensorflow as hvd

    if hvd.is_initialized():
        yield hvd
        return
    hvd.init()
    if (hvd.rank(), hvd.size()) != (comm.rank, comm.size):
        raise RuntimeError(
            f"rank {comm.rank} of {comm.size} in MPI is {hvd.rank()} of {hvd.size()} in Horovod"
        )
    yield hvd
    comm.barrier()  # the first rank that ends it ends it for all
    hvd.shutdown()


def broadcast_weights(model: Any, comm: Communicator) -> None:
    """Broadcast the weights of rank 0.

    Weights, not all variables: the states of random generators must differ between ranks.
    """
    if comm.size == 1:
        return
    with running_horovod(comm) as hvd:
        hvd.broadcast_variables([variable.value for variable in model.weights], 0)


def average_statistics(model: Any, comm: Communicator) -> None:
    """Average the BatchNormalization statistics over all ranks."""
    statistics = model.non_trainable_weights
    if not statistics or comm.size == 1:
        return
    flat = tf.concat([tf.reshape(variable.value, [-1]) for variable in statistics], axis=0)
    with running_horovod(comm) as hvd:
        mean = hvd.allreduce(flat, op=hvd.Average)
    sizes = [int(np.prod(variable.shape)) for variable in statistics]
    for variable, part in zip(statistics, tf.split(mean, sizes), strict=True):
        variable.assign(tf.reshape(part, variable.shape))
