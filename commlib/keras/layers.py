"""A layer that normalizes by the batch of all ranks."""

import warnings
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from commlib.keras.optimizer import TIMEOUT_SECONDS
from commlib.keras.ranks import Ranks
from commlib.topology import Topology


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]  # Keras has no types
    """``keras.layers.BatchNormalization`` over the batches of all ranks, which make and call it together.

    While it trains, mean and variance are those of all samples, moving statistics are equal on all ranks, and
    gradients are those of one rank with the whole batch, once the optimizer has averaged them over ranks with
    equally large batches. Each call exchanges twice forward and twice backward, and waits for the others:
    all ranks need as many steps. ``timeout`` as for :class:`commlib.keras.DistributedOptimizer`; ``options``:
    those of Keras' layer.

    A model that is loaded or cloned has Keras' layer in its place.
    """

    def __init__(
        self, topology: Topology, *, timeout: float | None = TIMEOUT_SECONDS, **options: Any
    ) -> None:
        super().__init__(**options)
        self._ranks = Ranks(topology.world, timeout)  # of its own: no order among layers can go wrong

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Return Keras' layer, as the configuration has no ranks."""
        warnings.warn(
            "SyncBatchNormalization: made again as Keras' BatchNormalization, which exchanges nothing",
            stacklevel=2,
        )
        return keras.layers.BatchNormalization(**config)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Return mean and variance over all ranks: Keras' layer calls this where it trains."""
        weights = tf.ones_like(inputs)
        if mask is not None:
            weights *= tf.cast(mask, inputs.dtype)[..., None]
        axes = self._reduction_axes
        own = tf.stack([tf.reduce_sum(inputs * weights, axes), tf.reduce_sum(weights, axes)])
        total, count = tf.unstack(self._sum_over_ranks(own))
        mean = tf.math.divide_no_nan(total, count)
        shape = [1 if axis in axes else size for axis, size in enumerate(inputs.shape)]
        squares = tf.square(inputs - tf.reshape(mean, shape)) * weights
        squares = self._sum_over_ranks(tf.reduce_sum(squares, axes))
        return mean, tf.math.divide_no_nan(squares, count)

    def _sum_over_ranks(self, own: Any) -> Any:
        """Return the sum over ranks; its gradient is the sum of all ranks' gradients by it."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def total(own: Any) -> tuple[Any, Any]:
            return self._exchanged(own), self._exchanged

        return total(own)

    def _exchanged(self, own: Any) -> Any:
        total = tf.numpy_function(self._exchange, [own], own.dtype, stateful=True)
        total.set_shape(own.shape)
        return total

    def _exchange(self, own: npt.NDArray[Any]) -> npt.NDArray[Any]:
        (mean,) = self._ranks.average("the statistics of a batch", [own])
        return np.asarray(mean * self._ranks.size, own.dtype)
