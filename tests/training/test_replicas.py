"""Weights and statistics that Horovod makes the same on all ranks."""

from tests.launching import python_on_ranks, tail

PROGRAM = """
from types import SimpleNamespace
from commlib.transport import mpi
from training.process.tf_logging import import_tensorflow
import_tensorflow()
import horovod.tensorflow as hvd
import keras
from training.run.model import average_statistics, broadcast_weights, running_horovod

def model_of(number):
    weights = [keras.Variable([number, 1.0]), keras.Variable([[2 * number]], trainable=False)]
    return SimpleNamespace(weights=weights, non_trainable_weights=weights[1:])

comm = mpi.world()
running = []
model = model_of(float(comm.rank + 1))
broadcast_weights(model, comm)
running.append(hvd.is_initialized())
found = [variable.numpy().tolist() for variable in model.weights]
own = model_of(float(comm.rank + 1))
average_statistics(own, comm)
running.append(hvd.is_initialized())
found += [variable.numpy().tolist() for variable in own.weights]
with running_horovod(comm):
    broadcast_weights(own, comm)  # leaves it running
    running.append(hvd.is_initialized())
running.append(hvd.is_initialized())
expected = [[1.0, 1.0], [[2.0]], [comm.rank + 1.0, 1.0], [[4.0]]]
assert (found, running) == (expected, [False, False, True, False]), (found, running)
comm.barrier()
if comm.rank == 0:
    print("all as expected")
"""


def test_horovod_runs_only_while_weights_are_broadcast_and_statistics_averaged():
    done = python_on_ranks(3, PROGRAM)
    assert done.returncode == 0, tail(done)
    assert done.stdout.splitlines() == ["all as expected"]
