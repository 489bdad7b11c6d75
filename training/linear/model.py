"""A linear model whose steps cost as much as their gradients have entries, also with regularization."""

import numpy as np

from commlib import SparseVector
from commlib.vectors import Float32
from training.linear import kernels
from training.linear.config import Settings
from training.linear.kernels import LOSSES, Float64, Int64, Matrix, Weights
from training.linear.rows import Rows


class Model:
    """Weights of float32 and an intercept, which are 0 at first.

    The objective is ``(1/N)·Σ loss(yᵢ, w·xᵢ + b) + l2/2·‖w‖² + l1·‖w‖₁``: the intercept ``b`` is not
    regularized. A gradient has ``size`` entries, of which the last is that of the intercept, if there is one.
    """

    def __init__(self, settings: Settings, features: int) -> None:
        self.settings = settings
        self.size = features + settings.intercept
        self._loss = LOSSES[settings.loss]
        seen = np.zeros(features if settings.l1 else 0)
        self._weights = Weights(np.zeros(features, np.float32), seen, 0.0, 1.0, 0.0)

    @property
    def intercept(self) -> float:
        return self._weights.intercept

    @property
    def weights(self) -> Float32:
        """Return the weights, an array of the model: the next step overwrites it."""
        kernels.settle(self._weights)
        self._weights = self._weights._replace(shrunk=0.0, scale=1.0)
        return self._weights.v

    def set_weights(self, weights: Float32, intercept: float) -> None:
        """Take other weights, which are copied."""
        self._weights.v[...] = weights
        self._weights.seen[...] = 0.0
        self._weights = self._weights._replace(shrunk=0.0, scale=1.0, intercept=intercept)

    def margins(self, rows: Rows) -> Float64:
        """Return ``w·x + b`` of each row."""
        return kernels.margins_of(rows.matrix, self._weights)

    def slopes(self, rows: Rows, numbers: Int64, slopes: Float64) -> float:
        """Write the derivatives of the losses of some rows by their margins; return the sum of the losses."""
        return kernels.slopes_of(self._loss, rows.matrix, rows.labels, numbers, self._weights, slopes)

    def step(self, gradient: SparseVector, rate: float) -> None:
        """Step against the gradient of the mean loss: ``w ← soft((1 − rate·l2)·w − rate·g, rate·l1)``.

        The last entry that it stores is that of the intercept.
        """
        settings, count = self.settings, gradient.nnz - self.settings.intercept
        _, _, shrunk, scale, intercept = self._weights
        scale *= 1.0 - rate * settings.l2
        if gradient.indices is None:
            kernels.add_dense(gradient.values[:count], -rate / scale, self._weights)
        else:
            entries = Matrix(np.array([0, count]), gradient.indices, gradient.values)
            kernels.add_row(entries, 0, -rate / scale, self._weights)
        if settings.intercept:
            intercept -= rate * float(gradient.values[-1])
        shrunk += rate * settings.l1 / scale
        self._weights = self._weights._replace(shrunk=shrunk, scale=scale, intercept=intercept)
        if scale < kernels.SMALLEST_SCALE:
            _ = self.weights

    def pass_alone(self, rows: Rows, order: Int64, bounds: Int64, rates: Float64) -> float:
        """Take a step for each batch of ``order``, as a single rank; return the sum of the losses before."""
        settings = self.settings
        total, shrunk, scale, intercept = kernels.pass_of_one_rank(
            self._loss,
            rows.matrix,
            rows.labels,
            (order, bounds, rates),
            self._weights,
            (settings.l2, settings.l1),
            settings.intercept,
        )
        self._weights = self._weights._replace(shrunk=shrunk, scale=scale, intercept=intercept)
        return total

    def penalty(self) -> float:
        """Return ``l2/2·‖w‖² + l1·‖w‖₁``."""
        squares, magnitudes = kernels.norms(self._weights)
        return self.settings.l2 / 2 * squares + self.settings.l1 * magnitudes
