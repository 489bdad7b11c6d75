"""Momentum correction: velocities are accumulated instead of gradients."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.arrays import to_host
from commlib.errors import InvalidArgument
from commlib.reducers.base import Options, Reducer
from commlib.reducers.clipping import LocalClipping
from commlib.reducers.wrapper import ReducerWrapper
from commlib.vectors import Float32


@dataclass(frozen=True)
class MomentumOptions(Options):
    """``momentum``: of the velocity; ``masking``: whether what was sent starts again."""

    momentum: float
    masking: bool

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise InvalidArgument(f"momentum: expected a number in [0, 1), got {self.momentum!r}")


class MomentumCorrection(ReducerWrapper):
    """Accumulates velocities instead of gradients: ``u ← m·u + g`` (DGC, section 3.2).

    The optimizer then has no momentum of its own. ``masking``: an entry's velocity starts again when the
    entry has been sent, so that no stale momentum is carried on (DGC's momentum factor masking, section 3.3).
    What the reducer promises not to lose are then the velocities.
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
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite skips the step
            np.multiply(np.float32(self.options.momentum), self._velocity, out=velocity)
            velocity += gradient
        return velocity

    def _after(self, mean: Float32) -> None:
        """Take over the velocity; a skipped step leaves it as it was."""
        if self.options.masking:
            self._spare[self.reducer.sent_indices(mean)] = 0
        self._velocity, self._spare = self._spare, self._velocity

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`ReducerWrapper.state_dict`."""
        return super().state_dict() | {"velocity": to_host(self._velocity.copy())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`ReducerWrapper.load_state_dict`."""
        super().load_state_dict(state)
        self._velocity = self.arrays.array(state["velocity"], np.float32)
