"""Reducers inside ``tf.function``: the only file of commlib that imports TensorFlow."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.errors import InvalidArgument
from commlib.reducers import Reducer, make_reducer
from commlib.topology import Topology
from commlib.vectors import Float32


class DistributedGradients:
    """Averages the gradients of ``variables`` over all ranks of ``topology``.

    ``variables``: tf.Variables or Keras variables of static shape. ``config``: the name of a reducer and its
    options, ``{"name": "hitopk", "density": 0.01}``. All gradients travel as one float32 vector of ``size``
    entries.
    """

    def __init__(self, topology: Topology, variables: Sequence[Any], config: Mapping[str, Any]) -> None:
        self.topology = topology
        self._names = [variable.name for variable in variables]
        self._shapes = [tuple(variable.shape) for variable in variables]
        self._sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self._shapes]
        self.size = sum(self._sizes)
        self.reducer = self._make(config)

    def _make(self, config: Mapping[str, Any]) -> Reducer:
        options = dict(config)
        return make_reducer(options.pop("name"), self.topology, self.size, **options)

    def switch(self, config: Mapping[str, Any]) -> None:
        """Replace the reducer; what the old one held back goes into the first step of the new one.

        Takes effect in functions that are already traced, too. All ranks call it together.
        """
        residual = self.reducer.residual
        self.reducer = self._make(config)
        self.reducer.absorb(residual)

    def reduce(self, gradients: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the mean gradients, in the dtypes and shapes given, and whether the step counts.

        ``gradients`` come in the order of the variables; IndexedSlices are made dense. The second result is a
        scalar bool tensor: false where a NaN or an infinity on any rank voided the step on all of them.
        """
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is None:
                raise InvalidArgument(
                    f"gradients: {name} has none; every variable must take part in the loss"
                )
        tensors = [tf.convert_to_tensor(gradient) for gradient in gradients]
        flat = tf.concat([tf.cast(tf.reshape(tensor, [-1]), tf.float32) for tensor in tensors], axis=0)
        mean, finite = tf.numpy_function(self._reduce, [flat], [tf.float32, tf.bool], stateful=True)
        mean.set_shape([self.size])
        finite.set_shape([])
        parts = tf.split(mean, self._sizes)
        means = [
            tf.cast(tf.reshape(part, shape), tensor.dtype)
            for part, shape, tensor in zip(parts, self._shapes, tensors, strict=True)
        ]
        return means, finite

    def _reduce(self, flat: Float32) -> tuple[Float32, np.bool_]:
        mean = self.reducer.reduce(flat)
        assert self.reducer.last is not None
        return mean, np.bool_(self.reducer.last.finite)
