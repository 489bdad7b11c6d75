"""The newer reducers against their authors' published code, in NumPy: python -m benchmarks.authors.

Each class does what the authors' code does in a step, with NumPy's function for each of PyTorch's: ``topk``
is ``argpartition``, ``where`` is ``flatnonzero``, ``cat`` is ``concatenate``. The copies, and the vectors
allocated in each step, are theirs; their timers and counts of bits are left out. Messages go over the
transport and the rings of this package, on simulated ranks.

``powersgd`` has the rank 4, the largest in its paper: the matrix's rank by density would be 19.

The processor time of the ranks' threads is measured, the mean of all ranks. ``OMP_NUM_THREADS=1`` has to be
set: work in threads of a BLAS would not be counted, and a reducer that uses it would look faster.
"""

import argparse
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from commlib import Communicator, Topology, make_reducer
from commlib.reducers import arctopk, powersgd
from commlib.reducers.spardl import rounds_of
from commlib.transport import simulated
from commlib.transport.base import Ring
from commlib.tuning.probe import Gradients
from commlib.vectors import Float32, Index, partition
from training.bench.record import WARM_UP_RUNS, Record, Seconds, against_baseline, report

SIZE = 14_728_266  # VGG-16, which Ok-Topk and SparDL were published with
DENSITY, RANKS, STEPS = 0.01, 4, 7
OPTIONS = {"powersgd": {"matrix_rank": 4}}
Entries = tuple[Index, Float32]


class Peer(ABC):
    """The authors' code of one reducer on one rank; ``memory``: what it has not sent yet."""

    def __init__(self, comm: Communicator, size: int, density: float) -> None:
        self.comm, self.size, self.density = comm, size, density
        self.memory = np.zeros(size, np.float32)
        self.counted = 0

    @abstractmethod
    def step(self, gradient: Float32) -> Float32:
        """Return the mean of all ranks; ``gradient`` may be overwritten, as PyTorch's buckets are."""

    def all_reduce(self, vector: Float32) -> Float32:
        total, cuts = np.empty_like(vector), partition(len(vector), self.comm.size)[1:-1]
        given, sums = np.split(vector, cuts), np.split(total, cuts)
        Ring(self.comm, range(self.comm.size)).allreduce(given, sums, lambda piece: None)
        return total


