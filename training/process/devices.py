"""The cores and GPUs of a rank, and gradients that stay on the GPUs where NCCL can reach all of them."""

import os
from contextlib import suppress
from glob import glob

import numpy as np

from commlib import Communicator, InvalidArgument, Topology
from commlib.transport import nccl
from training.config.config import Config
from training.config.schema import ConfigurationError
from training.process.job import LocalRank
from training.process.tf_logging import import_tensorflow

VISIBLE = "CUDA_VISIBLE_DEVICES"
BETWEEN = {"auto": "nccl", "nccl": "nccl", "nccl+mpi": "mpi"}


def see_own_gpu(local_rank: LocalRank) -> None:
    """Make one GPU visible, by the local rank: TensorFlow and CuPy then number it equally.

    It has no effect in a process that has already initialised CUDA.
    """
    given = os.environ.get(VISIBLE)
    gpus = [str(number) for number in range(gpus_here())] if given is None else given.split(",")
    if len(gpus) > 1:
        os.environ[VISIBLE] = gpus[local_rank.number % len(gpus)]


def gpus_here() -> int:
    """Return how many GPUs the driver shows to this machine or container, without initialising CUDA."""
    return len(glob("/dev/nvidia[0-9]*") or glob("/dev/dxg"))  # the latter of Linux inside Windows


def with_gpus(topology: Topology, transport: str) -> tuple[Topology, str | None]:
    """Return the topology over GPUs and NCCL, where ``transport`` (see the configuration) and ranks allow it.

    Else the given one; and, with ``auto`` and GPUs on some machine, a line with the reason, equal on all
    ranks. Collective. Raises ``ConfigurationError`` if NCCL was requested by name and cannot be used.
    """
    comm = topology.world
    if comm.arrays is not np and transport == "mpi":
        raise ConfigurationError("transport: expected nccl or auto with a topology of GPUs, got mpi")
    if comm.arrays is not np or transport == "mpi":
        return topology, None
    there = any(comm.allgather_objects(gpus_here() > 0))
    why = obstacle(comm) if there else "no machine has one"
    if why is None:
        return Topology(nccl.over(comm, between=BETWEEN[transport]), topology.ranks_per_node), None
    if transport != "auto":
        raise ConfigurationError(f"transport: expected GPUs that NCCL can use, got {transport}: {why}")
    return topology, f"gradients go through host memory: {why}" if there else None


def obstacle(comm: Communicator) -> str | None:
    """Return why gradients cannot stay on the GPUs of all ranks, the same on all of them, or ``None``."""
    gpus = comm.allgather_objects(_seen_by_tensorflow())
    if 0 in gpus:
        return f"TensorFlow sees no GPU on rank {gpus.index(0)}"
    if (why := nccl.obstacle(comm)) is not None:
        return why
    alike = comm.allgather_objects(_are_numbered_alike())
    if all(alike):
        return None
    rank = alike.index(False)
    return f"TensorFlow and CUDA number the GPUs of rank {rank} differently: set {VISIBLE} for each"


def _seen_by_tensorflow() -> int:
    import_tensorflow()
    import tensorflow as tf

    return len(tf.config.list_physical_devices("GPU"))


def _are_numbered_alike() -> bool:
    import cupy

    from commlib.tensorflow import tensorflow_device

    try:
        tensorflow_device(cupy.cuda.Device().id)
    except InvalidArgument:
        return False
    return True


def prepare_tensorflow(config: Config, comm: Communicator, local_rank: LocalRank) -> None:
    """Share cores and GPUs between the ranks of this machine, and seed."""
    import keras
    import tensorflow as tf

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


def _share_cores(local_rank: LocalRank, *, overlap: bool) -> None:
    """Give TensorFlow this rank's share of the cores, unless its number of threads is set.

    With a single thread for operations, TensorFlow runs those that submit gradients last of all: ``overlap``
    needs another one, which is idle but for them.
    """
    import tensorflow as tf

    threading, threads = tf.config.threading, local_rank.threads
    for variable, set_threads, number in (
        ("TF_NUM_INTRAOP_THREADS", threading.set_intra_op_parallelism_threads, threads),
        ("TF_NUM_INTEROP_THREADS", threading.set_inter_op_parallelism_threads, max(threads, 1 + overlap)),
    ):
        # Raised if TensorFlow is already initialised in this process, with its threads.
        with suppress(RuntimeError):
            if variable not in os.environ:
                set_threads(number)
