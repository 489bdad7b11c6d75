"""Rounds of local steps: replicas take steps from common weights, then exchange how far they have come.

From the common weights ``θ`` replica ``r`` comes to ``wᵣ`` in a round. The differences ``θ − wᵣ`` are reduced
as gradients are, and an outer optimizer moves ``θ`` by their mean. That is DiLoCo (Douillard et al. 2023),
with a sparse reducer whose residual decays SparseLoCo (Sarfi et al. 2025).
"""

from collections.abc import Callable

import numpy as np

from commlib.arrays import empty, module_of, zeros
from commlib.reducers import Report
from commlib.vectors import Float32

Reduce = Callable[[Float32], tuple[Float32, Report]]


class OuterSgd:
    """``v ← μ·v + Δ``, then ``θ ← θ − rate·v``; with Nesterov's momentum ``θ ← θ − rate·(Δ + μ·v)``.

    ``velocity``: ``v``; ``None`` before the first update, and where ``μ`` is 0.
    """

    def __init__(
        self,
        rate: float = 1.0,
        momentum: float = 0.0,
        *,
        nesterov: bool = False,
        velocity: Float32 | None = None,
    ) -> None:
        self._rate, self._momentum, self._nesterov = np.float32(rate), np.float32(momentum), nesterov
        self.velocity = velocity if momentum else None

    def apply(self, weights: Float32, mean: Float32) -> Float32:
        """Return new weights, in memory of their own; ``mean`` is changed."""
        if self._momentum:
            if self.velocity is None:
                self.velocity = zeros(len(mean), module_of(mean))
            self.velocity *= self._momentum
            self.velocity += mean
            if self._nesterov:
                mean += self._momentum * self.velocity
            else:
                mean[...] = self.velocity
        mean *= self._rate
        return np.subtract(weights, mean, out=empty(len(weights), module_of(weights)))


class Rounds:
    """The rounds of one rank. ``reduce(difference)`` returns the mean over all ranks, and a report.

    ``common``: the common weights at the begin of the round, ``None`` between two rounds. ``failed``: whether
    a local step of this rank was not finite, so that its weights are useless. The round is then skipped on
    all ranks, as is one with a difference that is not finite.
    """

    def __init__(self, outer: OuterSgd, reduce: Reduce) -> None:
        self.outer, self._reduce = outer, reduce
        self.common: Float32 | None = None
        self.failed = False

    def begin(self, weights: Float32) -> None:
        """Begin a round with these common weights, in memory that nothing changes until it ends."""
        self.common, self.failed = weights, False

    def end(self, weights: Float32) -> tuple[Float32, Report]:
        """Exchange the differences to the weights after local steps; return the new common weights.

        Collective. Where the round is skipped (``finite`` of the report), the common weights stay.
        """
        assert self.common is not None
        before, self.common = self.common, None
        difference = np.subtract(before, weights, out=empty(len(before), module_of(before)))
        if self.failed:
            difference.fill(np.nan)
        mean, report = self._reduce(difference)
        return (self.outer.apply(before, mean) if report.finite else before), report
