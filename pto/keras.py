"""LARS, LAMB, Muon, Adam and loss scaling for Keras. Only this file and ``pto/sharded.py`` import TensorFlow.

>>> optimizer = LARS(learning_rate=2.0, weight_decay=5e-5)
>>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
>>> model.compile(optimizer=optimizer, loss="mse")
>>> _ = model.fit(np.ones((8, 4)), np.zeros((8, 3)), verbose=0)
>>> keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)).rule == optimizer.rule
True
"""

import re
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from pto import rules
from pto.comm import Array, Comm
from pto.errors import InvalidArgument
from pto.norms import Float64 as Squares
from pto.norms import Norms
from pto.parallel import How, Parallel, parallel

CHANGE_GRADIENTS = (
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)
"""The settings of Keras' optimizers that modify the gradients of a step."""


class GivenSquares:
    """Sums of squares that are computed before a step.

    ``give`` them before each step, which reads them from a variable. They are NaN until then. For LARS, whose
    norms are those of weights and mean gradients; LAMB's are of moments, which the step itself makes.
    """

    def __init__(self, tensors: int) -> None:
        self.variable = tf.Variable(tf.fill((2, tensors), tf.constant(np.nan, tf.float64)), trainable=False)

    def give(self, squares: Squares) -> None:
        """Take the sums, float64 ``(2, tensors)``: those of the weights, then those of the mean gradient."""
        self.variable.assign(squares)


@dataclass(frozen=True)
class Part:
    """The inputs of a step for one tensor, or a piece of one; ``adapted``: it has decay and a ratio.

    ``matrix``: rows and columns of a tensor that Muon orthogonalises, which is whole.
    """

    weight: Any
    gradient: Any
    state: rules.State
    adapted: bool
    matrix: tuple[int, int] | None = None


def advance(
    rule: rules.Rule,
    parts: Sequence[Part],
    learning_rate: Any,
    iterations: Any,
    measure: Callable[[list[Any], list[Any]], Any],
    orthogonalise: Callable[[list[Any]], list[Any]],
) -> list[tuple[Any, rules.State]]:
    """Return the new weight and state of every part, in a step after ``iterations`` others.

    ``measure(weights, directions)`` returns the sums of squares, float64 ``(2, len(parts))``, of the tensors
    that the parts belong to. It is called once, if the rule has ratios. ``orthogonalise(matrices)`` returns
    :func:`pto.rules.newton_schulz` of each matrix. It is called once for Muon, if there are any.
    """
    corrections = rule.corrections(tf.cast(iterations + 1, tf.float64), tf)
    directions, states = [], []
    for part in parts:
        own = tuple(tf.cast(value, part.weight.dtype) for value in corrections)
        if isinstance(rule, rules.Muon) and part.matrix is not None:
            direction, state = rule.momentum_of(part.gradient, part.state)
        else:
            direction, state = rule.direction(
                part.weight, part.gradient, part.state, own, adapted=part.adapted, xp=tf
            )
        directions.append(direction)
        states.append(state)
    matrices = {number: part.matrix for number, part in enumerate(parts) if part.matrix is not None}
    if isinstance(rule, rules.Muon) and matrices:  # a rank's part of a sharded update may have none
        found = orthogonalise([tf.reshape(directions[number], shape) for number, shape in matrices.items()])
        for (number, shape), each in zip(matrices.items(), found, strict=True):
            weight, adapted = parts[number].weight, parts[number].adapted
            directions[number] = rule.along(tf.reshape(each, weight.shape), shape, weight, adapted=adapted)
    ratios = rule.ratio(measure([part.weight for part in parts], directions), tf) if rule.adapts else None
    updated = []
    for number, (part, direction, state) in enumerate(zip(parts, directions, states, strict=True)):
        rate = tf.cast(learning_rate, part.weight.dtype)
        if ratios is not None and part.adapted:
            rate *= tf.cast(ratios[number], part.weight.dtype)
        updated.append(rule.apply(part.weight, direction, state, rate, adapted=part.adapted))
    return updated


def rule_at(rule: rules.Rule, momentum: Any, dtype: Any) -> rules.Rule:
    """Return the rule with the momentum of this step; ``None`` leaves the rule as it is."""
    if momentum is None:
        return rule
    changed = copy(rule)
    object.__setattr__(changed, "momentum", tf.cast(momentum, dtype))  # not checked: a symbolic value
    return changed


