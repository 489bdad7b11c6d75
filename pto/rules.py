"""Update rules as pure functions of arrays: SGD, Adam, LARS (You et al. 2017), LAMB (2020), Muon.

A step has three stages: the norms of all tensors are computed at once, between the first and the last::

    direction   the direction of a tensor's step, and the new moments
    ratio       of each tensor, from the sums of squares of its weights and its direction
    apply       the new weights, and the new velocity

Arrays are of NumPy or TensorFlow; ``xp`` is their module. Arguments are not modified.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from pto.errors import InvalidArgument

BIAS_AND_NORMALISATION = r"(^|/)(bias|gamma|beta)$"
"""Matches the paths that Keras gives to biases and to the weights of normalisations."""

EMBEDDINGS_AND_LOGITS = r"(^|/)(embeddings$|logits/)"
"""Matches the paths of Keras' embeddings, and of the layers that make the logits in our models."""

Array = Any
State = tuple[Array, ...]
Stepped: TypeAlias = tuple[Array, State]  # what a stage makes of a tensor: direction or weight, and state
Scale: TypeAlias = Literal["rms", "spectral"]


def _check(name: str, value: object, expected: str, holds: bool) -> None:
    if not holds:
        raise InvalidArgument(f"{name}: expected {expected}, got {value}")


def is_expression(value: Any) -> bool:
    """Return whether a value is a regular expression, as text."""
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except re.error:
        return False


def _ratio_or_one(numerator: Array, denominator: Array, is_one: Array, xp: Any) -> Array:
    """Return the quotient, and 1 where ``is_one``; NaNs are preserved."""
    one = xp.ones_like(numerator)
    return xp.where(is_one, one, numerator / xp.where(is_one, one, denominator))


class Rule(ABC):
    """The update rule of one tensor. A tensor that is not ``adapted`` gets neither decay nor a ratio."""

    adapts: ClassVar[bool] = True  # whether it has a ratio, so needs norms
    weight_decay: float

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """Return the names of the state: arrays of the weights' shape and dtype, zeros at first."""

    def corrections(self, step: Array, xp: Any) -> State:
        """Return the corrections of this step for :meth:`direction`; ``step``: a float64 scalar from 1 on."""
        return ()

    def direction(
        self, weight: Array, gradient: Array, state: State, corrections: State, *, adapted: bool, xp: Any
    ) -> Stepped:
        """Return the direction of the step and the new state; ``corrections`` in the dtype of the weight."""
        return gradient, state

    def ratio(self, squares: Array, xp: Any) -> Array:
        """Return the ratio of each tensor, float64 ``(L,)``; ``squares``: of weights and of directions.

        The ratio is 1 where either norm (LAMB: after clipping) is 0. Only rules with ``adapts`` define it.
        """
        raise NotImplementedError

    def decayed(self, direction: Array, weight: Array, *, adapted: bool) -> Array:
        """Return the direction with the decay of the weights in it."""
        return direction + self.weight_decay * weight if adapted and self.weight_decay else direction

    @abstractmethod
    def apply(self, weight: Array, direction: Array, state: State, rate: Array, *, adapted: bool) -> Stepped:
        """Return the new weight and state; ``rate`` is the learning rate times the ratio."""


@dataclass(frozen=True)
class Sgd(Rule):
    """``v = momentum·v − rate·g; w += v``, or ``w += momentum·v − rate·g`` (Nesterov): as in Keras' SGD.

    ``g`` is the gradient plus ``weight_decay·w``; Keras subtracts ``rate·weight_decay·w`` from the weights.
    """

    adapts: ClassVar[bool] = False

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check("momentum", self.momentum, "0 or more, below 1", 0 <= self.momentum < 1)
        _check("nesterov", self.nesterov, "False where momentum is 0", self.momentum > 0 or not self.nesterov)
        _check("weight_decay", self.weight_decay, "0 or more", self.weight_decay >= 0)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("velocity",) if self.momentum else ()

    def apply(self, weight: Array, direction: Array, state: State, rate: Array, *, adapted: bool) -> Stepped:
        step = self.decayed(direction, weight, adapted=adapted) * rate
        if not state:
            return weight - step, ()
        velocity = state[0] * self.momentum - step
        if self.nesterov:
            return weight + (velocity * self.momentum - step), (velocity,)
        return weight + velocity, (velocity,)


