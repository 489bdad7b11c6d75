"""Sharded updates: each rank updates a slice of the weights and stores its optimizer state (ZeRO-1, 2020).

>>> from commlib.transport import simulated
>>> def train(comm):
...     weights = keras.Variable(tf.ones(6), name="weights")
...     update = ShardedUpdate(keras.optimizers.SGD(0.5, momentum=0.9), comm)
...     update.build([weights])
...     update.apply([tf.ones(6)])
...     return sum(slot.shape[0] for slot in update.slots), weights.numpy().tolist()
>>> simulated.run(train, world_size=2)[0]  # three of six velocities, and all weights
(3, [0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from pto.comm import Array, Comm, agree_on
from pto.errors import InvalidArgument
from pto.keras import (
    CHANGE_GRADIENTS,
    LayerWise,
    Part,
    adapted_variables,
    advance,
    matrices_of,
    orthogonalised,
    path_of,
    rule_at,
)
from pto.norms import Float64, SumsExchange, sum_of_squares
from pto.partition import Partition, Piece, by_slices, by_tensor
from pto.rules import Rule, Sgd

Float32 = npt.NDArray[np.float32]
State = Mapping[str, Array]

ITERATIONS = "iterations"


class Shards:
    """The parts of tensors that each rank of ``comm`` has, and what ranks exchange of them.

    ``own``: this rank's pieces of tensors, in their order; there may be none. All ranks call each method
    together.
    """

    def __init__(self, partition: Partition, comm: Comm) -> None:
        self.sizes = partition.sizes
        self.own: tuple[Piece, ...] = partition.pieces[comm.rank]
        self._comm = comm
        self._sums = SumsExchange(partition, comm, lists=2)
        self._part_ends = np.cumsum(partition.loads())
        # In the order of the ranks, the pieces of a tensor follow each other.
        order = list(dict.fromkeys(piece.tensor for own in partition.pieces for piece in own))
        ends = np.cumsum([self.sizes[tensor] for tensor in order])
        self._places = [slice(0, 0)] * len(self.sizes)
        for tensor, end in zip(order, ends, strict=True):
            self._places[tensor] = slice(int(end) - self.sizes[tensor], int(end))

    def squares(self, weights: Sequence[Array], directions: Sequence[Array]) -> Float64:
        """Return the sums of squares of the whole tensors, float64 ``(2, tensors)``, on every rank.

        Each list has this rank's ``own`` pieces. One all-gather of eight bytes for each piece of each list.
        """
        own = [[sum_of_squares(piece) for piece in pieces] for pieces in (weights, directions)]
        return self._sums.gather(np.array(own, np.float64))

    def gather(self, *own: Float32) -> list[Float32]:
        """Return the whole tensors, flat float32, from all ranks' ``own`` pieces: views of one new array.

        One all-gather.
        """
        flat = np.empty(sum(self.sizes), np.float32)
        parts = np.split(flat, self._part_ends[:-1])
        if own:
            np.concatenate(own, out=parts[self._comm.rank])
        if self._comm.size > 1:
            self._comm.allgather(parts[self._comm.rank], parts)
        return [flat[place] for place in self._places]


def rule_of(optimizer: Any) -> Rule:
    """Return the rule of an SGD of Keras, or of an optimizer of :mod:`pto.keras`."""
    if isinstance(optimizer, LayerWise):
        return optimizer.rule
    if isinstance(optimizer, keras.optimizers.SGD):
        return Sgd(optimizer.momentum, optimizer.nesterov)
    raise InvalidArgument(f"optimizer: expected an SGD or one of pto.keras, got {type(optimizer).__name__}")


def state_of(optimizer: Any, variables: Sequence[Any]) -> State:
    """Return the state of a built optimizer as :meth:`ShardedUpdate.full_state` does."""
    arrays = [[slot.numpy() for slot in slots] for slots in _slots_of(optimizer)]
    return _named(rule_of(optimizer), variables, optimizer, arrays)


def restore(optimizer: Any, variables: Sequence[Any], state: State) -> None:
    """Set the state of a built optimizer to one of :func:`state_of` or :meth:`ShardedUpdate.full_state`."""
    arrays = _checked(rule_of(optimizer), variables, state)
    for slots, values in zip(_slots_of(optimizer), arrays, strict=True):
        for slot, value in zip(slots, values, strict=True):
            slot.assign(value)
    optimizer.iterations.assign(state[ITERATIONS])


class ShardedUpdate:
    """Applies the rule of ``optimizer`` to this rank's part of the weights, then gathers the weights.

    A part is an equal slice of all weights; for Muon, which needs whole matrices, tensors of balanced work.

    ``optimizer``: an SGD of Keras, or one of :mod:`pto.keras`, not built, so that it has no slots of its own.
    Its learning rate (or schedule) is used, and its iterations are counted. Each rank stores the slots of its
    part, and the weights are bitwise the same on all ranks after each step. A step makes one all-gather of
    the weights, and before it, for LARS and LAMB, one of 16 bytes for each tensor or piece of one. All ranks
    call ``build``, ``apply``, ``full_state`` and ``load_full_state`` together, and skip a step together.
    """

    def __init__(self, optimizer: Any, comm: Comm) -> None:
        self.optimizer = optimizer
        self.rule = rule_of(optimizer)
        self.built = False
        self._comm = comm
        if optimizer.built:
            raise InvalidArgument(f"optimizer: expected one that is not built, got {optimizer.name}, built")
        of_sgd = () if isinstance(optimizer, LayerWise) else ("weight_decay",)
        for setting in (*CHANGE_GRADIENTS, "use_ema", *of_sgd):
            if value := getattr(optimizer, setting):
                raise InvalidArgument(f"{setting}: expected none in a sharded update, got {value}")

    def build(self, variables: Sequence[Any]) -> None:
        """Plan the slices of float32 ``variables`` and create this rank's slots, before a step is traced."""
        paths = [path_of(variable) for variable in variables]
        for path, variable in zip(paths, variables, strict=True):
            if tf.as_dtype(variable.dtype) != tf.float32:
                raise InvalidArgument(f"{path}: expected float32 in a sharded update, got {variable.dtype}")
            if paths.count(path) > 1:
                raise InvalidArgument(f"{path}: expected one variable of this path, got {paths.count(path)}")
        shapes = [str(tuple(variable.shape)) for variable in variables]
        agree_on(self._comm, "variables", dict(zip(paths, shapes, strict=True)))
        self._variables = list(variables)
        sizes = [int(np.prod(variable.shape)) for variable in variables]
        self._matrices = matrices_of(self.rule, variables)
        if any(self._matrices):
            work = [size * min(each or (1,)) for size, each in zip(sizes, self._matrices, strict=True)]
            self._shards = Shards(by_tensor(sizes, self._comm.size, work), self._comm)
        else:
            self._shards = Shards(by_slices(sizes, self._comm.size), self._comm)
        is_ours = isinstance(self.optimizer, LayerWise)
        self._adapted = adapted_variables(self.optimizer, paths) if is_ours else [False] * len(paths)
        own = [piece.high - piece.low for piece in self._shards.own]
        self._slots = [
            [tf.Variable(tf.zeros(size), trainable=False) for size in own] for _ in self.rule.slots
        ]
        self.built = True

    @property
    def learning_rate(self) -> Any:
        """A variable, or the current value of its schedule."""
        return self.optimizer.learning_rate

    @property
    def momentum(self) -> Any:
        """A variable; ``None`` if the optimizer has no momentum, or for an SGD of Keras."""
        return self.optimizer.momentum if isinstance(self.optimizer, LayerWise) else None

    @property
    def iterations(self) -> Any:
        return self.optimizer.iterations

    @property
    def variables(self) -> list[Any]:
        """The variables that are equal on all ranks: iterations and learning rate."""
        return list(self.optimizer.variables)

    @property
    def slots(self) -> list[Any]:
        """The slots of this rank: flat float32 variables, one for each slot of the rule and piece."""
        return [slot for slots in self._slots for slot in slots]

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any] | None = None) -> None:
        """Update the variables with mean gradients, equal on all ranks, in the order of ``build``."""
        self._expect_built(variables)
        parts = [
            Part(
                _cut(self._variables[piece.tensor], piece),
                _cut(gradients[piece.tensor], piece),
                tuple(tf.convert_to_tensor(slots[number]) for slots in self._slots),
                self._adapted[piece.tensor],
                self._matrices[piece.tensor],
            )
            for number, piece in enumerate(self._shards.own)
        ]
        rule = rule_at(self.rule, self.momentum, tf.float32)
        updated = advance(rule, parts, self.learning_rate, self.iterations, self._squares, orthogonalised)
        for number, (_, state) in enumerate(updated):
            for slots, value in zip(self._slots, state, strict=True):
                slots[number].assign(value)
        own, dtypes = [weight for weight, _ in updated], [tf.float32] * len(self._variables)
        tensors = tf.numpy_function(self._shards.gather, own, dtypes, stateful=True)
        # For one tensor it returns the tensor and not a list.
        for variable, tensor in zip(self._variables, tf.nest.flatten(tensors), strict=True):
            weight = tf.reshape(tensor, variable.shape)
            variable.assign(weight if variable.constraint is None else variable.constraint(weight))
        self.iterations.assign_add(1)

    def full_state(self) -> State:
        """Return iterations and whole slots: float32 of the variable's shape, under ``path/name``."""
        self._expect_built()
        arrays = [self._shards.gather(*(slot.numpy() for slot in slots)) for slots in self._slots]
        return _named(self.rule, self._variables, self.optimizer, arrays)

    def load_full_state(self, state: State) -> None:
        """Restore this rank's slice of a :meth:`full_state`, of any world size, or of a :func:`state_of`."""
        self._expect_built()
        for slots, arrays in zip(self._slots, _checked(self.rule, self._variables, state), strict=True):
            for slot, piece in zip(slots, self._shards.own, strict=True):
                slot.assign(arrays[piece.tensor].reshape(-1)[piece.low : piece.high])
        self.iterations.assign(state[ITERATIONS])

    def _expect_built(self, variables: Sequence[Any] | None = None) -> None:
        if not self.built:
            raise InvalidArgument("build: expected a call of it before all others, got none")
        if variables is not None and list(map(id, variables)) != list(map(id, self._variables)):
            raise InvalidArgument("variables: expected those of build, in its order, got others")

    def _squares(self, weights: list[Any], directions: list[Any]) -> Any:
        squares = tf.numpy_function(self._measured, [*weights, *directions], tf.float64, stateful=True)
        squares = tf.ensure_shape(squares, (2, len(self._variables)))
        return tf.gather(squares, np.array([piece.tensor for piece in self._shards.own], np.int64), axis=1)

    def _measured(self, *pieces: Float32) -> Float64:
        half = len(pieces) // 2
        return self._shards.squares(pieces[:half], pieces[half:])


