"""What sparse reducers share: density, selector and codec."""

from dataclasses import dataclass, replace
from typing import ClassVar

from commlib.density import check_density
from commlib.errors import NonFiniteInput
from commlib.kernels import kernels_of
from commlib.reducers.base import Options, Reducer
from commlib.topology import Topology
from commlib.vectors import Float32, SparseVector


@dataclass(frozen=True)
class SparseOptions(Options):
    """The share of the entries that is sent, and the names of selector and codec."""

    density: float
    selector: str
    wire: str


class SparseReducer(Reducer):
    """A reducer that sends a share ``density`` of the entries and keeps the rest as residual."""

    sparse: ClassVar[bool] = True
    options: SparseOptions

    def __init__(
        self,
        topology: Topology,
        size: int,
        *,
        density: float = 0.01,
        selector: str = "mstopk",
        wire: str = "fp32",
    ) -> None:
        super().__init__(topology, size)
        self.options = SparseOptions(check_density(density), selector, wire)
        self.kernels = kernels_of(self.arrays)
        self.selector = self.kernels.make_selector(selector)
        self.codec = self.kernels.make_codec(wire)
        # Sums that are final travel without loss: there is no rank left to keep what would be rounded away.
        self.lossless = self.kernels.make_codec("fp32")

    @property
    def density(self) -> float:
        """The density of the next step."""
        return self.options.density

    def set_density(self, density: float) -> None:
        """Select another share of the entries from the next step on; the residual stays as it is.

        All ranks call it between the same two steps; a rank that did not is found in the next one.
        """
        self.options = replace(self.options, density=check_density(density))
        # What the old one remembers is of another count.
        self.selector = self.kernels.make_selector(self.options.selector)
        self._shared = None

    def select(self, gradient: Float32, residual: Float32, k: int, out: Float32) -> tuple[SparseVector, bool]:
        """Write ``gradient + residual`` to ``out``; return ``k`` entries of it and true.

        None and false where it is not finite.
        """
        with self.measure("select"):
            try:
                return self.selector.select_sum(gradient, residual, k, out), True
            except NonFiniteInput:
                return SparseVector.empty(len(out), self.arrays), False
