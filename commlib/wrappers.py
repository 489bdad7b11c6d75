"""What is put around a reducer: each is used like the reducer inside of it, and all can be nested.

The outermost sees the gradient first: clip, then correct the momentum.

>>> from commlib import Topology, make_reducer, transport
>>> def step(comm):
...     reducer = make_reducer("hitopk", Topology(comm), size=1000, density=0.01)
...     reducer = WarmUp(LocalClipping(MomentumCorrection(reducer, 0.9), norm=1.0), (0.25, 0.05), 100)
...     reducer.reduce(np.arange(1000))
...     return reducer.last.selected
>>> transport.simulated.run(step, world_size=2)
[125, 125]
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from commlib.arrays import to_host
from commlib.density import check_density
from commlib.errors import InvalidArgument
from commlib.memory import Workspace
from commlib.reducers.base import Report, as_gradient, check_settings
from commlib.reducers.sparse import SelectingReducer
from commlib.topology import Topology
from commlib.vectors import Float32, Index

Sparse: TypeAlias = "SelectingReducer | ReducerWrapper"


class ReducerWrapper:
    """Passes everything on to ``reducer``; subclasses change what they are about."""

    def __init__(self, reducer: Sparse) -> None:
        if not isinstance(reducer, (SelectingReducer, ReducerWrapper)):
            raise InvalidArgument(f"reducer: expected a sparse one, got {type(reducer).__name__}")
        self.reducer = reducer
        self.topology: Topology = reducer.topology
        self.size: int = reducer.size
        self.arrays = self.topology.world.arrays
        self.workspace = Workspace(self.arrays)

    @property
    def density(self) -> float:
        """Return the density of the next step."""
        return self.reducer.density

    @property
    def last(self) -> Report | None:
        """See :class:`commlib.Reducer`."""
        return self.reducer.last

    @property
    def residual(self) -> Float32:
        """See :attr:`commlib.Reducer.residual`."""
        return self.reducer.residual

    def reduce(self, gradient: npt.ArrayLike, out: Float32 | None = None) -> Float32:
        """See :meth:`commlib.Reducer.reduce`."""
        return self.reducer.reduce(gradient, out)

    def sent_indices(self, mean: Float32) -> Index:
        """See :meth:`commlib.reducers.SelectingReducer.sent_indices`."""
        return self.reducer.sent_indices(mean)

    def set_density(self, density: float) -> None:
        """See :meth:`commlib.reducers.SelectingReducer.set_density`."""
        self.reducer.set_density(density)

    def add_residual(self, residual: Float32) -> None:
        """See :meth:`commlib.Reducer.add_residual`."""
        self.reducer.add_residual(residual)

    def settings(self) -> dict[str, Any]:
        """Return what this one was made with, by name."""
        return {"around": type(self).__name__}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a restored one needs to go on bitwise; the arrays are copies."""
        return {"settings": self.settings(), "reducer": self.reducer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned; that of other settings is refused, and changes nothing."""
        check_settings(state["settings"], self.settings())
        self.reducer.load_state_dict(state["reducer"])


class LocalClipping(ReducerWrapper):
    """Scales each rank's gradient down to a norm of ``norm/√P`` before it is accumulated (DGC, section 3.2).

    So the sum over ranks of independent gradients has about the norm ``norm``.
    """

    def __init__(self, reducer: Sparse, norm: float) -> None:
        if not 0 < norm < float("inf"):
            raise InvalidArgument(f"norm: expected a number above 0, got {norm!r}")
        super().__init__(reducer)
        self._norm = norm
        self._most = norm / self.topology.world.size**0.5

    def reduce(self, gradient: npt.ArrayLike, out: Float32 | None = None) -> Float32:
        """See :meth:`commlib.Reducer.reduce`."""
        vector = as_gradient(gradient, self.size, self.arrays, self.workspace)
        largest = max(float(vector.max()), -float(vector.min()))
        if 0 < largest < float("inf"):  # what is not finite skips the step
            # Squares of float32 overflow at 2e19: those of the vector over its largest do not.
            scaled = np.divide(vector, np.float32(largest), out=self.workspace.get("scaled", self.size))
            norm = largest * float(np.linalg.norm(scaled))
            if norm > self._most:
                vector = np.multiply(vector, np.float32(self._most / norm), out=scaled)
        return self.reducer.reduce(vector, out)

    def settings(self) -> dict[str, Any]:
        """See :meth:`ReducerWrapper.settings`."""
        return super().settings() | {"norm": self._norm}


class MomentumCorrection(ReducerWrapper):
    """Accumulates velocities instead of gradients: ``u ← m·u + g`` (DGC, section 3.2).

    The optimizer then has no momentum of its own. ``masking``: an entry's velocity starts again when the
    entry has been given away, so that no stale momentum is carried on (DGC's momentum factor masking, section
    3.3). What the reducer promises not to lose are then the velocities.
    """

    def __init__(self, reducer: Sparse, momentum: float, *, masking: bool = True) -> None:
        if not 0 <= momentum < 1:
            raise InvalidArgument(f"momentum: expected a number in [0, 1), got {momentum!r}")
        super().__init__(reducer)
        inside = reducer
        while isinstance(inside, ReducerWrapper):
            if isinstance(inside, LocalClipping):  # it would clip velocities
                raise InvalidArgument(
                    "reducer: expected LocalClipping around MomentumCorrection, got it inside"
                )
            inside = inside.reducer
        self._momentum, self._masking = np.float32(momentum), masking
        self._velocity = self.arrays.zeros(self.size, np.float32)
        self._spare = self.arrays.empty(self.size, np.float32)  # the next velocity is made in it

    def reduce(self, gradient: npt.ArrayLike, out: Float32 | None = None) -> Float32:
        """See :meth:`commlib.Reducer.reduce`; a skipped step leaves the velocity as it was."""
        vector, velocity = as_gradient(gradient, self.size, self.arrays, self.workspace), self._spare
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite skips the step
            np.multiply(self._momentum, self._velocity, out=velocity)
            velocity += vector
        mean = self.reducer.reduce(velocity, out)
        if self.last is not None and self.last.finite:
            if self._masking:
                velocity[self.reducer.sent_indices(mean)] = 0
            self._velocity, self._spare = velocity, self._velocity
        return mean

    def settings(self) -> dict[str, Any]:
        """See :meth:`ReducerWrapper.settings`."""
        return super().settings() | {"momentum": float(self._momentum), "masking": self._masking}

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`ReducerWrapper.state_dict`."""
        return super().state_dict() | {"velocity": to_host(self._velocity.copy())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`ReducerWrapper.load_state_dict`."""
        super().load_state_dict(state)
        self._velocity = self.arrays.array(state["velocity"], np.float32)


class WarmUp(ReducerWrapper):
    """Begins with more entries: ``densities[e]`` in epoch ``e``, then the reducer's own (gTop-k, section IV).

    ``commlib.density`` has gTop-k's four and makes exponential ones. ``steps_per_epoch``: of ``reduce``.
    """

    def __init__(self, reducer: Sparse, densities: Sequence[float], steps_per_epoch: int) -> None:
        if steps_per_epoch < 1:
            raise InvalidArgument(f"steps_per_epoch: expected at least 1, got {steps_per_epoch}")
        super().__init__(reducer)
        self._densities = [*map(check_density, densities), reducer.density]
        self._steps_per_epoch = steps_per_epoch
        self._steps = 0
        self._follow()

    def _follow(self) -> None:
        epoch = min(self._steps // self._steps_per_epoch, len(self._densities) - 1)
        if self._densities[epoch] != self.density:
            self.reducer.set_density(self._densities[epoch])

    def reduce(self, gradient: npt.ArrayLike, out: Float32 | None = None) -> Float32:
        """See :meth:`commlib.Reducer.reduce`."""
        mean = self.reducer.reduce(gradient, out)
        self._steps += 1
        self._follow()
        return mean

    def set_density(self, density: float) -> None:
        """Change the density that the warm-up ends at."""
        self._densities[-1] = check_density(density)
        self._follow()

    def settings(self) -> dict[str, Any]:
        """See :meth:`ReducerWrapper.settings`."""
        return super().settings() | {"densities": self._densities, "steps_per_epoch": self._steps_per_epoch}

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`ReducerWrapper.state_dict`."""
        return super().state_dict() | {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`ReducerWrapper.load_state_dict`."""
        steps = self._steps
        check_settings(state["settings"], self.settings())
        try:
            self._steps = state["steps"]
            self._follow()  # the reducer's state is of that step's density
            super().load_state_dict(state)
        except InvalidArgument:
            self._steps = steps
            self._follow()
            raise
