"""The norms in a training step, computed where gradients are stored: those of LARS, and for clipping."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from commlib.arrays import to_host
from commlib.gpu import SegmentSquares
from commlib.tensorflow import DistributedGradients, array_of
from commlib.vectors import Float32
from pto import Norms
from pto.keras import GivenSquares
from pto.norms import Float64, Way, sum_of_squares


def norm_of(size: int, arrays: ModuleType) -> Callable[[Float32], float]:
    """Return a function for the norm of vectors of ``size`` entries; equal vectors have equal norms.

    ``arrays``: the array module, NumPy or CuPy.
    """
    if arrays is np:
        return lambda vector: float(sum_of_squares(vector) ** 0.5)
    plan = SegmentSquares([size])
    return lambda vector: float(to_host(plan.squares(vector))[0] ** 0.5)


class StepNorms:
    """The sums of squares of weights and mean gradient that LARS needs, computed before its update.

    In host memory all ranks share the work, as set by ``way`` (:class:`pto.Norms`). A GPU reads its memory
    faster than ranks exchange messages: each computes all, with two kernels. The optimizer reads ``given``;
    ``reason`` describes how the sums are computed. Each step that is not skipped calls ``give``.
    """

    def __init__(self, variables: Sequence[Any], gradients: DistributedGradients, way: Way) -> None:
        sizes, world = gradients.sizes, gradients.topology.world
        self.given = GivenSquares(len(sizes))
        if world.arrays is np:
            norms = Norms(sizes, world, partition=way)
            self.reason, self._squares = norms.choice.reason, _on_host(variables, sizes, norms)
        else:
            self.reason = "norms on each GPU: all tensors at once"
            self._squares = _on_gpu(variables, sizes, world.arrays)

    def give(self, mean: Any) -> None:
        """Give the optimizer the sums; collective, with the mean that it will apply."""
        self.given.give(self._squares(mean))


def _on_host(variables: Sequence[Any], sizes: Sequence[int], norms: Norms) -> Callable[[Float32], Float64]:
    read, ends = tf.function(lambda: [each.value.read_value() for each in variables]), np.cumsum(sizes)[:-1]
    return lambda mean: norms.squares([array_of(weight) for weight in read()], np.split(mean, ends))


def _on_gpu(variables: Sequence[Any], sizes: Sequence[int], arrays: ModuleType) -> Callable[[Any], Float64]:
    plan = SegmentSquares(sizes)
    read = tf.function(lambda: tf.concat([tf.reshape(each.value, [-1]) for each in variables], axis=0))
    return lambda mean: np.stack([to_host(plan.squares(each)) for each in (array_of(read(), arrays), mean)])
