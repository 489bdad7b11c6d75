"""Synthetic gradients for measurements without training."""

import numpy as np
import numpy.typing as npt

from commlib.vectors import Float32

Float64 = npt.NDArray[np.float64]

SEED = 20_221_121
DEGREES_OF_FREEDOM = 3  # a variance, but far outliers
LAYERS = 24  # with a scale each: large entries are clustered, as in real gradients


class Gradients:
    """Gradients that resemble those of training: heavy tailed, in clusters, partly shared between ranks.

    An entry is ``scale·(lasting + step + own)``: the first equal on all ranks in all steps, the second on all
    ranks in one step, the third of one rank in one step.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        generator = np.random.default_rng(SEED)
        scales = np.exp(generator.normal(size=LAYERS)).astype(np.float32)
        lasting, noise = generator.standard_t(DEGREES_OF_FREEDOM, (2, size)).astype(np.float32)
        self._scale = scales[np.arange(size) * LAYERS // size]
        self._lasting = lasting
        self._sums: dict[int, tuple[Float64, Float64]] = {}
        self._noise = np.tile(noise, 2)  # drawn once: every window of it is a rotation, as good as a new draw

    def of(self, rank: int, step: int) -> Float32:
        """Return the gradient of one rank in one step, a new float32 array of shape ``(size,)``."""
        gradient: Float32 = self._lasting + self._window(step, 0)
        gradient += self._window(step, 1 + rank)
        gradient *= self._scale
        return gradient

    def sum_of(self, ranks: int) -> "tuple[Float64, Float64]":
        """Return the sums over ranks, in float64, of the gradients of step 0 and of their magnitudes.

        They are stored: the results of one candidate after the other are compared with them.
        """
        if ranks not in self._sums:
            total, magnitudes = np.zeros((2, self.size))
            for rank in range(ranks):
                gradient = self.of(rank, 0)
                total += gradient
                magnitudes += np.abs(gradient)
            self._sums[ranks] = total, magnitudes
        return self._sums[ranks]

    def _window(self, step: int, number: int) -> Float32:
        start = int(np.random.default_rng([SEED, step, number]).integers(self.size))
        return self._noise[start : start + self.size]
