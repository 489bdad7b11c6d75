"""Reducer wrappers: reducers that change the gradient before the sparse reducer inside gets it.

The outermost sees the gradient first: clip, then correct the momentum.

>>> import numpy as np
>>> from commlib import Topology, make_reducer, transport
>>> def step(comm):
...     wrappers = [{"name": "momentum_correction", "momentum": 0.9}, {"name": "local_clipping", "norm": 1.0}]
...     reducer = make_reducer("hitopk", Topology(comm), size=1000, density=0.01, wrappers=wrappers)
...     reducer.reduce(np.arange(1000))
...     return type(reducer).__name__, reducer.last.selected
>>> transport.simulated.run(step, world_size=2)
[('LocalClipping', 5), ('LocalClipping', 5)]
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, ClassVar

import numpy as np

from commlib.agreement import check_settings
from commlib.arrays import to_host
from commlib.errors import InvalidArgument
from commlib.reducers.base import Options, Reducer, as_entries, as_gradient, check_is_bool
from commlib.reducers.mean import MeanBuffer
from commlib.reducers.report import Outcome, Report
from commlib.trace import Recorder
from commlib.vectors import Float32, Index, SparseVector


class ReducerWrapper(Reducer):
    """A reducer around a sparse ``reducer``, with that reducer's residual, report, settings and state.

    Subclasses override ``_before``, and ``_after`` to update their state after a step that counts. A reducer
    has at most one wrapper of each kind. Wrappers make a ``SparseVector`` dense.
    """

    sparse: ClassVar[bool] = True

    def __init__(self, reducer: Reducer) -> None:
        if not isinstance(reducer, Reducer) or not reducer.sparse:
            raise InvalidArgument(f"reducer: expected a sparse one, got {type(reducer).__name__}")
        super().__init__(reducer.topology, reducer.size)
        self.reducer = reducer
        self.steps, self.last = reducer.steps, reducer.last
        self._proposed: Float32 | None = None  # the mean of a step that is neither committed nor discarded
        if any(type(inner) is type(self) for inner in self._inner()):
            raise InvalidArgument(f"reducer: expected one without {type(self).__name__}, got it inside")

    @classmethod
    def options_of_part(cls, options: Mapping[str, Any], share: float) -> dict[str, Any]:
        """Return the options for a part of the gradient with this share of its entries."""
        return dict(options)

    def _inner(self) -> list[Reducer]:
        """Return the reducers inside this one, the outermost first."""
        reducer = self.reducer
        return [reducer, *reducer._inner()] if isinstance(reducer, ReducerWrapper) else [reducer]

    def propose(self, gradient: Any, out: Float32 | None = None) -> tuple[Any, Report]:
        is_sparse = isinstance(gradient, SparseVector)
        if is_sparse:
            gradient = as_entries(gradient, self.size, self.arrays, out).to_dense()
        vector = as_gradient(gradient, self.size, self.arrays, self.workspace)
        if not self._is_synchronized:
            self.synchronize()
        mean: Any
        mean, report = self.reducer.propose(self._before(vector), out)
        self.steps = self.reducer.steps
        self._proposed = mean if report.finite else None
        return SparseVector.trusted(self.size, None, mean) if is_sparse else mean, report

    def commit(self) -> None:
        self.reducer.commit()
        assert self._proposed is not None, "a step was proposed"
        self._after(self._proposed)
        self._proposed = None  # its memory may be used again

    def discard(self) -> None:
        self.reducer.discard()
        self._proposed = None

    def record(self, recorder: Recorder | None) -> None:
        super().record(recorder)
        self.reducer.record(recorder)

    def _before(self, gradient: Float32) -> Float32:
        """Return the gradient for the wrapped reducer; the argument must not change."""
        return gradient

    def _after(self, mean: Float32) -> None:
        """Update the wrapper's state after a step that counts."""

    def _reduce(self, gradient: Float32, buffer: MeanBuffer) -> Outcome:
        return self.reducer._reduce(gradient, buffer)

    @property
    def density(self) -> float:
        """The density of the next step."""
        density: float = self.reducer.density  # type: ignore[attr-defined]  # sparse reducers have one
        return density

    def set_density(self, density: float) -> None:
        self.reducer.set_density(density)
        self._shared = None

    def sent_indices(self, mean: Float32) -> Index:
        return self.reducer.sent_indices(mean)

    @property
    def residual(self) -> Float32:
        return self.reducer.residual

    def add_residual(self, residual: Float32) -> None:
        """See :meth:`commlib.Reducer.add_residual`; it is neither clipped nor part of a velocity."""
        self.reducer.add_residual(residual)

    def mark_synchronized(self) -> None:
        """See :meth:`commlib.Reducer.mark_synchronized`; the wrapped reducer's settings are among these."""
        super().mark_synchronized()
        self.reducer.mark_synchronized()

    def settings(self) -> dict[str, Any]:
        """Return the wrapped reducer's settings, and under this one's name its options."""
        return self.reducer.settings() | {type(self).__name__: asdict(self.options)}

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`commlib.Reducer.state_dict`: the wrapped reducer's, with what this one adds."""
        return self.reducer.state_dict() | {"settings": self.settings()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_settings(state["settings"], self.settings())
        self.reducer.load_state_dict({**state, "settings": self.reducer.settings()})
        self.steps = self.reducer.steps

    def close(self) -> None:
        """Close the wrapped reducer."""
        self.reducer.close()


@dataclass(frozen=True)
class ClippingOptions(Options):
    """``norm``: of the sum over ranks."""

    norm: float

    def __post_init__(self) -> None:
        if not isinstance(self.norm, Real) or not 0 < self.norm < float("inf"):
            raise InvalidArgument(f"norm: expected a number above 0, got {self.norm!r}")


class LocalClipping(ReducerWrapper):
    """Scales each rank's gradient down to a norm of ``norm/√P`` before it is accumulated (DGC, section 3.2).

    So the sum over ranks of independent gradients has about the norm ``norm``.
    """

    def __init__(self, reducer: Reducer, norm: float) -> None:
        super().__init__(reducer)
        self.options = ClippingOptions(norm)
        self._most = norm / self.topology.world.size**0.5

    @classmethod
    def options_of_part(cls, options: Mapping[str, Any], share: float) -> dict[str, Any]:
        """Return the norm of a part: the norms of all parts together make up the norm of the options."""
        return {"norm": ClippingOptions(**options).norm * share**0.5}

    def _before(self, gradient: Float32) -> Float32:
        largest = max(float(gradient.max()), -float(gradient.min()))
        if not 0 < largest < float("inf"):  # a non-finite gradient skips the step
            return gradient
        # Squares of float32 overflow at 2e19: those of the gradient over its largest entry do not.
        scaled = np.divide(gradient, np.float32(largest), out=self.workspace.get("scaled", self.size))
        norm = largest * float(np.linalg.norm(scaled))
        if norm <= self._most:
            return gradient
        clipped: Float32 = np.multiply(gradient, np.float32(self._most / norm), out=scaled)
        return clipped


@dataclass(frozen=True)
class MomentumOptions(Options):
    """``momentum``: the factor of the velocity; ``masking``: whether sent entries restart at 0."""

    momentum: float
    masking: bool

    def __post_init__(self) -> None:
        if not isinstance(self.momentum, Real) or not 0 <= self.momentum < 1:
            raise InvalidArgument(f"momentum: expected a number in [0, 1), got {self.momentum!r}")
        check_is_bool("masking", self.masking)


class MomentumCorrection(ReducerWrapper):
    """Accumulates velocities instead of gradients: ``u ← m·u + g`` (DGC, section 3.2).

    The optimizer then has no momentum of its own. ``masking``: an entry's velocity starts again when the
    entry has been sent, so that no stale momentum is carried on (DGC's momentum factor masking, section 3.3).
    The guarantee that nothing is lost then holds for velocities instead of gradients.
    """

    def __init__(self, reducer: Reducer, momentum: float, *, masking: bool = True) -> None:
        super().__init__(reducer)
        if any(isinstance(inner, LocalClipping) for inner in self._inner()):  # it would clip velocities
            raise InvalidArgument("reducer: expected LocalClipping around MomentumCorrection, got it inside")
        self.options = MomentumOptions(momentum, masking)
        self._velocity = self.arrays.zeros(self.size, np.float32)
        self._spare = self.arrays.empty(self.size, np.float32)  # the next velocity is made in it

    def _before(self, gradient: Float32) -> Float32:
        velocity: Float32 = self._spare
        with np.errstate(over="ignore", invalid="ignore"):  # a non-finite velocity skips the step
            np.multiply(np.float32(self.options.momentum), self._velocity, out=velocity)
            velocity += gradient
        return velocity

    def _after(self, mean: Float32) -> None:
        """Keep the new velocity; a skipped step keeps the old one."""
        if self.options.masking:
            self._spare[self.reducer.sent_indices(mean)] = 0
        self._velocity, self._spare = self._spare, self._velocity

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"velocity": to_host(self._velocity.copy())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._velocity = self.arrays.array(state["velocity"], np.float32)