def adapted_variables(optimizer: "LayerWise", paths: Sequence[str]) -> list[bool]:
    """Return for each variable whether it has decay and a ratio; warn if ``exclude`` matches all or none."""
    rule, exclude = optimizer.rule, optimizer.exclude
    if not rule.adapts and not rule.weight_decay:
        return [False] * len(paths)
    adapted = [exclude is None or not re.search(exclude, path) for path in paths]
    if len(set(adapted)) != 1 or (adapted[0] and exclude in (None, rules.BIAS_AND_NORMALISATION)):
        return adapted
    variables = f"the {len(paths)} variables ({paths[0]}, …)"
    outcome = f"all of {variables}: none gets weight decay or a ratio"
    if adapted[0]:
        outcome = f"none of {variables}: all get weight decay and a ratio"
    warnings.warn(f"exclude: {exclude!r} matches {outcome}", stacklevel=2)
    return adapted


def orthogonalised(matrices: Sequence[Any]) -> list[Any]:
    """Return :func:`pto.rules.newton_schulz` of each matrix, computed by TensorFlow on this rank."""
    return [rules.newton_schulz(matrix, tf) for matrix in matrices]


def matrices_of(rule: rules.Rule, variables: Sequence[Any]) -> list[tuple[int, int] | None]:
    """Return for each variable the rows and columns of the matrix that Muon takes it as, if it does."""
    if not isinstance(rule, rules.Muon):
        return [None] * len(variables)
    found = [rule.matrix(path_of(variable), tuple(variable.shape)) for variable in variables]
    if not any(found):
        of = f"{len(variables)} variables ({path_of(variables[0])}, …)" if variables else "no variables"
        expected = "a matrix whose path does not match it, for Muon to orthogonalise"
        raise InvalidArgument(f"adamw: expected {expected}; got {rule.adamw!r}, and none in {of}")
    return found


def path_of(variable: Any) -> str:
    """Return the path of a Keras variable, or the name of a TensorFlow variable."""
    return str(getattr(variable, "path", variable.name))


