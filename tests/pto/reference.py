"""LARS, LAMB, Muon, Adam and SGD in float64, a tensor at a time: written from the papers, apart from pto."""

import math
from dataclasses import dataclass, field

import numpy as np


def norm(tensor):
    return np.sqrt(np.sum(np.square(tensor)))


@dataclass
class Momentum:
    momentum: float = 0.0
    nesterov: bool = False
    velocity: np.ndarray | float = 0.0

    def moved(self, weight, gradient, rate):
        return weight - self.along(rate * gradient)

    def along(self, step):
        self.velocity = self.momentum * self.velocity + step
        return self.momentum * self.velocity + step if self.nesterov else self.velocity


@dataclass
class Lars(Momentum):
    momentum: float = 0.9
    weight_decay: float = 0.0
    trust: float = 0.001
    epsilon: float = 0.0
    excluded: bool = False

    def moved(self, weight, gradient, rate):
        if self.excluded:
            return weight - self.along(rate * gradient)
        local = 1.0
        if norm(weight) > 0 and norm(gradient) > 0:
            local = (
                self.trust * norm(weight) / (norm(gradient) + self.weight_decay * norm(weight) + self.epsilon)
            )
        return weight - self.along(rate * local * (gradient + self.weight_decay * weight))


@dataclass
class Adam:
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    is_apart: bool = False  # the decay, from the moments: AdamW
    freeze_variance: float = math.inf
    excluded: bool = False
    step: int = 0
    moments: list = field(default_factory=lambda: [0.0, 0.0])

    def moved(self, weight, gradient, rate):
        return weight - rate * self.update(weight, gradient)

    def update(self, weight, gradient):
        self.step += 1
        decay = 0.0 if self.excluded else self.weight_decay * weight
        if not self.is_apart:
            gradient = gradient + decay
        first, second = self.moments
        first = self.beta_1 * first + (1 - self.beta_1) * gradient
        if self.step <= self.freeze_variance:
            second = self.beta_2 * second + (1 - self.beta_2) * gradient**2
        self.moments = [first, second]
        first = first / (1 - self.beta_1**self.step)
        second = second / (1 - self.beta_2 ** min(self.step, self.freeze_variance))
        update = first / (np.sqrt(second) + self.epsilon)
        return update + decay if self.is_apart else update


@dataclass
class Lamb(Adam):
    epsilon: float = 1e-6
    is_apart: bool = True
    least_norm: float = 0.0
    largest_norm: float = math.inf

    def moved(self, weight, gradient, rate):
        update = self.update(weight, gradient)
        clipped = min(max(norm(weight), self.least_norm), self.largest_norm)
        has_ratio = not self.excluded and clipped > 0 and norm(update) > 0
        return weight - rate * (clipped / norm(update) if has_ratio else 1.0) * update


@dataclass
class Muon(Adam):
    """Jordan's Muon of one tensor with Moonlight's decay; AdamW of one that is no matrix, or ``by_adamw``."""

    is_apart: bool = True
    momentum: float = 0.95
    nesterov: bool = True
    scale: str = "rms"
    by_adamw: bool = False
    buffer: np.ndarray | float = 0.0

    def moved(self, weight, gradient, rate):
        columns = weight.shape[-1] if weight.ndim > 1 else 1
        rows = weight.size // columns
        if self.by_adamw or rows == 1 or columns == 1:
            return super().moved(weight, gradient, rate)
        self.buffer = self.momentum * self.buffer + gradient
        update = gradient + self.momentum * self.buffer if self.nesterov else self.buffer
        x = update.reshape(rows, columns)
        x = (x if rows <= columns else x.T) / (norm(x) + 1e-7)
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * np.linalg.matrix_power(x @ x.T, 2) @ x
        x = x if rows <= columns else x.T
        factor = 0.2 * max(rows, columns) ** 0.5 if self.scale == "rms" else max(1, columns / rows) ** 0.5
        decay = 0.0 if self.excluded else self.weight_decay * weight
        return weight - rate * (factor * x.reshape(weight.shape) + decay)


SHAPES = [(), (1,), (7,), (3, 4), (2, 3, 5), (3, 3, 4, 2)]
NAMES = ["scale", "one/kernel", "norm/bias", "dense/kernel", "cube/kernel", "conv/kernel"]
EXCLUDED = r"bias"


def weights_and_gradients(steps, seed=1, shapes=SHAPES):
    """float32 weights, and the gradients of every step, of layers whose scales differ a thousandfold."""
    random = np.random.default_rng(seed)
    scales = [10.0 ** random.uniform(-3, 0) for _ in shapes]
    weights = [np.asarray(random.standard_normal(shape), np.float32) for shape in shapes]
    gradients = [
        [
            np.asarray(scale * random.standard_normal(shape), np.float32)
            for shape, scale in zip(shapes, scales, strict=True)
        ]
        for _ in range(steps)
    ]
    return weights, gradients


def trained(make, weights, gradients, rates, names=NAMES):
    """The float64 weights after all steps; ``make(excluded)`` gives the rule of one tensor."""
    rules = [make(excluded=EXCLUDED in name) for name in names]
    weights = [weight.astype(float) for weight in weights]
    for rate, step in zip(rates, gradients, strict=True):
        weights = [
            rule.moved(weight, gradient.astype(float), rate)
            for rule, weight, gradient in zip(rules, weights, step, strict=True)
        ]
    return weights
