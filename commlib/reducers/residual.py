"""Reducers with a residual: what a step does not apply is added to the next gradient (error feedback).

Those that select entries are in :mod:`commlib.reducers.sparse`.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from commlib.agreement import check_settings
from commlib.arrays import compiled, empty, is_on_gpu, memory_errors, to_host
from commlib.cost import is_doubled
from commlib.density import check_density, entries
from commlib.errors import InvalidArgument
from commlib.kernels import kernels_of
from commlib.reducers.base import Options, Reducer, check_is_bool
from commlib.reducers.layouts import Flat, Shards
from commlib.reducers.mean import AnyMeanBuffer
from commlib.reducers.messages import all_reduce_doubling
from commlib.reducers.report import Forgotten, Outcome
from commlib.topology import Topology
from commlib.vectors import Float32, SparseVector, delta, partition
from commlib.wire import Codec, Message


@dataclass(frozen=True)
class ResidualOptions(Options):
    """The share of the entries that is sent, the residual's decay, and whether nodes add up first."""

    density: float
    decay: float
    hierarchical: bool

    def __post_init__(self) -> None:
        check_density(self.density)
        check_density(self.decay, "decay")
        check_is_bool("hierarchical", self.hierarchical)


@dataclass(frozen=True)
class State:
    """State of an algorithm besides its residual; an algorithm with state derives a class."""