class ExDyna(Peer):
    """Yoon and Oh 2024 (arXiv 2402.13781): ``ExDynaReducer`` of github.com/kljp/exdyna.

    ``threshold``: of the latest step. ``blocks`` and ``first``: how many a partition has, and its first one.
    """

    BLOCKS = 1024

    def __init__(self, comm: Communicator, size: int, density: float) -> None:
        super().__init__(comm, size, density)
        self.send_buffer = np.empty(size, np.float32)
        whole, ranks = size // self.BLOCKS, comm.size
        self.block = whole - whole % 32
        self.blocks = [self.BLOCKS // ranks + (each < self.BLOCKS % ranks) for each in range(ranks)]
        self.first = np.cumsum([0, *self.blocks[:-1]]).tolist()
        self.threshold = 0.0
        self.found: list[int] = []

    def step(self, gradient: Float32) -> Float32:
        comm, ranks = self.comm, self.comm.size
        self.send_buffer[:] = gradient + self.memory
        flat = np.concatenate([self.send_buffer])  # of the list of all tensors
        if self.counted:
            self._balance()
        self._scale()
        place = (self.counted + comm.rank) % ranks
        low, high = (
            block * self.block for block in (self.first[place], self.first[place] + self.blocks[place])
        )
        if place == ranks - 1:
            high = self.size
        indices = np.flatnonzero(np.abs(flat[low:high]) >= self.threshold)
        if len(indices) == 0:
            indices = np.zeros(1, np.int64) + self.counted % (high - low)
        indices += low
        self.found = comm.allgather_ints([len(indices)])[:, 0].tolist()
        most = max(self.found)
        if len(indices) != most:
            indices = np.concatenate((indices, np.empty(most - len(indices), np.int64)))
        gathered = [np.empty_like(indices) for _ in range(ranks)]
        gathered[comm.rank][:] = indices
        Ring(comm, range(ranks)).allgather(gathered)
        union = np.concatenate([each[:count] for each, count in zip(gathered, self.found, strict=True)])
        values = self.all_reduce(flat[union])
        self.counted += 1
        mean = np.zeros_like(flat)
        mean[union] = values / np.float32(ranks)
        flat[union] = 0
        self.memory = flat
        return mean

    def _scale(self) -> None:
        wanted = int(self.density * self.size)
        if not self.counted:
            self.threshold = self.threshold or 1 / (2 * wanted**0.5)
            return
        share = sum(self.found) / wanted
        self.threshold *= 1.005 if share > 1.1 else 1.00125 if share > 0.909 else 0.995

    def _balance(self) -> None:
        """Move a block from a partition that found many entries to its neighbour that found few."""
        ranks, found = self.comm.size, [0] * self.comm.size
        for rank in range(ranks):
            found[(self.counted - 1 + rank) % ranks] = self.found[rank]
        mean = int(sum(self.found) / ranks)
        moved = int(self.block * sum(self.found) / self.size)
        for left in range(ranks - 1):
            shares = found[left] / mean, found[left + 1] / mean
            for giver, taker, shift in ((left, left + 1, -1), (left + 1, left, 1)):
                is_uneven = shares[giver - left] > 1.05 and shares[taker - left] < 0.95238
                if is_uneven and self.blocks[giver] - 1 >= self.BLOCKS / (4 * ranks):
                    self.blocks[giver] -= 1
                    self.blocks[taker] += 1
                    self.first[left + 1] += shift
                    found[giver] -= moved
                    found[taker] += moved


class SparDL(Peer):
    """Zhao et al. 2023 (arXiv 2304.00737): ``run`` in github.com/MachineLearningSystem/SparDL, with one team.

    A block travels in messages of its own, of indices and of values.
    """

    def __init__(self, comm: Communicator, size: int, density: float) -> None:
        super().__init__(comm, size, density)
        self.length = -(-size // comm.size)
        self.k = int(self.length * density)
        self.local_residual: Float32 | None = None
        # Destination, source, the block that is sent and the one that comes, of each message.
        self.rounds = [
            tuple((comm.rank + away) % comm.size for away in (distance, -distance, distance + each, each))
            for distance, blocks in rounds_of(comm.size)
            for each in range(blocks)
        ]

    def step(self, gradient: Float32) -> Float32:
        ranks, k = self.comm.size, self.k
        padding = np.zeros(self.length * ranks - self.size, np.float32)
        work = np.concatenate((gradient, padding)).reshape(ranks, -1)
        if self.local_residual is not None:
            work += self.local_residual
        residual, original = work.copy(), work.copy()
        first, *following = [*(sent for _, _, sent, _ in self.rounds), self.comm.rank]
        taken = {first: self._top(work[first], k)}
        residual[first][taken[first][0]] = 0
        for (to, source, sent, received), block in zip(self.rounds, following, strict=True):
            indices, values = self._exchange(taken[sent], to, source)
            work[received][indices.astype(np.int64)] += values
            taken[block] = self._top(work[block], k)
            residual[block] = work[block].copy()
            residual[block][taken[block][0]] = 0
        gathered = self._all_gather(self._coalesced(*taken[self.comm.rank]))
        result = np.zeros((ranks, self.length), np.float32)
        for block, (indices, values) in enumerate(gathered):
            places, mean = indices.astype(np.int64), values / np.float32(ranks)
            result[block][places] = mean
            original[block][places] = residual[block][places]
            residual[block] = original[block]
        self.local_residual = residual
        self.memory = residual.ravel()[: self.size]
        return result.ravel()[: self.size]

    def _top(self, block: Float32, k: int) -> Entries:
        magnitudes = np.abs(block)
        indices = np.argpartition(magnitudes, -k)[-k:]
        magnitudes[indices].min()  # the threshold, which is kept for a later use that there is not
        return indices.astype(np.int32), block[indices]

    def _coalesced(self, indices: Index, values: Float32) -> Entries:
        """Return sorted entries, as those of all teams are added up: here of one."""
        order = np.argsort(indices.astype(np.int64))
        ordered = indices[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        return ordered[starts], np.add.reduceat(values[order], starts)

    def _exchange(self, message: Entries, to: int, source: int) -> Entries:
        sent = [self.comm.send_message(part.view(np.uint8), to) for part in message]
        indices, values = (self.comm.receive_message(source, lambda n: np.empty(n, np.uint8)) for _ in sent)
        for request in sent:
            request.wait()
        return indices.view(np.int32), values.view(np.float32)

    def _all_gather(self, own: Entries) -> list[Entries]:
        """Return the entries of all blocks, in Bruck's rounds, a message a block."""
        ranks, rank, held = self.comm.size, self.comm.rank, [own]
        while len(held) < ranks:
            distance = len(held)
            to, source = (rank - distance) % ranks, (rank + distance) % ranks
            held += [self._exchange(each, to, source) for each in held[: ranks - distance]]
        return [held[(block - rank) % ranks] for block in range(ranks)]


class ARCTopK(Peer):
    """Xiong et al. 2025 (arXiv 2510.26709): ``group_topk_hook`` of yiran529/ARC-TopK, with ``ef14``.

    That repository holds a copy of the authors' own, Aris-ma/ARC-TopK-release, which was not there to read.
    The bucket is one matrix of rows of 512 entries and, as one of one dimension, what is left, sent whole.
    The random matrix is the one of ``arctopk``, so that both pick the same rows.
    """

    ROW, SKETCH = 512, 4

    def step(self, gradient: Float32) -> Float32:
        """See :meth:`Peer.step`; the mean is in the memory of the gradient."""
        row, ranks = self.ROW, np.float32(self.comm.size)
        gradient += self.memory
        rows = self.size // row
        matrix, rest = gradient[: rows * row].reshape(rows, row), gradient[rows * row :]
        k = max(1, int(rows * self.density))
        values_memory = np.empty(k * row + len(rest), np.float32)
        indices_memory = np.empty(k * row, np.int32)
        drawn = np.random.default_rng([arctopk.SEED, self.counted]).standard_normal(
            (self.SKETCH, row), np.float32
        )
        projected = self.all_reduce((matrix @ drawn.T).copy().ravel()).reshape(rows, -1)
        projected /= ranks
        norms = np.sum(projected**2, axis=1)
        top = np.argpartition(norms, -k)[-k:]
        indices = (top[:, None] * row + np.arange(row)).ravel()
        values_memory[: k * row] = matrix[top].ravel().copy()
        values_memory[k * row :] = rest
        indices_memory[:] = indices.astype(np.int32)
        gradient[indices] = 0
        rest[:] = 0
        self.memory[:] = gradient
        values_memory = self.all_reduce(values_memory)
        values_memory /= ranks
        gradient.fill(0)
        gradient[indices_memory.astype(np.int64)] = values_memory[: k * row]
        rest[:] = values_memory[k * row :]
        self.counted += 1
        return gradient


class PowerSGD(Peer):
    """Vogels et al. 2019 (arXiv 1905.13727): ``RankKReducer`` of github.com/epfml/powersgd, paper-code.

    With their option of a warm start, from the factors that ``powersgd`` starts with. The gradient is the one
    matrix that ``powersgd`` makes of it, and what is left is all-reduced as it is.
    """

    def __init__(self, comm: Communicator, size: int, density: float, matrix_rank: int | None = None) -> None:
        super().__init__(comm, size, density)
        (matrix,) = powersgd.matrices_of(size, density, matrix_rank, None)
        self.rows, self.columns, self.rank = matrix.rows, matrix.columns, matrix.rank
        self.send_buffer = np.empty(size, np.float32)
        drawn = np.random.default_rng(powersgd.SEED).standard_normal(self.columns * self.rank, np.float32)
        self.q = np.ascontiguousarray(drawn.reshape(self.rank, self.columns).T)
        self.p = np.empty((self.rows, self.rank), np.float32)
        self.out = np.empty(size, np.float32)

    def step(self, gradient: Float32) -> Float32:
        ranks, p, q, whole = np.float32(self.comm.size), self.p, self.q, self.rows * self.columns
        self.send_buffer[:] = gradient + self.memory
        matrix = self.send_buffer[:whole].reshape(self.rows, self.columns)
        np.matmul(matrix, q, out=p)
        p[:] = self.all_reduce(p.ravel()).reshape(p.shape)
        dense = self.all_reduce(self.send_buffer[whole:].copy())
        self._orthogonalize(p)
        np.matmul(matrix.T, p, out=q)
        q[:] = self.all_reduce(q.ravel()).reshape(q.shape)
        q /= ranks
        mean = self.out[:whole].reshape(matrix.shape)
        np.matmul(p, q.T, out=mean)
        self.memory[:whole] = (matrix - mean).ravel()
        dense /= ranks
        self.out[whole:] = dense
        return self.out

    def _orthogonalize(self, matrix: Float32) -> None:
        for column in range(matrix.shape[1]):
            own = matrix[:, column : column + 1]
            own /= np.sqrt(np.sum(own**2)) + np.float32(1e-8)
            rest = matrix[:, column + 1 :]
            rest -= np.sum(own * rest, axis=0) * own


PEERS: dict[str, type[Peer]] = {"exdyna": ExDyna, "spardl": SparDL, "arctopk": ARCTopK, "powersgd": PowerSGD}


def measure(name: str, gradients: Gradients) -> Record:
    """Return the processor time of a step of a reducer, and of its authors' code on the same gradients."""

    def body(comm: Communicator) -> list[list[float]]:
        topology, options = Topology(comm, ranks_per_node=1), OPTIONS.get(name, {})
        reducer = make_reducer(name, topology, gradients.size, density=DENSITY, **options)
        peer = PEERS[name](comm, gradients.size, DENSITY, **options)
        candidates: list[Callable[[Float32], object]] = [reducer.reduce, peer.step]
        samples: list[list[float]] = [[], []]
        for number in range(WARM_UP_RUNS + STEPS):
            for candidate, own in zip(candidates, samples, strict=True):
                gradient = gradients.of(comm.rank, number)
                if isinstance(peer, ExDyna):  # it would need hundreds of steps to find one that fits
                    peer.threshold = reducer.state.threshold
                start = time.thread_time()
                candidate(gradient)
                own.append(time.thread_time() - start)
        return samples

    of_ranks = np.mean(simulated.run(body, RANKS), axis=0)[:, WARM_UP_RUNS:]
    own, peers = (Seconds.of(each.tolist()) for each in of_ranks)
    case = {"size": gradients.size, "density": DENSITY, "ranks": RANKS, "clock": "cpu"}
    return Record("authors", case, name, own, "its authors'", peers, bytes=None)


def show(found: list[Record]) -> None:
    case = found[0].case
    title = f"{case['size']:,} entries, {case['density'] * 100:g} %, {case['ranks']} ranks"
    notes = [f"processor time of a step, mean of ranks; median of {found[0].seconds.runs} steps"]
    against_baseline(found, title, 1e3, "ms", notes).print()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error(f"OMP_NUM_THREADS: expected 1, got {os.environ.get('OMP_NUM_THREADS', 'none')}")
    gradients = Gradients(SIZE)
    found = (measure(name, gradients) for name in PEERS)
    return report([found], as_json=given.json, show=show)


if __name__ == "__main__":
    sys.exit(main())
