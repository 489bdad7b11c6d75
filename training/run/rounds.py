"""A round: local steps from common weights, one exchange of differences of weights, an outer update.

From the common weights ``θ`` replica ``r`` comes to ``wᵣ``. The differences ``θ − wᵣ`` are reduced as
gradients are, and an outer optimizer moves ``θ`` by their mean. That is DiLoCo (Douillard et al. 2023), with
a sparse reducer whose residual decays SparseLoCo (Sarfi et al. 2025). Weights are flat vectors here.
"""

from collections.abc import Callable

import numpy as np

from commlib import Report
from commlib.arrays import module_of
from commlib.memory import empty, zeros
from commlib.vectors import Float32
from training.config.local_steps import Outer

Reduce = Callable[[Float32], tuple[Float32, Report]]


class OuterSgd:
    """``v ← μ·v + Δ``, then ``θ ← θ − rate·v``; with Nesterov's momentum ``θ ← θ − rate·(Δ + μ·v)``.

    ``velocity``: ``v``; ``None`` before the first update, and where ``μ`` is 0.
    """

    def __init__(self, settings: Outer, velocity: Float32 | None = None) -> None:
        self._settings = settings
        self.velocity = velocity if settings.momentum else None

    def apply(self, weights: Float32, mean: Float32) -> Float32:
        """Return new weights, in memory of their own; ``mean`` is changed."""
        momentum = np.float32(self._settings.momentum)
        if momentum:
            if self.velocity is None:
                self.velocity = zeros(len(mean), module_of(mean))
            self.velocity *= momentum
            self.velocity += mean
            if self._settings.nesterov:
                mean += momentum * self.velocity
            else:
                mean[...] = self.velocity
        mean *= np.float32(self._settings.rate)
        return np.subtract(weights, mean, out=empty(len(weights), module_of(weights)))


class Rounds:
    """The rounds of one rank. ``reduce(difference)`` returns the mean over all ranks, and a report.

    ``common``: the common weights that a round began with, ``None`` between two rounds. ``failed``: whether
    a local step of this rank was not finite: its weights are of no use. The round is then skipped on all
    ranks, as is one with a difference that is not finite.
    """

    def __init__(self, outer: OuterSgd, reduce: Reduce) -> None:
        self.outer, self._reduce = outer, reduce
        self.common: Float32 | None = None
        self.failed = False

    def begin(self, weights: Float32) -> None:
        """Begin a round with these common weights, in memory that nothing changes until it ends."""
        self.common, self.failed = weights, False

    def end(self, weights: Float32) -> tuple[Float32, Report]:
        """Exchange what local steps came to; return the new common weights. Collective.

        Those that the round began with where it is skipped, by ``finite`` of the report.
        """
        assert self.common is not None
        before, self.common = self.common, None
        difference = np.subtract(before, weights, out=empty(len(before), module_of(before)))
        if self.failed:
            difference.fill(np.nan)
        mean, report = self._reduce(difference)
        return (self.outer.apply(before, mean) if report.finite else before), report