@dataclass(frozen=True)
class Lars(Sgd):
    """SGD along ``g + weight_decay·w``, its rate times ``trust·‖w‖ / (‖g‖ + weight_decay·‖w‖ + epsilon)``.

    You, Gitman, Ginsburg 2017, algorithm 1. The velocity holds scaled steps, so a new learning rate does not
    affect earlier ones.
    """

    adapts: ClassVar[bool] = True

    momentum: float = 0.9
    trust: float = 0.001
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("trust", self.trust, "more than 0", self.trust > 0)
        _check("epsilon", self.epsilon, "0 or more", self.epsilon >= 0)

    def ratio(self, squares: Array, xp: Any) -> Array:
        norms = xp.sqrt(squares)
        weight, gradient = norms[0], norms[1]
        denominator = gradient + self.weight_decay * weight + self.epsilon
        return _ratio_or_one(self.trust * weight, denominator, (weight == 0) | (gradient == 0), xp)


@dataclass(frozen=True)
class Adam(Rule):
    """``w -= rate·m̂ / (√v̂ + epsilon)``, with the moments of ``g + weight_decay·w``, corrected for their bias.

    Kingma and Ba 2015, algorithm 1. Keras adds its epsilon before the correction of ``v``. After
    ``freeze_variance`` steps ``v̂`` stays as it is (1-bit Adam, Tang et al. 2021): a step is then linear in
    the gradients.
    """

    adapts: ClassVar[bool] = False

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    freeze_variance: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check("beta_1", self.beta_1, "0 or more, below 1", 0 <= self.beta_1 < 1)
        _check("beta_2", self.beta_2, "0 or more, below 1", 0 <= self.beta_2 < 1)
        _check("epsilon", self.epsilon, "more than 0", self.epsilon > 0)
        _check("weight_decay", self.weight_decay, "0 or more", self.weight_decay >= 0)
        if self.freeze_variance is not None:
            _check("freeze_variance", self.freeze_variance, "at least 1", self.freeze_variance >= 1)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("mean", "square")

    def corrections(self, step: Array, xp: Any) -> State:
        """Return ``1 − βᵗ`` of both moments; with ``freeze_variance``, also 1 if ``v`` is frozen, else 0."""
        # In float64: float32 keeps four digits of 1 − 0.999.
        if self.freeze_variance is None:
            return 1 - self.beta_1**step, 1 - self.beta_2**step
        seen = xp.minimum(step, self.freeze_variance)
        return 1 - self.beta_1**step, 1 - self.beta_2**seen, xp.where(step > seen, 1.0, 0.0)

    def direction(
        self, weight: Array, gradient: Array, state: State, corrections: State, *, adapted: bool, xp: Any
    ) -> Stepped:
        return self._direction(self.decayed(gradient, weight, adapted=adapted), state, corrections, xp)

    def _direction(self, gradient: Array, state: State, corrections: State, xp: Any) -> Stepped:
        mean = self.beta_1 * state[0] + (1 - self.beta_1) * gradient
        square = self.beta_2 * state[1] + (1 - self.beta_2) * (gradient * gradient)
        if self.freeze_variance is not None:
            square = xp.where(corrections[2] > 0, state[1], square)
        return (mean / corrections[0]) / (xp.sqrt(square / corrections[1]) + self.epsilon), (mean, square)

    def apply(self, weight: Array, direction: Array, state: State, rate: Array, *, adapted: bool) -> Stepped:
        return weight - direction * rate, state


@dataclass(frozen=True)
class AdamW(Adam):
    """``w -= rate·u`` along ``u = m̂ / (√v̂ + epsilon) + weight_decay·w``: decay outside of the moments.

    Loshchilov and Hutter 2019, algorithm 2.
    """

    def direction(
        self, weight: Array, gradient: Array, state: State, corrections: State, *, adapted: bool, xp: Any
    ) -> Stepped:
        direction, state = self._direction(gradient, state, corrections, xp)
        return self.decayed(direction, weight, adapted=adapted), state


@dataclass(frozen=True)
class Lamb(AdamW):
    """AdamW whose rate is scaled for each tensor: times ``φ(‖w‖) / ‖u‖``.

    ``φ`` clips to ``least_norm … largest_norm``. You et al. 2020, algorithm 2.
    """

    adapts: ClassVar[bool] = True

    epsilon: float = 1e-6
    least_norm: float = 0.0
    largest_norm: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("least_norm", self.least_norm, "0 or more", self.least_norm >= 0)
        if self.largest_norm is not None:
            expected = f"more than least_norm, {self.least_norm}"
            _check("largest_norm", self.largest_norm, expected, self.largest_norm > self.least_norm)

    def ratio(self, squares: Array, xp: Any) -> Array:
        norms = xp.sqrt(squares)
        weight, direction = xp.maximum(norms[0], self.least_norm), norms[1]
        if self.largest_norm is not None:
            weight = xp.minimum(weight, self.largest_norm)
        return _ratio_or_one(weight, direction, (weight == 0) | (direction == 0), xp)


NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315  # Jordan's: steepest at 0, so that small singular values grow fast
NEWTON_SCHULZ_STEPS = 5


