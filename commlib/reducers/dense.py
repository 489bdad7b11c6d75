"""Dense all-reduce: every entry, every step. The baseline that the others are measured against."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from commlib.arrays import Array
from commlib.cost import Cost, LinkSeconds, Step, ring_traffic
from commlib.kernels import kernels_of
from commlib.reducers.base import Options, Reducer
from commlib.reducers.levels import LevelMean, addable_codec, rings
from commlib.reducers.mean import MeanBuffer
from commlib.reducers.report import Outcome
from commlib.topology import LinkBytes, Topology
from commlib.transport.base import Ring
from commlib.vectors import VALUE_BYTES, Float32, is_finite, partition
from commlib.work import Work

ROUNDING_PASSES = 26  # to rotate three times, round and restore; measured, as multiples of an addition


def _traffic(step: Step, rank: int) -> LinkBytes:
    """``2·d·(P − 1)/P`` values, all to the next rank of the ring: between nodes for a node's last rank."""
    exchanged = rings(step.options["values"], step.size, step.ranks)
    return sum((ring_traffic(step.nodes, rank, *each) for each in exchanged), LinkBytes())


def _seconds(step: Step) -> LinkSeconds:
    """``2·(P − 1)·(α + d/P·β)``, the ring (gTop-k, equation 5), at the pace of its slowest link."""
    exchanged = rings(step.options["values"], step.size, step.ranks)
    return step.on_slowest_link(sum(step.ring_allreduce(n * width / VALUE_BYTES) for n, width in exchanged))


def _work(step: Step) -> Work:
    """Add up ``P − 1`` parts of ``P``; divide the last one and test whether it is finite."""
    size, rounds = step.world.size, addable_codec(step.options["values"]) is not None
    return Work(add=step.size * ((size + 1) / size + ROUNDING_PASSES * rounds))


def make_mean(reducer: Reducer, total: Float32) -> None:
    """Divide a piece of the sum by the number of ranks, and mark a piece that is not finite.

    The mark is a NaN in the first entry, which every rank that receives the piece can check.
    """
    with reducer.measure("combine"):
        total /= np.float32(reducer.topology.world.size)
        if not is_finite(total):
            total[0] = np.nan


@dataclass(frozen=True)
class DenseOptions(Options):
    """``values``: the codec that rounds."""

    values: str


class Dense(Reducer):
    """A ring: ``P − 1`` hops of reduce-scatter and ``P − 1`` of all-gather; ``2·d·(P − 1)/P`` values a rank.

    The ring goes through one node after the other: ``m`` of its ``P`` links lie between nodes. Each part is
    added up in the order of the ring, so the sum does not depend on MPI's choice of algorithm.

    ``values``: ``fp32``, or ``hadamard8`` or ``hadamard4``, whose levels the ring adds up instead. A value is
    then rounded once, by its sender, and the error is the sender's residual. A single rank rounds nothing.
    """

    sparse: ClassVar[bool] = False
    cost = Cost(_traffic, _seconds, _work, is_exact=True)

    def __init__(self, topology: Topology, size: int, *, values: str = "fp32") -> None:
        super().__init__(topology, size)
        self._levels: LevelMean | None = None
        codec = addable_codec(values)
        if codec is not None:  # settings without it are those of checkpoints from before it
            self.options = DenseOptions(values)
            kernels_of(self.arrays).make_codec(values)  # which refuses those that a GPU has not
            if topology.world.size > 1:
                self._levels = LevelMean(self, codec, self._all_reduce)
        self._ring = Ring(topology.world, [rank for node in topology.nodes for rank in node])
        firsts = self._ring.first_entries(partition(size, topology.world.size))
        self._first_entries = self.arrays.asarray(firsts)  # of the pieces

    def _reduce(self, gradient: Float32, buffer: MeanBuffer) -> Outcome:
        mean = buffer.dense()
        if self._levels is not None:
            finite = self._levels.make(gradient, mean)
        else:
            self._all_reduce(gradient, mean, finish=partial(make_mean, self))
            finite = not np.isnan(mean[self._first_entries]).any()
        return Outcome(mean, selected=self.size, applied=self.size) if finite else Outcome(None)

    def _all_reduce(
        self,
        given: Array,
        sums: Array,
        add: np.ufunc = np.add,
        finish: Callable[[Array], None] = lambda total: None,
    ) -> None:
        cuts = partition(len(given), self.topology.world.size)[1:-1]
        with self.measure(self.topology.slowest_link):
            self._ring.allreduce(np.split(given, cuts), np.split(sums, cuts), finish, add)

    def _commit(self) -> None:
        if self._levels is not None:
            self._levels.commit()

    @property
    def residual(self) -> Float32:
        """See :attr:`Reducer.residual`: with values that are rounded, what this rank has rounded away."""
        return super().residual + (self._levels.residual if self._levels is not None else 0)

    def state_dict(self) -> dict[str, Any]:
        own = {} if self._levels is None else {"residual": self._levels.residual.copy()}
        return super().state_dict() | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._levels is not None:
            self._levels.residual = np.array(state["residual"], np.float32)
