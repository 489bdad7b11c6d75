"""TensorFlow, Keras and Horovod, made ready in a process of a run."""

import os
from contextlib import suppress
from importlib.util import find_spec

import keras
import tensorflow as tf

from commlib import Communicator
from training.config.config import Config
from training.config.schema import ConfigurationError
from training.process.devices import see_own_gpu
from training.process.job import LocalRank

# pip alone cannot: it would build it without the TensorFlow and MPI that it is compiled against
INSTALL_HOROVOD = "run ./scripts/install.sh of a clone, or see scripts/build_horovod.sh there"


def prepare_tensorflow(config: Config, comm: Communicator, local_rank: LocalRank) -> None:
    """Share cores and GPUs between the ranks of this machine, seed, and look for Horovod."""
    see_own_gpu(local_rank)
    _share_cores(local_rank, overlap=config.overlap and comm.size > 1)
    if gpus := tf.config.list_physical_devices("GPU"):
        own = gpus[local_rank.number % len(gpus)]
        tf.config.set_visible_devices(own, "GPU")
        tf.config.experimental.set_memory_growth(own, True)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    # Random numbers differ between ranks; weights are broadcast.
    keras.utils.set_random_seed(config.seed + comm.rank)
    if comm.size > 1 and find_spec("horovod") is None:
        raise ConfigurationError(f"expected Horovod for {comm.size} ranks, found none: {INSTALL_HOROVOD}")


def _share_cores(local_rank: LocalRank, *, overlap: bool) -> None:
    """Give TensorFlow this rank's share of the cores, unless its number of threads is set.

    With a single thread for operations, TensorFlow runs those that submit gradients last of all: ``overlap``
    needs another one, which is idle but for them.
    """
    threading, threads = tf.config.threading, local_rank.threads
    for variable, set_threads, number in (
        ("TF_NUM_INTRAOP_THREADS", threading.set_intra_op_parallelism_threads, threads),
        ("TF_NUM_INTEROP_THREADS", threading.set_inter_op_parallelism_threads, max(threads, 1 + overlap)),
    ):
        # Raised if TensorFlow is already initialised in this process, with its threads.
        with suppress(RuntimeError):
            if variable not in os.environ:
                set_threads(number)
