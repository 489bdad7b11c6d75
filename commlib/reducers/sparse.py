"""Reducers that select entries: add the residual, select, combine the selections, and spread the sum.

An algorithm derives from :class:`SelectingReducer` and defines ``_combine`` alone, or from
:class:`SparseReducer` if it selects more than once.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from commlib.errors import InvalidArgument, NonFiniteInput
from commlib.reducers.mean import AnyMeanBuffer
from commlib.reducers.report import Outcome
from commlib.reducers.residual import ResidualOptions, ResidualReducer
from commlib.selection import EVERYTHING, GivenSelector, Selector
from commlib.topology import Topology
from commlib.vectors import Float32, Index, SparseVector, non_finite
from commlib.wire import Codec


@dataclass(frozen=True)
class SparseOptions(ResidualOptions):
    """The names of selector and codec."""

    selector: GivenSelector
    wire: str


class SparseReducer(ResidualReducer):
    """A reducer with a selector and a codec for entries.

    With the selector ``all`` it sends all entries that are not 0, and keeps no residual: ``sends_all``.
    """

    options: SparseOptions

    def __init__(
        self,
        topology: Topology,
        size: int,
        *,
        selector: GivenSelector = "mstopk",
        wire: str = "fp32",
        **options: Any,
    ) -> None:
        self.sends_all = selector == EVERYTHING
        self.keeps_residual = not self.sends_all
        super().__init__(topology, size, **options)
        self.options = SparseOptions(**asdict(self.options), selector=selector, wire=wire)
        self._renew_selectors(1)
        self.codec = self.kernels.make_codec(wire)
        self._check_all_is_sent(self.density)

    def _renew_selectors(self, number: int) -> None:
        """Make new selectors, one for each selection of a step; unused if ``sends_all``."""
        name = "exact" if self.sends_all else self.options.selector
        self.selectors: list[Selector] = [self.kernels.make_selector(name) for _ in range(number)]
        self._selectors_before = self._states_of_selectors()

    def _reduce(self, gradient: Float32 | SparseVector, buffer: AnyMeanBuffer) -> Outcome:
        self._selectors_before = self._states_of_selectors()
        return super()._reduce(gradient, buffer)

    def _states_of_selectors(self) -> list[dict[str, Any]]:
        return [each.state_dict() for each in self.selectors]

    def _restore_selectors(self, states: Sequence[Mapping[str, Any]]) -> None:
        for selector, state in zip(self.selectors, states, strict=True):
            selector.load_state_dict(state)

    def _check_all_is_sent(self, density: float) -> None:
        """Raise ``InvalidArgument`` for options that contradict the selector ``all``."""
        if self.sends_all and density != 1:
            raise InvalidArgument(f"density: expected 1.0 with selector {EVERYTHING}, got {density!r}")
        self.check_loses_nothing("wire", self.options.wire, self.codec)
        if self.sends_all and self.options.decay != 1:
            expected = f"expected 1.0 with selector {EVERYTHING}, which keeps no residual"
            raise InvalidArgument(f"decay: {expected}, got {self.options.decay!r}")

    def check_loses_nothing(self, option: str, name: str, codec: Codec) -> None:
        """Raise ``InvalidArgument`` for a lossy codec if there is no residual to keep the rounding error."""
        if self.sends_all and not codec.lossless:
            expected = f"expected one without loss with selector {EVERYTHING}"
            raise InvalidArgument(f"{option}: {expected}, got {name}")

    def set_density(self, density: float) -> None:
        self._check_all_is_sent(density)
        super().set_density(density)
        # The old selectors may remember thresholds for another k.
        self._renew_selectors(len(self.selectors))

    def _discard(self) -> None:
        super()._discard()
        self._restore_selectors(self._selectors_before)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"selectors": self._states_of_selectors()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state.get("selectors", ())) != len(self.selectors):
            raise InvalidArgument(f"state: expected one of {len(self.selectors)} selectors, got another")
        super().load_state_dict(state)
        self._restore_selectors(state["selectors"])


class SelectingReducer(SparseReducer):
    """A reducer whose ranks each select ``k`` entries, and send those.

    An algorithm is how the selections are combined, ``_combine``.
    """

    def __init__(self, topology: Topology, size: int, **options: Any) -> None:
        super().__init__(topology, size, **options)
        self._selected = self._proposed = SparseVector.empty(self.length, self.arrays)

    def sent_indices(self, mean: Float32) -> Index:
        """See :meth:`Reducer.sent_indices`; of a node that selects together, what was applied."""
        if self.layout.of_node:
            return super().sent_indices(mean)
        if self.sends_all:
            return self._selected.indices_or_range
        held = self._residual[self._selected.indices_or_range]
        return self._selected.where(held != self._selected.values).indices_or_range

    @property
    def takes_entries(self) -> bool:
        """See :attr:`Reducer.takes_entries`: if each rank selects from its own gradient, or all is sent."""
        return self.layout.takes_entries or self.sends_all

    def _exchange(self, collected: Float32 | SparseVector) -> tuple[SparseVector, int]:
        selected = self._select(collected)
        combined = self._combine(selected)
        self._proposed = selected
        return combined, selected.nnz

    def _select(self, collected: Float32 | SparseVector) -> SparseVector:
        """Return the entries that this rank sends, removed from its next residual, or a NaN."""
        accumulated = self._spare
        if self.sends_all:
            with self.measure("select"):
                if isinstance(collected, SparseVector):
                    return collected
                return SparseVector.from_dense(collected)
        residual = self._decayed()
        (selector,) = self.selectors
        with self.measure("select"):
            try:
                if isinstance(collected, SparseVector):
                    accumulated[...] = residual
                    collected.add_to(accumulated)
                    selected = selector.select(accumulated, self.k)
                else:
                    selected = selector.select_sum(collected, residual, self.k, accumulated)
            except NonFiniteInput:
                selected = non_finite(len(accumulated), self.arrays)
        with self.measure("combine"):
            selected.subtract_from(accumulated)
        return selected

    def _commit(self) -> None:
        super()._commit()
        self._selected = self._proposed

    @abstractmethod
    def _combine(self, selected: SparseVector) -> SparseVector:
        """Return the sum of the selections of the ranks of ``comm``.

        A rank whose vector is not finite has selected a NaN, and the sum has to hold one, at any index.
        Entries of ``selected``, or of a sum, that are not in the result have to be given to ``drop``, as
        ``selected`` is no longer in the residual. The caller overwrites the values of the result.
        """