def newton_schulz(matrix: Array, xp: Any) -> Array:
    """Return a matrix of the same singular vectors whose singular values are about 1, from 0.7 to 1.2.

    Singular values below a thousandth of the matrix's norm are left smaller. ``matrix``: float
    ``(rows, columns)``; a NaN in it makes all entries NaN. Jordan et al. 2024: ``X ← aX + (bA + cA²)X`` with
    ``A = XXᵀ``, from ``X = M/‖M‖``.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = xp.transpose(matrix) if is_tall else matrix  # XXᵀ is of the shorter side
    x = x / (xp.linalg.norm(x) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ xp.transpose(x)
        x = a * x + (b * square + c * (square @ square)) @ x
    return xp.transpose(x) if is_tall else x


@dataclass(frozen=True)
class Muon(AdamW):
    """``w -= rate·(scale·O(u) + weight_decay·w)`` for matrices, AdamW for all other tensors.

    ``O`` is :func:`newton_schulz`; ``v = momentum·v + g``; ``u = g + momentum·v`` (Nesterov), or ``v``. The
    slot ``mean`` of a matrix holds ``v``, its slot ``square`` stays 0. Jordan et al. 2024; the decay and the
    scale ``rms`` are of Liu et al. 2025 (Moonlight), section 2.2.

    ``scale``: "rms" is ``0.2·√max(rows, columns)``: the entries of an update have the mean square of AdamW's,
    whose learning rate and decay fit; "spectral" is ``√max(1, columns/rows)`` (Jordan; Keras' columns are the
    outputs of a layer, PyTorch's are the inputs). ``adamw``: see :meth:`matrix`.
    """

    momentum: float = 0.95
    nesterov: bool = True
    scale: Scale = "rms"
    adamw: str = EMBEDDINGS_AND_LOGITS

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("momentum", self.momentum, "0 or more, below 1", 0 <= self.momentum < 1)
        _check("scale", self.scale, "rms or spectral", self.scale in ("rms", "spectral"))
        _check("adamw", repr(self.adamw), "a regular expression", is_expression(self.adamw))

    def matrix(self, path: str, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return rows and columns of a tensor that is a matrix, ``None`` for one that AdamW updates.

        The last dimension is the columns, the others are the rows: a kernel ``(h, w, inputs, outputs)`` has
        ``h·w·inputs`` rows. Both are 2 or more, and the regular expression ``adamw`` does not match ``path``.
        """
        if len(shape) < 2 or re.search(self.adamw, path):
            return None
        rows, columns = math.prod(shape[:-1]), shape[-1]
        return (rows, columns) if min(rows, columns) > 1 else None

    def momentum_of(self, gradient: Array, state: State) -> Stepped:
        """Return what is orthogonalised of a matrix, and its new state."""
        velocity = self.momentum * state[0] + gradient
        return gradient + self.momentum * velocity if self.nesterov else velocity, (velocity, state[1])

    def along(self, orthogonal: Array, matrix: tuple[int, int], weight: Array, *, adapted: bool) -> Array:
        """Return the direction of a matrix's step, from its orthogonalised momentum, in any shape."""
        rows, columns = matrix
        scale = 0.2 * math.sqrt(max(matrix)) if self.scale == "rms" else math.sqrt(max(1, columns / rows))
        return self.decayed(scale * orthogonal, weight, adapted=adapted)


@dataclass(frozen=True)
class LossScaling:
    """A loss scale: doubled after ``growth_steps`` finite steps in a row, halved after a non-finite one.

    It stays between ``smallest`` and ``largest``: without a bound, losses that never overflow would double it
    until it is infinite.
    """

    initial: float = 2.0**15
    growth_steps: int = 2000
    smallest: ClassVar[float] = 2.0**-24
    largest: ClassVar[float] = 2.0**24

    def __post_init__(self) -> None:
        expected = f"{self.smallest} to {self.largest}"
        _check("initial", self.initial, expected, self.smallest <= self.initial <= self.largest)
        _check("growth_steps", self.growth_steps, "at least 1", self.growth_steps >= 1)

    def after(self, scale: Array, good_steps: Array, finite: Array, xp: Any) -> tuple[Array, Array]:
        """Return scale and number of finite steps since it last changed, after a step that was ``finite``."""
        none = xp.zeros_like(good_steps)
        good_steps = xp.where(finite, good_steps + 1, none)
        grows = good_steps == self.growth_steps
        larger = xp.minimum(scale * 2, self.largest)
        smaller = xp.maximum(scale / 2, self.smallest)
        scale = xp.where(finite, xp.where(grows, larger, scale), smaller)
        return scale, xp.where(grows, none, good_steps)
