"""Reducers inside ``tf.function``: the only file of commlib that imports TensorFlow."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from commlib.errors import InvalidArgument
from commlib.reducers import Passenger, Reducer, make_reducer
from commlib.topology import Topology
from commlib.vectors import Float32


class DistributedGradients:
    """Averages the gradients of ``variables`` over all ranks of ``topology``.

    ``variables``: tf.Variables or Keras variables of static shape. ``config``: the name of a reducer and its
    options, ``{"name": "hitopk", "density": 0.01}``. All gradients travel as one float32 vector of ``size``
    entries. ``reducer`` is there, and ``config`` is that of it.
    """

    def __init__(self, topology: Topology, variables: Sequence[Any], config: Mapping[str, Any]) -> None:
        self.topology = topology
        self._names = [variable.name for variable in variables]
        self._shapes = [tuple(variable.shape) for variable in variables]
        self._sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self._shapes]
        self.size = sum(self._sizes)
        self._passenger: Passenger | None = None
        self.reducer = self._make(config)

    @property
    def passenger(self) -> Passenger | None:
        """Whose numbers travel with the mean, wherever the reducer carries any (see ``carried``).

        All ranks set theirs together.
        """
        return self._passenger

    @passenger.setter
    def passenger(self, passenger: Passenger | None) -> None:
        self._passenger = passenger
        self._board()

    @property
    def carried(self) -> bool:
        """Whether the passenger's numbers arrive with each step; if not, they are the caller's to compute.

        It may change with ``switch``, and is then another in a function that has been traced before.
        """
        return self.reducer.passenger is not None

    def _board(self) -> None:
        if self.reducer.carries and self.reducer.passenger is not self._passenger:
            self.reducer.passenger = self._passenger

    def _make(self, config: Mapping[str, Any]) -> Reducer:
        self.config = dict(config)
        options = dict(config)
        return make_reducer(options.pop("name"), self.topology, self.size, **options)

    def switch(self, config: Mapping[str, Any]) -> None:
        """Replace the reducer; what the old one held back goes into the first step of the new one.

        Takes effect in functions that are already traced, too. All ranks call it together. The passenger
        changes over to a reducer that carries one, and is left aside by one that does not.
        """
        residual = self.reducer.residual
        self.reducer = self._make(config)
        self.reducer.absorb(residual)
        self._board()

    def reduce(self, gradients: Sequence[Any], weights: Sequence[Any] = ()) -> tuple[list[Any], Any]:
        """Return the mean gradients, in the dtypes and shapes given, and whether the step counts.

        ``gradients`` come in the order of the variables; IndexedSlices are made dense. The second result is a
        scalar bool tensor: false where a NaN or an infinity on any rank voided the step on all of them.
        ``weights``: what the passenger is to look at before, tensors or variables; they are not copied inside
        ``tf.function``.
        """
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is None:
                raise InvalidArgument(
                    f"gradients: {name} has none; every variable must take part in the loss"
                )
        tensors = [tf.convert_to_tensor(gradient) for gradient in gradients]
        flat = tf.concat([tf.cast(tf.reshape(tensor, [-1]), tf.float32) for tensor in tensors], axis=0)
        inputs = [flat, *map(tf.convert_to_tensor, weights)]
        mean, finite = tf.numpy_function(self._reduce, inputs, [tf.float32, tf.bool], stateful=True)
        mean.set_shape([self.size])
        finite.set_shape([])
        parts = tf.split(mean, self._sizes)
        means = [
            tf.cast(tf.reshape(part, shape), tensor.dtype)
            for part, shape, tensor in zip(parts, self._shapes, tensors, strict=True)
        ]
        return means, finite

    def _reduce(self, flat: Float32, *weights: npt.ArrayLike) -> tuple[Float32, np.bool_]:
        passenger = self.reducer.passenger
        if passenger is not None:
            passenger.look([np.asarray(weight) for weight in weights])
        mean = self.reducer.reduce(flat)
        if passenger is not None:
            passenger.look([])  # TensorFlow copies a variable that it updates while somebody holds its memory
        assert self.reducer.last is not None
        return mean, np.bool_(self.reducer.last.finite)


class DistributedOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]  # Keras has no types
    """Gives ``optimizer`` the mean gradients of all ranks, for ``model.compile`` and ``model.fit``.

    ``topology`` and ``config`` as for :class:`DistributedGradients`, which ``gradients`` is once the model is
    built. A step that is void on any rank changes no weight on all of them. The ranks begin with the same
    weights, and make equally many steps; XLA compiles no such step: ``model.compile(jit_compile=False)``.
    """

    def __init__(
        self, optimizer: Any, topology: Topology, config: Mapping[str, Any], name: str = "distributed"
    ) -> None:
        if keras.config.dtype_policy().name == "mixed_float16":
            raise InvalidArgument(
                "dtype policy: expected one without a loss scale, which each rank would change alone, "
                "got mixed_float16: take mixed_bfloat16, or a loop of your own with pto.keras.LossScale"
            )
        super().__init__(learning_rate=0.0, name=name)  # not used: that of the optimizer inside is
        self.inner_optimizer = optimizer
        self.gradients: DistributedGradients | None = None
        self._made_with = (topology, config)

    def build(self, variables: Sequence[Any]) -> None:
        """Make the state of ``variables``; all ranks call it together."""
        if self.gradients is not None:
            return
        self.inner_optimizer.build(variables)
        self.gradients = DistributedGradients(self._made_with[0], variables, self._made_with[1])
        self._trainable_variables = list(variables)
        self.built = True

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce the gradients and update the variables with their means."""
        if self.gradients is None:
            if trainable_variables is None:
                raise InvalidArgument("trainable_variables: expected those of the gradients, got none")
            with tf.init_scope():
                self.build(list(trainable_variables))
        assert self.gradients is not None
        means, finite = self.gradients.reduce(list(grads))
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        tf.cond(finite, lambda: self._apply_means(means, variables), lambda: tf.constant(False))

    def _apply_means(self, means: Sequence[Any], variables: Sequence[Any]) -> Any:
        self.inner_optimizer.apply(means, variables)
        return tf.constant(True)

    @property
    def variables(self) -> list[Any]:
        """Those of the optimizer inside."""
        return list(self.inner_optimizer.variables)

    @property
    def learning_rate(self) -> Any:
        """That of the optimizer inside."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self) -> Any:
        """The steps that counted."""
        return self.inner_optimizer.iterations

    def get_config(self) -> dict[str, Any]:
        """Refuse: ranks are of one job, and are not saved."""
        raise NotImplementedError("save the model with include_optimizer=False, or the inner optimizer alone")