def _cut(tensor: Any, piece: Piece) -> Any:
    return tf.reshape(tf.convert_to_tensor(tensor), [-1])[piece.low : piece.high]


def _slots_of(optimizer: Any) -> list[list[Any]]:
    if isinstance(optimizer, LayerWise):
        return optimizer.slots
    return [optimizer.momentums] if optimizer.momentum else []


def _named(rule: Rule, variables: Sequence[Any], optimizer: Any, arrays: Sequence[Sequence[Array]]) -> State:
    state: dict[str, Array] = {ITERATIONS: optimizer.iterations.numpy()}
    for name, values in zip(rule.slots, arrays, strict=True):
        for variable, value in zip(variables, values, strict=True):
            state[f"{path_of(variable)}/{name}"] = value.reshape(variable.shape)
    return state


def _checked(rule: Rule, variables: Sequence[Any], state: State) -> list[list[Array]]:
    """Return for each slot of the rule the arrays of all variables; raise for a state of others."""
    shapes = {f"{path_of(variable)}/{name}": variable.shape for name in rule.slots for variable in variables}
    expected = {ITERATIONS: (), **{key: tuple(shape) for key, shape in shapes.items()}}
    for key in [*expected, *state]:
        here, there = expected.get(key), np.shape(state[key]) if key in state else None
        if here != there:
            raise InvalidArgument(f"state: expected {key} of shape {here}, got {there}")
    return [[state[f"{path_of(variable)}/{name}"] for variable in variables] for name in rule.slots]
