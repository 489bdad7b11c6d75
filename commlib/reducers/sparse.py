"""What sparse reducers share: density, selector, codec, and how the residual is kept."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from commlib.arrays import to_host
from commlib.density import check_density, entries
from commlib.errors import InvalidArgument, NonFiniteInput
from commlib.kernels import kernels_of
from commlib.memory import empty
from commlib.reducers.base import Outcome, Reducer, check_settings
from commlib.topology import Topology
from commlib.vectors import Float32, Index, SparseVector
from commlib.wire import Codec, Message


class SparseReducer(Reducer):
    """A reducer that sends a share ``density`` of the entries and keeps the rest as residual."""

    sparse: ClassVar[bool] = True

    def __init__(
        self,
        topology: Topology,
        size: int,
        *,
        density: float = 0.01,
        selector: str = "mstopk",
        wire: str = "fp32",
    ) -> None:
        self.density = check_density(density)
        self.kernels = kernels_of(topology.world.arrays)
        self.selector = self.kernels.make_selector(selector)
        self.codec = self.kernels.make_codec(wire)
        # Sums that are final travel without loss: there is no rank left to keep what would be rounded away.
        self.lossless = self.kernels.make_codec("fp32")
        self._names = (selector, wire)
        super().__init__(topology, size)

    def settings(self) -> dict[str, Any]:
        """See :meth:`Reducer.settings`."""
        selector, wire = self._names
        return super().settings() | {"density": self.density, "selector": selector, "wire": wire}

    def set_density(self, density: float) -> None:
        """Select another share of the entries from the next step on; the residual stays as it is.

        All ranks call it between the same two steps; those that did not are found in the next one.
        """
        self.density = check_density(density)
        # What the old one remembers is of another count.
        self.selector = self.kernels.make_selector(self._names[0])
        self._shared = repr(self.settings())

    def select(self, gradient: Float32, residual: Float32, k: int, out: Float32) -> tuple[SparseVector, bool]:
        """Write ``gradient + residual`` to ``out``; return ``k`` entries of it and true.

        None and false where it is not finite.
        """
        with self.measure("select"):
            try:
                return self.selector.select_sum(gradient, residual, k, out), True
            except NonFiniteInput:
                return SparseVector.empty(len(out), self.arrays), False


class SelectingReducer(SparseReducer):
    """A sparse reducer in four steps, of which an algorithm is the third, ``_combine``.

    Collect what this rank is to select from; add the residual and select; combine with the selections of the
    ranks of ``comm``; spread the sum to all. As it stands here, every rank collects its own whole gradient
    and ``comm`` is the world; :class:`commlib.reducers.hierarchical.ShardReducer` collects a node's shard.

    ``comm``: the ranks that combine, ``peers`` their ranks in the world, ``link`` the stage that their
    exchange counts as; ``length``: entries that this rank selects ``k`` from.
    """

    def __init__(self, topology: Topology, size: int, **settings: Any) -> None:
        super().__init__(topology, size, **settings)
        with self.memory_errors():
            self._own_range(*self._join(topology))

    def _join(self, topology: Topology) -> tuple[int, int]:
        """Set ``comm``, ``peers`` and ``link``; return the bounds of what this rank selects from."""
        self.comm = topology.world
        self.peers = list(range(topology.world.size))
        self.link = topology.slowest_link
        return 0, self.size

    def _own_range(self, low: int, high: int) -> None:
        self._low, self.length = low, high - low
        self.k = entries(self.density, self.length)
        self._residual = self.arrays.zeros(self.length, np.float32)
        self._spare = self.arrays.empty(self.length, np.float32)  # the next residual is made in it
        self._selected = SparseVector.empty(self.length, self.arrays)
        self._encoded = 0  # messages of the step that is under way

    def set_density(self, density: float) -> None:
        """See :meth:`SparseReducer.set_density`."""
        super().set_density(density)
        self.k = entries(self.density, self.length)

    def sent_indices(self, mean: Float32) -> Index:
        """Return the places of the gradient whose entries left this rank in the latest step.

        ``mean`` is what that step returned. With one rank, there is nobody to give them to.
        """
        held = self._residual[self._selected.indices_or_range]
        return self._selected.where(held != self._selected.values).indices_or_range

    def _reduce(self, gradient: Float32) -> Outcome:
        self._encoded = 0
        collected, accumulated = self._collect(gradient), self._spare
        remembered = self._remember()
        selected, finite = self.select(collected, self._residual, self.k, out=accumulated)
        if finite:
            with self.measure("combine"):
                selected.subtract_from(accumulated)
        combined = self._combine(selected, finite)
        outcome = Outcome(None) if combined is None else self._spread(combined, selected.nnz)
        if outcome.mean is None:
            self._take_back(remembered)
        else:
            self._residual, self._spare = accumulated, self._residual
            self._selected = selected
        return outcome

    def _remember(self) -> dict[str, Any]:
        """Return the state that a step changes besides the residual."""
        return {"selector": self.selector.state_dict()}

    def _take_back(self, remembered: Mapping[str, Any]) -> None:
        """Restore what ``_remember`` returned: a skipped step changes nothing."""
        self.selector.load_state_dict(remembered["selector"])

    def _collect(self, gradient: Float32) -> Float32:
        """Return the vector of ``length`` entries that this rank selects from."""
        return gradient

    @abstractmethod
    def _combine(self, selected: SparseVector, finite: bool) -> SparseVector | None:
        """Return the sum of what the ranks of ``comm`` selected, or ``None`` where a rank is not finite.

        Entries of ``selected``, or of a sum, that are not in the result have to be dropped: those of
        ``selected`` have been taken from the residual. The values of the result are given away.
        """

    def _spread(self, combined: SparseVector, selected: int) -> Outcome:
        """Return the mean; no mean where finite parts have added up to an infinity."""
        if not combined.is_finite:  # all ranks hold the same sum, and see it
            return Outcome(None)
        with self.measure("combine"):
            mean = combined.divided_by(self.topology.world.size, out=combined.values)
            self.step_mean.write([(0, mean)])
        return Outcome(self.step_mean.array, selected, combined.nnz)

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
        low = self._low + at
        return self.step_mean.overwrite()[low : low + size]

    def drop(self, vector: SparseVector, at: int = 0) -> None:
        """Keep the entries of ``vector``, which begins at ``at`` of the own range, for a later step."""
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
        residual[self._low : self._low + self.length] += self._residual
        return residual

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Reducer.state_dict`."""
        # The residual is that of entries low … low + length − 1.
        own = {"low": self._low, "residual": to_host(self._residual.copy())}
        return super().state_dict() | self._remember() | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Reducer.load_state_dict`."""
        check_settings(state["settings"], self.settings())
        if state["residual"].shape != (self.length,):
            found = len(state["residual"])
            raise InvalidArgument(f"state: a residual of {found} entries, this rank's has {self.length}")
        super().load_state_dict(state)
        self._take_back(state)
        self._residual = self.arrays.array(state["residual"], np.float32)