class LayerWise(keras.optimizers.Optimizer):  # type: ignore[misc]  # Keras has no types
    """Base of the optimizers, which compute the ratios of all variables at once.

    ``values`` and ``options``: the settings of the rule, in its order or by name; ``options`` also: those of
    every Keras optimizer.

    ``norms`` gives the sums of squares: a :class:`pto.norms.Norms` computes them on all ranks together, in
    float64, bitwise the same on all of them; :class:`GivenSquares` has them from before the step; with
    ``None`` TensorFlow computes them on this rank, in float32: for one process, or equal GPUs with the same
    results. The kind is fixed when a step is traced; the Norms object may change between steps. XLA cannot
    compile a step with Norms: ``model.compile(jit_compile=False)``. ``norms`` is not saved.

    ``momentum``: a variable that may be assigned between steps; ``None`` if the rule has no momentum.
    """

    rule_type: ClassVar[type[rules.Sgd | rules.Adam]]
    rate: ClassVar[float] = 0.001
    """The learning rate, unless another is given."""

    def __init__(
        self,
        learning_rate: Any = None,
        *values: Any,
        exclude: str | None = rules.BIAS_AND_NORMALISATION,
        norms: Norms | GivenSquares | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        own = {each.name: options.pop(each.name) for each in fields(self.rule_type) if each.name in options}
        rule = self.rule_type(*values, **own)
        rate = self.rate if learning_rate is None else learning_rate
        name = name or type(self).__name__.lower()
        super().__init__(rate, weight_decay=rule.weight_decay, name=name, **options)
        if not rules.is_expression(exclude or ""):
            raise InvalidArgument(f"exclude: expected a regular expression, got {exclude!r}")
        if isinstance(rule, rules.Lamb) and isinstance(norms, GivenSquares):
            raise InvalidArgument("norms: expected Norms or None, as LAMB's are of moments, got GivenSquares")
        self.rule = rule
        self.exclude = exclude
        self.norms = norms
        momentum = getattr(rule, "momentum", 0.0)
        self.momentum = tf.Variable(momentum, trainable=False, dtype=tf.float32) if momentum else None

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        if tf.distribute.has_strategy():
            strategy = type(tf.distribute.get_strategy()).__name__
            raise InvalidArgument(f"{self.name}: expected one process a rank, got tf.distribute's {strategy}")
        super().build(variables)
        self.slots = [self.add_optimizer_variables(variables, name) for name in self.rule.slots]
        self._adapted = adapted_variables(self, [path_of(variable) for variable in variables])
        self._matrices = matrices_of(self.rule, variables)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Raise: the argument ``exclude`` names the variables without weight decay and ratio."""
        raise InvalidArgument("exclude_from_weight_decay: expected the argument exclude instead")

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of this optimizer, without ``norms``."""
        return {**super().get_config(), **asdict(self.rule), "exclude": self.exclude}

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        """Do nothing in place of Keras' weight decay: the rules decay the weights, before the ratio."""

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        """Update all variables; Keras calls it after clipping, unscaling and accumulating the gradients."""
        numbers = [self._get_variable_index(variable) for variable in trainable_variables]
        given = sorted(zip(numbers, trainable_variables, grads, strict=True), key=lambda each: each[0])
        parts = [
            Part(
                tf.convert_to_tensor(variable),
                tf.cast(tf.convert_to_tensor(gradient), variable.dtype),  # IndexedSlices become dense
                tuple(tf.convert_to_tensor(slot[number]) for slot in self.slots),
                self._adapted[number],
                self._matrices[number],
            )
            for number, variable, gradient in given
        ]
        rule = rule_at(self.rule, self.momentum, trainable_variables[0].dtype)
        updated = advance(rule, parts, learning_rate, self.iterations, self._squares, self._orthogonalised)
        for (number, variable, _), (weight, state) in zip(given, updated, strict=True):
            self.assign(variable, weight)
            for slot, value in zip(self.slots, state, strict=True):
                self.assign(slot[number], value)

    _orthogonalised = staticmethod(orthogonalised)

    def _squares(self, weights: list[Any], directions: list[Any]) -> Any:
        if self.norms is None:
            # l2_loss is half the sum of squares, and needs no array for the squares.
            halves = [tf.nn.l2_loss(tf.cast(tensor, tf.float32)) for tensor in [*weights, *directions]]
            return tf.cast(tf.reshape(2 * tf.stack(halves), (2, len(weights))), tf.float64)
        if len(weights) != len(self._adapted):
            raise InvalidArgument(
                f"norms: expected gradients of all {len(self._adapted)} variables, got {len(weights)}"
            )
        if isinstance(self.norms, GivenSquares):
            return self.norms.variable.value()
        squares = tf.numpy_function(self._measured, [*weights, *directions], tf.float64, stateful=True)
        return tf.ensure_shape(squares, (2, len(weights)))

    def _measured(self, *tensors: Array) -> Squares:
        half = len(tensors) // 2
        if self.norms is None or isinstance(self.norms, GivenSquares):
            got = type(self.norms).__name__
            raise InvalidArgument(f"norms: expected Norms, as when this step was traced, got {got}")
        return self.norms.squares(tensors[:half], tensors[half:])


@keras.saving.register_keras_serializable(package="cloudtrain")
class SGD(LayerWise):
    """Momentum SGD as in Keras, except that weight decay is part of the gradient.

    ``momentum``, ``nesterov``, ``weight_decay``: see :class:`pto.rules.Sgd`; ``exclude`` and ``options`` as
    in :class:`LARS`.
    """

    rule_type = rules.Sgd
    rate = 0.01


@keras.saving.register_keras_serializable(package="cloudtrain")
class ADAM(LayerWise):
    """Adam as in its paper, with weight decay as part of the gradient.

    ``beta_1``, ``beta_2``, ``epsilon``, ``weight_decay``, ``freeze_variance``: see :class:`pto.rules.Adam`;
    ``exclude`` and ``options`` as in :class:`LARS`.
    """

    rule_type = rules.Adam


@keras.saving.register_keras_serializable(package="cloudtrain")
class ADAMW(ADAM):
    """Adam with decoupled weight decay, see :class:`pto.rules.AdamW`."""

    rule_type = rules.AdamW


@keras.saving.register_keras_serializable(package="cloudtrain")
class LARS(LayerWise):
    """Momentum SGD whose rate is scaled for each variable, for large batches (You et al. 2017).

    ``weight_decay``, ``trust``, ``epsilon``, ``momentum``, ``nesterov``: see :class:`pto.rules.Lars`.
    Variables whose path matches the regular expression ``exclude`` have neither a scaled rate nor weight
    decay. ``options``: those of every Keras optimizer.
    """

    rule_type = rules.Lars
    rate = 1.0


@keras.saving.register_keras_serializable(package="cloudtrain")
class LAMB(LayerWise):
    """Adam whose rate is scaled for each variable, for large batches (You et al. 2020).

    ``weight_decay``, ``beta_1``, ``beta_2``, ``epsilon``, ``least_norm``, ``largest_norm``,
    ``freeze_variance``: see :class:`pto.rules.Lamb`; ``exclude`` and ``options`` as in :class:`LARS`.

    ``keras.optimizers.Lamb`` is another algorithm if weights decay: it subtracts
    ``learning_rate·weight_decay·w`` first and computes the ratio from Adam's update without decay, so its
    decay is not scaled with the layer, and not part of the norm in the ratio.
    """

    rule_type = rules.Lamb


@keras.saving.register_keras_serializable(package="cloudtrain")
class MUON(LayerWise):
    """Matrices along their orthogonalised momentum, the rest by AdamW (Jordan et al. 2024).

    ``momentum``, ``nesterov``, ``scale``, ``adamw``, ``beta_1``, ``beta_2``, ``epsilon``, ``weight_decay``,
    ``freeze_variance``: see :class:`pto.rules.Muon`; ``exclude`` (of decay) and ``options`` as in
    :class:`LARS`. ``comm``: of ranks that all apply the same mean gradients. They orthogonalise in parts or
    locally, as ``newton_schulz`` says (``how`` of :func:`pto.parallel`); the bits are the same. ``build`` and
    the steps are then collective, and XLA cannot compile them. ``None``: this rank orthogonalises everything
    in its graph. ``comm`` is not saved.

    ``keras.optimizers.Muon`` was another algorithm in each of Keras 3.10 to 3.15, gives convolutions to Adam,
    and cannot share the work.
    """

    rule_type = rules.Muon

    def __init__(
        self,
        learning_rate: Any = None,
        *,
        comm: Comm | None = None,
        newton_schulz: How = "auto",
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, **options)
        self.comm, self.newton_schulz = comm, newton_schulz
        self.shared: Parallel | None = None

    def build(self, variables: Sequence[Any]) -> None:
        is_new = not self.built
        super().build(variables)
        if is_new and self.comm is not None and self.comm.size > 1:
            pairs = zip(self._matrices, variables, strict=True)
            zeros = [np.zeros(m, tf.as_dtype(v.dtype).as_numpy_dtype) for m, v in pairs if m is not None]
            self.shared = parallel(
                orthogonalisation,
                zeros,
                self.comm,
                lambda matrix: matrix.size * min(matrix.shape),  # multiplications, within a factor of 1.5
                how=self.newton_schulz,
            )

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "newton_schulz": self.newton_schulz}

    def _orthogonalised(self, matrices: Sequence[Any]) -> list[Any]:
        if self.shared is None:
            return orthogonalised(matrices)
        shared, dtypes = self.shared, [matrix.dtype for matrix in matrices]
        found = tf.numpy_function(lambda *given: shared(given), matrices, dtypes, stateful=True)
        # For one matrix it returns the tensor and not a list.
        pairs = zip(tf.nest.flatten(found), matrices, strict=True)
        return [tf.ensure_shape(each, matrix.shape) for each, matrix in pairs]


