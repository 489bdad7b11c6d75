"""What ranks exchange besides gradients: where they are, variables, metrics, and statistics of batches."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from commlib.agreement import differences, digest
from commlib.errors import RanksDisagree
from commlib.topology import Topology
from commlib.transport.base import Closing, Communicator
from commlib.transport.watchdog import Watchdog

TIMEOUT_SECONDS = 300.0


class Ranks(Closing):
    """All ranks of ``world``, by a communicator of its own, apart from the gradients'.

    All ranks make it together. Ranks that come to different exchanges raise ``RanksDisagree``. ``seconds``
    bounds how long a rank waits for the others; ``None``: without bound. ``close`` frees the communicator.
    """

    def __init__(self, world: Communicator, seconds: float | None) -> None:
        self._comm = world.split(0)
        self.rank, self.size = world.rank, world.size
        watchdog = Watchdog() if seconds is None else self._comm.watchdog(seconds)
        self.waiting = watchdog.waiting  # a context of a place, which waits no longer than it may

    def close(self) -> None:
        self._comm.close()

    def gather(self, place: str, value: Any) -> list[Any]:
        """Return every rank's picklable ``value``; ``RanksDisagree`` where they are not all at ``place``."""
        with self.waiting(place):
            rows = self._comm.allgather_objects((place, value))
        if any(row[0] != place for row in rows):
            apart = differences([{"the next exchange": row[0]} for row in rows])
            raise RanksDisagree(
                f"the ranks are not at the same point of training: {apart}; "
                "expected equal numbers of steps and epochs, and callbacks that stop all ranks or none"
            )
        return [row[1] for row in rows]

    def broadcast(self, variables: Sequence[Any]) -> None:
        """Give the variables the values of rank 0."""
        place = "a broadcast of variables"
        shapes = [tuple(variable.shape) for variable in variables]  # names differ in a process' second model
        everywhere = self.gather(place, shapes)
        if any(others != shapes for others in everywhere):
            named = [{f"the shape of variable {n}": each for n, each in enumerate(of)} for of in everywhere]
            first = differences([{"number": len(each), **each} for each in named])
            raise RanksDisagree(f"variables: expected equal shapes on all ranks: {first.split('; ')[0]}")
        for variable in variables:
            value = self.gather(place, variable.numpy() if self.rank == 0 else None)[0]
            if self.rank > 0:
                variable.assign(value)

    def differing(self, variables: Sequence[Any]) -> dict[int, list[int]]:
        """Return, by the number of each variable that differs, the ranks whose values are not rank 0's."""
        own = [digest([variable.numpy().tobytes()]) for variable in variables]
        digests = np.array(self.gather(f"a comparison of {len(own)} variables", own), np.int64)
        unlike = digests != digests[0]
        found = np.flatnonzero(unlike.any(axis=0))
        return {int(number): np.flatnonzero(unlike[:, number]).tolist() for number in found}

    def expect_equal(self, variables: Sequence[Any]) -> None:
        """Raise ``RanksDisagree`` on all ranks where a variable is not the same on all of them."""
        differing = self.differing(variables)
        if differing:
            number, ranks = next(iter(differing.items()))
            raise RanksDisagree(
                f"variables: {len(differing)} of {len(variables)} are not those of rank 0, first "
                f"{path_of(variables[number])} on ranks {ranks}: begin with the callback BroadcastVariables, "
                "or with broadcast_variables, of commlib.keras"
            )

    def average(self, place: str, arrays: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[np.float64]]:
        """Return the means over ranks, added up in the order of the ranks in float64."""
        everywhere = self.gather(place, list(arrays))
        return [
            np.sum([np.asarray(each, np.float64) for each in parts], axis=0) / self.size
            for parts in zip(*everywhere, strict=True)
        ]


def broadcast_variables(variables: Sequence[Any], topology: Topology) -> None:
    """Give variables of TensorFlow or Keras the values of rank 0; all ranks call it together.

    Of a model these are ``model.weights``: ``model.variables`` holds the states of random generators as well,
    with which every rank would draw the same dropout.
    """
    with Ranks(topology.world, None) as ranks:
        ranks.broadcast(variables)


def average_metrics(
    metrics: Mapping[str, float], topology: Topology, *, samples: float | None = None
) -> dict[str, float]:
    """Return the means over ranks of numbers by name, weighted by ``samples``; all ranks call it together.

    ``samples``: those of this rank, above 0; ``None``: every rank has the same weight. A number that only
    some ranks have is averaged over these.
    """
    weights = dict.fromkeys(metrics, 1.0 if samples is None else samples)
    return weighted_means(topology.world.allgather_objects((dict(metrics), weights)))


def weighted_means(everywhere: list[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, float]:
    """Return the means by name of every rank's metrics and weights."""
    means = {}
    for name in dict.fromkeys(name for metrics, _ in everywhere for name in metrics):
        values = [metrics[name] for metrics, _ in everywhere if name in metrics]
        weights = [own[name] for metrics, own in everywhere if name in metrics]
        means[name] = float(np.average(values, weights=weights if min(weights) > 0 else None))
    return means


def path_of(variable: Any) -> str:
    """Return the path of a Keras variable, or the name of a TensorFlow variable."""
    return str(getattr(variable, "path", variable.name))


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
        return tf.custom_gradient(lambda own: (self._exchanged(own), self._exchanged))(own)

    def _exchanged(self, own: Any) -> Any:
        total = tf.numpy_function(self._exchange, [own], own.dtype, stateful=True)
        total.set_shape(own.shape)
        return total

    def _exchange(self, own: npt.NDArray[Any]) -> npt.NDArray[Any]:
        (mean,) = self._ranks.average("the statistics of a batch", [own])
        return np.asarray(mean * self._ranks.size, own.dtype)
