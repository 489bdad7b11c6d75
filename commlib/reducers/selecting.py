"""Sparse reducers that select and then combine: how entries are collected, dropped and spread."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from commlib.agreement import check_settings
from commlib.arrays import to_host
from commlib.density import entries
from commlib.errors import InvalidArgument
from commlib.memory import empty
from commlib.reducers.decay import decayed
from commlib.reducers.mean import AnyMeanBuffer
from commlib.reducers.memory_errors import memory_errors
from commlib.reducers.report import Forgotten, Outcome
from commlib.reducers.sparse import SparseReducer
from commlib.topology import Topology
from commlib.vectors import Float32, Index, SparseVector
from commlib.wire import Codec, Message


class Flat:
    """Every rank selects from its whole gradient, and all ranks combine their selections.

    ``comm``: the ranks that combine; ``link``: the stage that their exchange counts as. ``low``, ``length``:
    the range of entries that this rank selects from. ``of_node``: whether what a rank selects is its whole
    node's. ``takes_entries``: whether ``collect`` takes a ``SparseVector``, and returns it, also where a
    selector then picks some of its entries.
    """

    of_node: ClassVar[bool] = False
    takes_entries: ClassVar[bool] = True

    def __init__(self, topology: Topology, size: int) -> None:
        self.comm = topology.world
        self.link = topology.slowest_link
        self.low, self.length = 0, size

    def collect(self, reducer: "SelectingReducer", gradient: Any) -> Any:
        """Return the vector of ``length`` entries that this rank selects from."""
        return gradient

    def spread(
        self, reducer: "SelectingReducer", combined: SparseVector, selected: int, buffer: AnyMeanBuffer
    ) -> Outcome:
        """Return the mean of the sum ``combined``; none where finite parts have added up to an infinity."""
        if not combined.is_finite:  # all ranks hold the same sum, and find the same
            return Outcome(None)
        with reducer.measure("combine"):
            mean = combined.divided_by(reducer.topology.world.size, out=combined.values)
            written = buffer.scatter([(0, mean)])
        return Outcome(written, selected, combined.nnz)


@dataclass(frozen=True)
class State:
    """What a step of an algorithm changes besides residual and selector; one with state derives from it."""


class SelectingReducer(SparseReducer):
    """A sparse reducer in four steps, of which an algorithm is the third, ``_combine``.

    Collect what this rank selects from; add the residual and select; combine with the selections of the ranks
    of ``comm``; spread the sum to all. ``layout`` says which entries and ranks these are: every rank's own
    gradient and the world, or with :class:`commlib.reducers.hierarchical.Shards` shards of the node's sum and
    the owners of each.

    ``comm``, ``link``, ``length``: of the layout, see :class:`Flat`.
    ``k``: entries that are selected. ``state``: what ``_combine`` replaces by a new value when a step
    changes it; after a skipped step it is the one before.
    """

    layout_type: ClassVar[type[Flat]] = Flat
    state: Any = State()

    def __init__(self, topology: Topology, size: int, **options: Any) -> None:
        super().__init__(topology, size, **options)
        layout = self.layout = self.layout_type(topology, self.size)
        self.comm, self.link, self.length = layout.comm, layout.link, layout.length
        self.k = entries(self.density, self.length)
        self._forgotten = Forgotten()  # in the step that is under way
        self._encoded = 0  # messages of the step that is under way
        self._buffer: AnyMeanBuffer | None = None  # for the mean of that step
        self._selected = self._proposed = SparseVector.empty(self.length, self.arrays)
        self._state_before = self.state, self.selector.state_dict()
        kept = 0 if self.sends_all else self.length
        with memory_errors(self):
            self._residual = self.arrays.zeros(kept, np.float32)
            self._spare = self.arrays.empty(kept, np.float32)  # the next residual is made in it

    def set_density(self, density: float) -> None:
        """See :meth:`SparseReducer.set_density`."""
        super().set_density(density)
        self.k = entries(self.density, self.length)

    def sent_indices(self, mean: Float32) -> Index:
        """See :meth:`Reducer.sent_indices`; of a node that selects together, what was applied.

        A single rank sends nothing.
        """
        if self.layout.of_node and self.topology.world.size > 1:
            return super().sent_indices(mean)
        if self.sends_all:
            return self._selected.indices_or_range
        held = self._residual[self._selected.indices_or_range]
        return self._selected.where(held != self._selected.values).indices_or_range

    @property
    def takes_entries(self) -> bool:
        """See :attr:`Reducer.takes_entries`: if each rank selects from its own gradient, or all is sent."""
        return self.layout.takes_entries or self.sends_all

    def _reduce(self, gradient: Float32 | SparseVector, buffer: AnyMeanBuffer) -> Outcome:
        self._encoded, self._buffer = 0, buffer
        self._forgotten = Forgotten()
        self._state_before = self.state, self.selector.state_dict()
        selected = self._select(gradient)
        combined = self._combine(selected)
        self._proposed, self._buffer = selected, None
        outcome = self.layout.spread(self, combined, selected.nnz, buffer)
        return replace(outcome, forgotten=self._forgotten)

    def _select(self, gradient: Float32 | SparseVector) -> SparseVector:
        """Return what this rank sends, taken from its next residual; a NaN where it is not finite."""
        if self.sends_all:
            return self.select_all(self.layout.collect(self, gradient))
        collected, accumulated = self.layout.collect(self, gradient), self._spare
        selected = self.select(collected, self._decayed(), self.k, out=accumulated)
        with self.measure("combine"):
            selected.subtract_from(accumulated)
        return selected

    def _decayed(self) -> Float32:
        """Return ``β·e`` of the residual ``e``."""
        if self.options.decay == 1:
            return self._residual  # type: ignore[no-any-return]
        kept: Float32 = self.workspace.get("decayed", self.length)
        with self.measure("select"):
            self._forgotten = decayed(self._residual, self.options.decay, out=kept)
        return kept

    def _commit(self) -> None:
        self._residual, self._spare = self._spare, self._residual
        self._selected = self._proposed

    def _discard(self) -> None:
        self.state, selector_state = self._state_before
        self.selector.load_state_dict(selector_state)

    @abstractmethod
    def _combine(self, selected: SparseVector) -> SparseVector:
        """Return the sum of what the ranks of ``comm`` selected.

        A rank whose vector is not finite has selected a NaN, and the sum has to hold one, at any index.
        Entries of ``selected``, or of a sum, that are not in the result have to be dropped: those of
        ``selected`` have been taken from the residual. The caller overwrites the values of the result.
        """

    def sum_sparse(self, vectors: Sequence[SparseVector], at: int = 0) -> SparseVector:
        """Return the sum of vectors that begin at ``at`` of the own range, in their order.

        It is valid until the next ``sum_sparse`` of this step. A dense one lies where the mean will be: as
        the first of the vectors, it is added to in place.
        """
        return self.kernels.sum_sparse(
            vectors, dense=lambda size: self.room_in_mean(at, size), room=self.workspace.get
        )

    def room_in_mean(self, at: int, size: int) -> Float32:
        """Return the part of the mean that begins at ``at`` of the own range, to be overwritten.

        On a GPU, where sums are made apart from each other, it is a new array.
        """
        if self.arrays is not np:
            return empty(size, self.arrays)
        low = self.layout.low + at
        assert self._buffer is not None, "a step is under way"
        return self._buffer.dense()[low : low + size]

    def drop(self, vector: SparseVector, at: int = 0) -> None:
        """Keep the entries of ``vector``, which begins at ``at`` of the own range, for a later step."""
        assert not (self.sends_all and vector.nnz), "where all is sent there is no residual"
        vector.add_to(self._spare[at : at + vector.size])  # which is the next residual if this step counts

    def take_off(self, vector: SparseVector, at: int = 0) -> None:
        """Subtract entries that others apply from what ``drop`` keeps."""
        vector.subtract_from(self._spare[at : at + vector.size])

    def encode(
        self, vector: SparseVector, at: int = 0, *, codec: Codec | None = None, keeps: bool = True
    ) -> Message:
        """Return the message for ``vector``, which begins at ``at`` of the own range, in the reducer's codec.

        What the codec rounds away is dropped, unless another rank that encodes the same vector keeps it. The
        message may share the memory of a dense vector.
        """
        codec = codec or self.codec
        with self.measure("combine"):
            message = (
                codec.encode(vector, self._room_for_message) if self.arrays is np else codec.encode(vector)
            )
            if keeps and not codec.lossless:
                self.drop(vector, at)
                self.take_off(codec.decode(message, vector.size), at)
        return message

    def _room_for_message(self, length: int) -> Message:
        """Return memory that no other message of this step has."""
        self._encoded += 1
        message: Message = self.workspace.get(f"encoded {self._encoded}", length, np.uint8)
        return message

    @property
    def residual(self) -> Float32:
        """See :attr:`Reducer.residual`."""
        residual = super().residual
        if not self.sends_all:
            residual[self.layout.low : self.layout.low + self.length] += self._residual
        return residual

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Reducer.state_dict`."""
        # The residual is that of entries low … low + length − 1.
        own = {"low": self.layout.low, "residual": to_host(self._residual.copy())}
        return super().state_dict() | {"selector": self.selector.state_dict()} | asdict(self.state) | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Reducer.load_state_dict`."""
        check_settings(state["settings"], self.settings())
        if state["residual"].shape != self._residual.shape:
            found, expected = len(state["residual"]), len(self._residual)
            raise InvalidArgument(f"state: a residual of {found} entries, this rank's has {expected}")
        super().load_state_dict(state)
        self.selector.load_state_dict(state["selector"])
        own = {field.name: copy(state[field.name]) for field in fields(self.state)}
        self.state = replace(self.state, **own)
        self._residual = self.arrays.array(state["residual"], np.float32)
