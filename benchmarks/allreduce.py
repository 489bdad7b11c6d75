"""The alternatives to a reducer, MPI's and Horovod's all-reduce, and the lower bound of ``hitopk``.

They are reducers, so that the same check applies to them. Their bytes are unknown: MPI does not report them.
"""

import numpy as np

from commlib import Topology
from commlib.density import entries
from commlib.errors import InvalidArgument
from commlib.reducers import Outcome, Reducer
from commlib.reducers.mean import MeanBuffer
from commlib.vectors import Float32

ENTRY_BYTES = 8  # an index and a value


class MPIAllReduce(Reducer):
    """``MPI.Allreduce`` and a division, in a buffer that the next call overwrites."""

    sparse = False

    def __init__(self, topology: Topology, size: int) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD
        self._mean = np.empty(size, np.float32)
        super().__init__(topology, size)

    def _reduce(self, gradient: Float32, buffer: MeanBuffer) -> Outcome:
        self._comm.Allreduce(gradient, self._mean)
        self._mean /= np.float32(self._comm.size)
        return Outcome(self._mean, selected=self.size, applied=self.size)


class HorovodAllReduce(Reducer):
    """``hvd.allreduce`` of a tensor that shares the gradient's memory; the mean shares the result's."""

    sparse = False

    def __init__(self, topology: Topology, size: int) -> None:
        from training.process.tf_logging import import_tensorflow

        import_tensorflow()
        import horovod.tensorflow as hvd
        import tensorflow as tf

        self._horovod, self._tensorflow = hvd, tf
        if not hvd.is_initialized():
            tf.config.threading.set_intra_op_parallelism_threads(1)
            tf.config.threading.set_inter_op_parallelism_threads(1)
            hvd.init()
        super().__init__(topology, size)

    def _reduce(self, gradient: Float32, buffer: MeanBuffer) -> Outcome:
        tensor = self._tensorflow.experimental.dlpack.from_dlpack(gradient.__dlpack__())
        mean = np.asarray(self._horovod.allreduce(tensor, op=self._horovod.Average))
        return Outcome(mean, selected=self.size, applied=self.size)


class BareExchange(Reducer):
    """The bytes of ``hitopk`` through MPI's own collectives; it computes no mean.

    Reduce-scatter in the node, all-gather of ``k/n`` random entries on the stream, all-gather of the dense
    shards in the node: the time of ``hitopk`` if selecting and adding up were free.
    """

    sparse = True

    def __init__(self, topology: Topology, size: int, *, density: float) -> None:
        counts = [len(node) for node in topology.nodes]
        if len(set(counts)) > 1:
            raise InvalidArgument(f"bare: expected as many ranks on every node, got {counts}")
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        self._node, self._stream = world.Split(topology.node_index), world.Split(topology.local_rank)
        shard = size // counts[0]  # up to n - 1 entries at the end stay where they are
        self._shard, self._spread = np.empty(shard, np.float32), np.zeros(size, np.float32)
        payload = ENTRY_BYTES * entries(density, max(1, shard))
        self._selected = np.random.default_rng(world.rank).integers(0, 256, payload, np.uint8)
        self._gathered = np.empty((len(counts), payload), np.uint8)
        super().__init__(topology, size)

    def _reduce(self, gradient: Float32, buffer: MeanBuffer) -> Outcome:
        used = len(self._shard) * self._node.size
        with self.measure("intra"):
            self._node.Reduce_scatter_block(gradient[:used], self._shard)
        with self.measure("inter"):
            self._stream.Allgather(self._selected, self._gathered)
        with self.measure("intra"):
            self._node.Allgather(self._shard, self._spread[:used])
        return Outcome(self._spread)


# Reducers reuse their buffers; MPI and Horovod allocate in each step. So peers are also measured where the C
# library retains freed memory, for the whole process, and the faster measurement counts.
KEEP_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}
# In the order of the tables. Those that compute a mean are peers; the lower bound is not one.
PEERS: dict[str, type[Reducer]] = {"mpi": MPIAllReduce, "horovod": HorovodAllReduce}
# Horovod's thread exchanges messages with all others every millisecond.
BUSY = {"horovod"}
FLOOR = "bare"
ALLREDUCES: dict[str, type[Reducer]] = {**PEERS, FLOOR: BareExchange}