class ResidualReducer(Reducer):
    """A reducer that sends a share ``density`` of the entries and keeps the rest as residual, in three steps.

    Collect the vector that this rank reduces; reduce it with the ranks of ``comm``; spread the sum to all. An
    algorithm is the second step, ``_exchange``. With ``hierarchical``, the layout
    :class:`commlib.reducers.layouts.Shards`, nodes add up first, and the vector is a shard of the node's sum;
    else it is the rank's own gradient. The residual is multiplied by ``decay`` before a gradient is added;
    ``Report.forgotten`` tells what that removes.

    ``comm``, ``link``, ``length``: of the layout, see :class:`commlib.reducers.layouts.Flat`. ``k``: entries
    to send. ``state``: ``_exchange`` replaces it by a new value when a step changes it; a skipped step
    restores it. The class has more methods than others: the services that algorithms use, and a reducer's
    state.
    """

    sparse: ClassVar[bool] = True
    needs_entries: ClassVar[bool] = False
    options: ResidualOptions
    state: Any = State()
    keeps_residual: bool = True
    returns_mean: bool = False

    def __init__(
        self,
        topology: Topology,
        size: int,
        *,
        density: float = 0.01,
        decay: float = 1.0,
        hierarchical: bool = False,
    ) -> None:
        super().__init__(topology, size)
        if self.needs_entries and self.arrays is not np:
            raise InvalidArgument(f"reducer: {type(self).__name__} takes arrays in host memory, got a GPU's")
        self.options = ResidualOptions(density, decay, hierarchical)
        self.kernels = kernels_of(self.arrays)
        # Final sums travel without loss: no rank could keep the rounding errors.
        self.codec = self.lossless = self.kernels.make_codec("fp32")
        layout = self.layout = (Shards if hierarchical else Flat)(topology, self.size)
        self.comm, self.link, self.length = layout.comm, layout.link, layout.length
        self.k = entries(density, self.length)
        self._forgotten = Forgotten()  # in the step that is under way
        self._encoded = 0  # messages of the step that is under way
        self._buffer: AnyMeanBuffer | None = None  # for the mean of that step
        self._state_before = self.state
        kept = self.length if self.keeps_residual else 0
        with memory_errors(self):
            self._residual = self.arrays.zeros(kept, np.float32)
            self._spare = self.arrays.empty(kept, np.float32)  # the next residual is made in it

    @property
    def density(self) -> float:
        """The density of the next step."""
        return self.options.density

    def set_density(self, density: float) -> None:
        """Select another share of the entries from the next step on; the residual stays as it is.

        All ranks call it between the same two steps; a rank that did not is found in the next one.
        """
        self.options = replace(self.options, density=density)
        self._shared = None
        self.k = entries(self.density, self.length)

    def _reduce(self, gradient: Float32 | SparseVector, buffer: AnyMeanBuffer) -> Outcome:
        self._encoded, self._buffer = 0, buffer
        self._forgotten, self._state_before = Forgotten(), self.state
        combined, selected = SparseVector.empty(0, self.arrays), 0
        collected = self.layout.collect(self, gradient)
        if self.length or not self.needs_entries:
            combined, selected = self._exchange(collected)
        if self.needs_entries:  # ranks without a shard wait here: the others, too, before the node's exchange
            self.wait_for_comparison()
        self._buffer = None
        outcome = self.layout.spread(self, combined, selected, buffer)
        return replace(outcome, forgotten=self._forgotten)

    @abstractmethod
    def _exchange(self, collected: Any) -> tuple[SparseVector, int]:
        """Return the sum of what the ranks of ``comm`` apply, and how many entries this rank selected.

        With ``returns_mean``, the mean over all ranks of the world in its place, or ``non_finite``.
        ``collected``: this rank's vector of ``length`` entries. What is not applied of it and of the residual
        has to be in ``_spare``, the next residual if this step counts. Where some rank's vector is not
        finite, the sum on all of them has to hold a NaN, at any index. The caller overwrites its values.
        With ``needs_entries`` it is not called on ranks without a shard, which uneven nodes have; such an
        algorithm calls ``wait_for_comparison``, before messages whose lengths could differ.
        """

    def accumulate(self, collected: Float32) -> Float32:
        """Return ``e + g``, the gradient with the residual, in the memory of the next residual."""
        residual = self._decayed()
        with self.measure("select"):
            total: Float32 = np.add(collected, residual, out=self._spare)
        return total

    def _decayed(self) -> Float32:
        """Return ``β·e`` of the residual ``e``."""
        if self.options.decay == 1:
            return self._residual
        kept: Float32 = self.workspace.get("decayed", self.length)
        with self.measure("select"):
            self._forgotten = decayed(self._residual, self.options.decay, out=kept)
        return kept

    def _commit(self) -> None:
        self._residual, self._spare = self._spare, self._residual

    def _discard(self) -> None:
        self.state = self._state_before

    def all_reduce(self, vector: Float32) -> Float32:
        """Return the sum of a vector over the ranks of ``comm``, to the bit the same on all of them.

        In ``2·⌈log₂ P⌉`` rounds; if it is long, or ranks share a node and its card, round a ring in
        ``2·(P − 1)`` hops. The sum is in the workspace, until the next ``all_reduce``.
        """
        with self.measure(self.link):
            if self.layout.is_spread and is_doubled(len(vector), self.comm.size):
                return all_reduce_doubling(self.comm, vector, self.workspace)
            cuts = partition(len(vector), self.comm.size)[1:-1]
            sums: Float32 = self.workspace.get("sums", len(vector))
            self.layout.ring.allreduce(np.split(vector, cuts), np.split(sums, cuts), lambda total: None)
        return sums

    def sum_sparse(self, vectors: Sequence[SparseVector], at: int = 0) -> SparseVector:
        """Return the sum, in order, of vectors whose index 0 is entry ``at`` of the own range.

        The sum is valid until the next ``sum_sparse`` of this step. A dense sum lies in the memory of the
        mean: if it is the first of the vectors, the others are added to it in place.
        """
        return self.kernels.sum_sparse(
            vectors, dense=lambda size: self.part_of_mean(at, size), allocate=self.workspace.get
        )

    def part_of_mean(self, at: int, size: int) -> Float32:
        """Return the part of the mean's memory that begins at ``at`` of the own range, uninitialized.

        On a GPU, where sums are made apart from each other, it is a new array.
        """
        if self.arrays is not np:
            return empty(size, self.arrays)
        low = self.layout.low + at
        assert self._buffer is not None, "a step is under way"
        return self._buffer.dense()[low : low + size]

    def clear_mean(self) -> None:
        """Clear the mean's memory while messages are on their way, unless the sum of all may be dense."""
        assert self._buffer is not None, "a step is under way"
        if self.comm.size * self.k < delta(self.length):
            with self.measure("combine"):
                self._buffer.clear()

    def drop(self, vector: SparseVector, at: int = 0) -> None:
        """Keep the entries of ``vector``, which begins at ``at`` of the own range, for a later step."""
        assert self.keeps_residual or not vector.nnz, "where all is sent there is no residual"
        vector.add_to(self._spare[at : at + vector.size])  # which is the next residual if this step counts

    def take_off(self, vector: SparseVector, at: int = 0) -> None:
        """Subtract entries that other ranks apply from the entries that ``drop`` keeps."""
        vector.subtract_from(self._spare[at : at + vector.size])

    def encode(
        self, vector: SparseVector, at: int = 0, *, codec: Codec | None = None, keeps: bool = True
    ) -> Message:
        """Return the message for ``vector``, which begins at ``at`` of the own range, in the reducer's codec.

        With ``keeps`` the rounding error goes to the next residual; where several ranks encode the same
        vector, one of them keeps it. The message may share the memory of a dense vector.
        """
        codec = codec or self.codec
        with self.measure("combine"):
            message = (
                codec.encode(vector, self._message_buffer) if self.arrays is np else codec.encode(vector)
            )
            if keeps and not codec.lossless:
                self.drop(vector, at)
                self.take_off(codec.decode(message, vector.size), at)
        return message

    def _message_buffer(self, length: int) -> Message:
        """Return memory for a message, shared with no other message of this step."""
        self._encoded += 1
        message: Message = self.workspace.get(f"encoded {self._encoded}", length, np.uint8)
        return message

    @property
    def residual(self) -> Float32:
        residual = super().residual
        if self.keeps_residual:
            residual[self.layout.low : self.layout.low + self.length] += self._residual
        return residual

    def state_dict(self) -> dict[str, Any]:
        # The residual has the entries low … low + length − 1.
        own = {"low": self.layout.low, "residual": to_host(self._residual.copy())}
        return super().state_dict() | asdict(self.state) | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_settings(state["settings"], self.settings())
        if state["residual"].shape != self._residual.shape:
            found, expected = len(state["residual"]), len(self._residual)
            raise InvalidArgument(f"state: a residual of {found} entries, this rank's has {expected}")
        super().load_state_dict(state)
        own = {field.name: copy(state[field.name]) for field in fields(self.state)}
        self.state = replace(self.state, **own)
        self._residual = self.arrays.array(state["residual"], np.float32)


LANES = 16  # sums that do not wait for each other


def decayed(residual: Float32, decay: float, out: Float32) -> Forgotten:
    """Write ``decay·residual`` to ``out``; return what the decay removed from the residual."""
    np.multiply(residual, np.float32(decay), out=out)
    if is_on_gpu(residual):
        lacking = residual.astype(np.float64) - out
        total, squares = float(lacking.sum()), float((lacking * lacking).sum())
    else:
        total, squares = _sums(residual, out)
    return Forgotten(math.sqrt(squares), total)


@compiled
def _sums(residual: Float32, kept: Float32) -> tuple[float, float]:
    """Return the sum of ``residual - kept`` and the sum of its squares."""
    totals, squares = np.zeros(LANES), np.zeros(LANES)
    for first in range(0, len(residual), LANES):
        for i in range(first, min(first + LANES, len(residual))):
            lacking = np.float64(residual[i]) - np.float64(kept[i])
            totals[i - first] += lacking
            squares[i - first] += lacking * lacking
    return totals.sum(), squares.sum()