def orthogonalisation(matrix: Array) -> Array:
    """Return the matrix orthogonalised, from and to memory of the host."""
    return np.asarray(rules.newton_schulz(tf.constant(matrix), tf))


class LossScale:
    """A loss scale that is the same on all ranks, as they all update it with the same flag.

    Multiply the loss with :meth:`scaled`, divide the gradients with :meth:`unscaled` before they are reduced
    (so that a reducer's residual has one scale), and call :meth:`update` with whether the step was finite.
    ``variables``: its state, for checkpoints: the scale, float32, and the finite steps since it changed.
    """

    def __init__(self, scaling: rules.LossScaling | None = None) -> None:
        self.scaling = scaling or rules.LossScaling()
        self.scale = keras.Variable(self.scaling.initial, dtype="float32", trainable=False, name="loss_scale")
        self.good_steps = keras.Variable(0, dtype="int64", trainable=False, name="good_steps")

    @property
    def variables(self) -> list[Any]:
        return [self.scale, self.good_steps]

    def scaled(self, loss: Any) -> Any:
        """Return the loss times the scale, float32."""
        return tf.cast(loss, tf.float32) * self.scale.value

    def unscaled(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients divided by the scale, float32; IndexedSlices and ``None`` stay such."""
        return [self._unscaled(gradient) for gradient in gradients]

    def update(self, finite: Any) -> None:
        """Set the scale for the next step; ``finite``: whether this one was finite, the same on all ranks."""
        scale, good_steps = self.scaling.after(self.scale.value, self.good_steps.value, finite, tf)
        self.scale.assign(scale)
        self.good_steps.assign(good_steps)

    def _unscaled(self, gradient: Any) -> Any:
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            values = self._unscaled(gradient.values)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        # float16 has neither the range of every scale nor that of small unscaled gradients.
        return tf.cast(gradient, tf.float32) / self.scale.value
