"""Local clipping: each rank's gradient is scaled down to a norm before it is accumulated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.errors import InvalidArgument
from commlib.reducers.base import Options, Reducer
from commlib.reducers.wrapper import ReducerWrapper
from commlib.vectors import Float32


@dataclass(frozen=True)
class ClippingOptions(Options):
    """``norm``: of the sum over ranks."""

    norm: float

    def __post_init__(self) -> None:
        if not 0 < self.norm < float("inf"):
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
        """Return a norm such that parts of these norms have together that of the options."""
        return {"norm": options["norm"] * share**0.5}

    def _before(self, gradient: Float32) -> Float32:
        largest = max(float(gradient.max()), -float(gradient.min()))
        if not 0 < largest < float("inf"):  # what is not finite skips the step
            return gradient
        # Squares of float32 overflow at 2e19: those of the gradient over its largest entry do not.
        scaled = np.divide(gradient, np.float32(largest), out=self.workspace.get("scaled", self.size))
        norm = largest * float(np.linalg.norm(scaled))
        if norm <= self._most:
            return gradient
        clipped: Float32 = np.multiply(gradient, np.float32(self._most / norm), out=scaled)
        return clipped
