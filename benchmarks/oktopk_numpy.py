"""Ok-Topk's algorithm 1 in plain NumPy, line by line: the peer of the reducer ``oktopk``.

python -m benchmarks.oktopk_numpy [--json]   # processor time of both, on simulated ranks
"""

import sys

import numpy as np
import numpy.typing as npt

from commlib import Topology
from commlib.arrays import Array
from commlib.density import entries
from commlib.reducers import Outcome, Reducer
from commlib.reducers.mean import MeanBuffer
from commlib.vectors import Float32, partition
from training.bench.record import report
from training.bench.reducers import CPU, Candidate, Options, Plan, measure, table_of

REPARTITION_EVERY, REEVALUATE_EVERY = 64, 32  # τ and τ′
IMBALANCE = 4

Index = npt.NDArray[np.int32]


class PlainOkTopK(Reducer):
    """Algorithms 1 and 2 of Ok-Topk (Li and Hoefler 2022), right but not tuned; for sizes below 2³¹."""

    sparse = True

    def __init__(self, topology: Topology, size: int, *, density: float) -> None:
        self._k = entries(density, size)
        self._residual = np.zeros(size, np.float32)
        self._local_threshold = self._global_threshold = np.float32(0)
        self._bounds = partition(size, topology.world.size)
        super().__init__(topology, size)

    @property
    def residual(self) -> Float32:
        """See :attr:`Reducer.residual`."""
        return super().residual + self._residual

    def _reduce(self, gradient: Float32, buffer: MeanBuffer) -> Outcome:
        accumulated = self._residual + gradient
        magnitudes = np.abs(accumulated)
        is_due = self.steps % REEVALUATE_EVERY == 0
        if is_due:
            self._local_threshold = _kth_largest(magnitudes, self._k)
        local = np.flatnonzero(magnitudes >= self._local_threshold).astype(np.int32)
        if self.steps % REPARTITION_EVERY == 0:
            self._bounds = self._repartition(local)
        indices, values = self._split_and_reduce(accumulated, local)
        if is_due:
            gathered = self._allgather(np.abs(values))
            self._global_threshold = _kth_largest(gathered, self._k)
        is_selected = np.abs(values) >= self._global_threshold
        indices, values = self._balance_and_allgather(indices[is_selected], values[is_selected])
        accumulated[np.intersect1d(local, indices, assume_unique=True)] = 0
        self._residual = accumulated
        mean = np.zeros(self.size, np.float32)
        mean[indices] = values / np.float32(self.topology.world.size)
        return Outcome(mean, len(local), len(indices))

    def _repartition(self, local: Index) -> npt.NDArray[np.int64]:
        """Return the mean over ranks of the bounds of equal shares of the local entries."""
        shares = partition(len(local), self.topology.world.size)[1:-1]
        inner = self.topology.world.allgather_ints([int(local[share]) for share in shares]).mean(axis=0)
        return np.array([0, *inner.astype(np.int64), self.size])

    def _split_and_reduce(self, accumulated: Float32, local: Index) -> tuple[Index, Float32]:
        """Send each region to its owner; return indices and values of the sum of this rank's."""
        comm = self.topology.world
        cuts = np.searchsorted(local, self._bounds[1:-1])
        indices = self._exchange(np.split(local, cuts))
        values = self._exchange(np.split(accumulated[local], cuts))
        low, high = self._bounds[comm.rank : comm.rank + 2]
        region = np.zeros(high - low, np.float32)
        for own_indices, own_values in zip(indices, values, strict=True):
            np.add.at(region, own_indices - low, own_values)
        found = np.flatnonzero(region)
        return (found + low).astype(np.int32), region[found]

    def _balance_and_allgather(self, indices: Index, values: Float32) -> tuple[Index, Float32]:
        """Return the entries of all regions; even them out before where one rank has far too many."""
        counts = self.topology.world.allgather_ints([len(indices)])[:, 0]
        if counts.max() > IMBALANCE * counts.mean():
            rank, held = self.topology.world.rank, np.cumsum([0, *counts])
            wanted = partition(int(held[-1]), len(counts))
            cuts = np.clip(wanted, held[rank], held[rank + 1])[1:-1] - held[rank]
            indices = np.concatenate(self._exchange(np.split(indices, cuts)))
            values = np.concatenate(self._exchange(np.split(values, cuts)))
        return self._allgather(indices), self._allgather(values)

    def _exchange(self, outgoing: list[Array]) -> list[Array]:
        """Send ``outgoing[r]`` to each rank ``r``; return what they sent here."""
        comm = self.topology.world
        lengths = comm.alltoall_ints([len(each) for each in outgoing])
        incoming = [np.empty(length, outgoing[0].dtype) for length in lengths]
        comm.exchange(outgoing, incoming)
        return incoming

    def _allgather(self, own: Array) -> Array:
        comm = self.topology.world
        parts = [np.empty(length, own.dtype) for length in comm.allgather_ints([len(own)])[:, 0]]
        comm.allgather(own, parts)
        return np.concatenate(parts)


def _kth_largest(magnitudes: Float32, k: int) -> np.float32:
    k = min(k, len(magnitudes))
    return np.partition(magnitudes, -k)[-k] if k else np.float32(0)


def main() -> int:
    """Print the record of ``oktopk`` beside the transcription; return the exit status."""
    options = Options(
        size=14_728_266, reducers=["oktopk"], steps=8
    )  # VGG-16, which Ok-Topk was published with
    records = measure(Plan.of(options, None, CPU), Candidate("oktopk_numpy", kind=PlainOkTopK))
    return report([records], as_json="--json" in sys.argv, show=lambda each: table_of(each).print())


if __name__ == "__main__":
    sys.exit(main())
