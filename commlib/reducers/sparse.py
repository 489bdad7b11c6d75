"""What sparse reducers share: density, selector and codec."""

from dataclasses import dataclass, replace
from typing import ClassVar

from commlib.density import check_density
from commlib.errors import InvalidArgument, NonFiniteInput
from commlib.kernels import kernels_of
from commlib.reducers.base import Options, Reducer
from commlib.selection import EVERYTHING, GivenSelector, Selector
from commlib.topology import Topology
from commlib.vectors import Float32, SparseVector, non_finite
from commlib.wire import Codec


@dataclass(frozen=True)
class SparseOptions(Options):
    """The share of the entries that is sent, the names of selector and codec, and the residual's decay."""

    density: float
    selector: GivenSelector
    wire: str
    decay: float


class SparseReducer(Reducer):
    """A reducer that sends a share ``density`` of the entries and keeps the rest as residual.

    The residual is multiplied by ``decay`` before a gradient is added; what it loses by that is reported.
    With the selector ``all`` it sends all entries that are not 0, and keeps no residual: ``sends_all``.
    """

    sparse: ClassVar[bool] = True
    options: SparseOptions

    def __init__(
        self,
        topology: Topology,
        size: int,
        *,
        density: float = 0.01,
        selector: GivenSelector = "mstopk",
        wire: str = "fp32",
        decay: float = 1.0,
    ) -> None:
        super().__init__(topology, size)
        self.options = SparseOptions(check_density(density), selector, wire, check_density(decay, "decay"))
        self.kernels = kernels_of(self.arrays)
        self.sends_all = selector == EVERYTHING
        self.selector = self._make_selector()
        self.codec = self.kernels.make_codec(wire)
        self._check_all_is_sent(self.density)
        # Sums that are final travel without loss: there is no rank left to keep what would be rounded away.
        self.lossless = self.kernels.make_codec("fp32")

    @property
    def density(self) -> float:
        """The density of the next step."""
        return self.options.density

    def _make_selector(self) -> Selector:
        """Return a new selector; where all is sent it is not called."""
        return self.kernels.make_selector("exact" if self.sends_all else self.options.selector)

    def _check_all_is_sent(self, density: float) -> None:
        """Raise ``InvalidArgument`` where the selector ``all`` would not send everything."""
        if self.sends_all and density != 1:
            raise InvalidArgument(f"density: expected 1.0 with selector {EVERYTHING}, got {density!r}")
        self.check_loses_nothing("wire", self.options.wire, self.codec)
        if self.sends_all and self.options.decay != 1:
            expected = f"expected 1.0 with selector {EVERYTHING}, which keeps no residual"
            raise InvalidArgument(f"decay: {expected}, got {self.options.decay!r}")

    def check_loses_nothing(self, option: str, name: str, codec: Codec) -> None:
        """Raise ``InvalidArgument`` for a lossy codec where there is no residual for what it loses."""
        if self.sends_all and not codec.lossless:
            expected = f"expected one without loss with selector {EVERYTHING}"
            raise InvalidArgument(f"{option}: {expected}, got {name}")

    def set_density(self, density: float) -> None:
        """Select another share of the entries from the next step on; the residual stays as it is.

        All ranks call it between the same two steps; a rank that did not is found in the next one.
        """
        self._check_all_is_sent(check_density(density))
        self.options = replace(self.options, density=check_density(density))
        # What the old one remembers is of another count.
        self.selector = self._make_selector()
        self._shared = None

    def select(
        self, gradient: Float32 | SparseVector, residual: Float32, k: int, out: Float32
    ) -> SparseVector:
        """Write ``gradient + residual`` to ``out``; return ``k`` entries of it, a NaN if it is not finite."""
        with self.measure("select"):
            try:
                if isinstance(gradient, SparseVector):
                    out[...] = residual
                    gradient.add_to(out)
                    return self.selector.select(out, k)
                return self.selector.select_sum(gradient, residual, k, out)
            except NonFiniteInput:
                return non_finite(len(out), self.arrays)

    def select_all(self, gradient: Float32 | SparseVector) -> SparseVector:
        """Return all entries that are given, of a dense vector those that are not 0."""
        with self.measure("select"):
            return gradient if isinstance(gradient, SparseVector) else SparseVector.from_dense(gradient)
