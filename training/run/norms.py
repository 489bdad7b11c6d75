"""The norms of a run's steps, where its gradients lie: what LARS needs, and what a mean is clipped by."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from commlib import Communicator
from commlib.arrays import to_host
from commlib.gpu import SegmentSquares
from commlib.tensorflow import DistributedGradients, array_of
from commlib.vectors import Float32
from pto import Norms, ShardNorms
from pto.keras import GivenSquares
from pto.norms import Float64, Way, sum_of_squares


def norm_of(size: int, arrays: ModuleType) -> Callable[[Float32], float]:
    """Return what computes the norm of vectors of ``size`` entries; equal ones have equal norms on all ranks.

    ``arrays``: the module whose arrays they are, NumPy or CuPy.
    """
    if arrays is np:
        return lambda vector: float(sum_of_squares(vector) ** 0.5)
    plan = SegmentSquares([size])
    return lambda vector: float(to_host(plan.squares(vector))[0] ** 0.5)


class NormsThere(Protocol):
    """Where weights and mean gradient lie, and how their sums of squares are computed there.

    ``passenger``: travels with the reducers that carry one. ``reason``: how the sums come about without one.
    """

    passenger: ShardNorms
    reason: str

    def weights(self) -> list[Any]:
        """Return the weights as the passenger looks at them: arrays of the variables' memory, for a while."""

    def squares(self, mean: Any) -> Float64:
        """Return the sums of squares of all weights and of their mean gradients, ``(2, tensors)``."""


class HostNorms:
    """In host memory: all ranks share the work."""

    def __init__(self, variables: Sequence[Any], sizes: Sequence[int], comm: Communicator, way: Way) -> None:
        self.passenger = ShardNorms(sizes)
        self._norms, self._ends = Norms(sizes, comm, partition=way), np.cumsum(sizes)[:-1]
        self.reason = self._norms.choice.reason
        self._read = tf.function(lambda: [variable.value.read_value() for variable in variables])

    def weights(self) -> list[Any]:
        """See :meth:`NormsThere.weights`."""
        return [array_of(weight) for weight in self._read()]

    def squares(self, mean: Float32) -> Float64:
        """See :meth:`NormsThere.squares`; all ranks call it together."""
        return self._norms.squares(self.weights(), np.split(mean, self._ends))


class GPUNorms:
    """On a GPU, which reads its memory faster than ranks talk: each computes all, with two kernels."""

    def __init__(self, variables: Sequence[Any], sizes: Sequence[int], arrays: ModuleType) -> None:
        self.passenger = ShardNorms(sizes, segments=SegmentSquares)
        self.reason = "norms on each GPU: all tensors at once"
        self._arrays, self._plan = arrays, SegmentSquares(sizes)
        self._read = tf.function(
            lambda: tf.concat([tf.reshape(variable.value, [-1]) for variable in variables], axis=0)
        )

    def weights(self) -> list[Any]:
        """See :meth:`NormsThere.weights`; one vector of all."""
        return [array_of(self._read(), self._arrays)]

    def squares(self, mean: Any) -> Float64:
        """See :meth:`NormsThere.squares`."""
        return np.stack([to_host(self._plan.squares(vector)) for vector in (*self.weights(), mean)])


class StepNorms:
    """The sums of squares that LARS needs, there before its update: brought by the reducer, or computed.

    ``given`` is what the optimizer reads. Each step calls ``look`` before the reduction and ``look_away``
    after it, and ``give`` where it counts.
    """

    def __init__(self, variables: Sequence[Any], gradients: DistributedGradients, way: Way) -> None:
        sizes = gradients.sizes
        world = gradients.topology.world
        self.given = GivenSquares(len(sizes))
        self._gradients = gradients
        self._place: NormsThere = (
            HostNorms(variables, sizes, world, way)
            if world.arrays is np
            else GPUNorms(variables, sizes, world.arrays)
        )
        self.reason = self._place.reason
        gradients.passenger = self._place.passenger

    def look(self) -> None:
        """Show the weights to the passenger, where the reducer carries it."""
        if self._gradients.carried:
            self._place.passenger.look(self._place.weights())

    def look_away(self) -> None:
        """Let go of the weights: TensorFlow copies a variable that it updates while its memory is held."""
        self._place.passenger.look([])

    def give(self, mean: Float32, factor: float) -> None:
        """Give the optimizer the sums; ``mean`` was multiplied with ``factor`` since it was reduced."""
        squares = self._place.passenger.squares if self._gradients.carried else None
        if squares is None:
            squares = self._place.squares(mean)
        else:
            squares[1] *= factor**2
        self.given.give(squares)
