"""The compiled halves of a step: from a batch to one flat gradient, and from its mean to new weights.

Communication comes between the two, in Python, or begins inside of the first: no graph waits for a message.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from commlib.tensorflow import DistributedGradients, cut_up, tensor_of
from commlib.vectors import Float32
from pto.keras import LossScale
from training.run.replicas import assign

Array = npt.NDArray[Any]


class Backward:
    """Loss and gradient of batches of one kind, one graph for them.

    ``losses(arrays)`` returns the loss of each row; ``specs``: of the arrays. ``gradients``: of the model's
    weights; where ``overlaps``, the graph submits them, bucket by bucket, and returns tokens in their place.
    ``carried``: variables of the task that a step changes. ``scale``: the loss scale, if any.

    ``found``: what a step changes besides the weights, before the latest call, see :meth:`put_back`.
    """

    def __init__(
        self,
        model: keras.Model,
        losses: Callable[[Sequence[Any]], Any],
        specs: Sequence[tf.TensorSpec],
        gradients: DistributedGradients,
        *,
        carried: Sequence[tf.Variable] = (),
        scale: LossScale | None = None,
        overlaps: bool = False,
    ) -> None:
        variables = [variable.value for variable in model.trainable_variables]
        give = gradients.submit if overlaps else gradients.inputs
        # Moving averages of BatchNormalization: a forward pass changes them before a NaN is detected.
        self._restorable = [*(variable.value for variable in model.non_trainable_weights), *carried]

        @tf.function(input_signature=specs, autograph=False)
        def backward(*arrays: Any) -> tuple[Any, list[Any], list[Any]]:
            found = [tf.identity(variable) for variable in self._restorable]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(losses(arrays))
                scaled = loss if scale is None else scale.scaled(loss)
            own = tape.gradient(scaled, variables)
            return loss, give(own if scale is None else scale.unscaled(own)), found

        self._backward, self._gradients = backward, gradients
        self._specs = specs
        self._is_prepared = False
        self.found: list[Any] = []
        # State that a forward pass changes: also of random generators.
        self._changed = [*(each.value for each in model.variables if not each.trainable), *carried]

    def __call__(self, *arrays: Array) -> tuple[float, list[Any]]:
        """Return the mean loss of a batch, and its gradient, as :meth:`DistributedGradients.inputs` does.

        Where it ``overlaps``, it is submitted.
        """
        loss, gradient, self.found = self._backward(*arrays)
        return float(loss), gradient

    def put_back(self, found: Sequence[Any]) -> None:
        """Restore what it was before the latest call (``found``), for a step that is skipped."""
        assign(self._restorable, found)

    def prepare(self) -> None:
        """Compile and run it once without changing any state: the first step is as fast as the others."""
        if self._is_prepared:
            return
        self._is_prepared = True
        before = [variable.numpy() for variable in self._changed]
        zeros = [tf.zeros([size or 1 for size in spec.shape], spec.dtype) for spec in self._specs]
        with self._gradients.rehearsal():
            self._backward(*zeros)
        assign(self._changed, before)


class Update:
    """Applies the mean gradient with an optimizer. ``average``: updated as well, see :class:`Average`."""

    def __init__(self, variables: Sequence[Any], optimizer: Any, average: "Average | None" = None) -> None:
        shapes = [tuple(variable.shape) for variable in variables]
        size = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes)

        @tf.function(input_signature=[tf.TensorSpec([size], tf.float32)], autograph=False)
        def update(mean: Any) -> None:
            optimizer.apply(cut_up(mean, shapes), variables)
            if average is not None:
                average.follow()

        self._update = update

    def __call__(self, mean: Float32) -> None:
        """Update the weights; ``mean``: float32 of NumPy or CuPy, one entry for each trainable weight."""
        self._update(tensor_of(mean))


class Average:
    """The exponential moving average of the trainable weights, with which a model is tested.

    After each step ``a = momentum·a + (1 − momentum)·w``; it starts at the initial weights.
    """

    def __init__(self, variables: Sequence[Any], momentum: float) -> None:
        self._variables = [variable.value for variable in variables]
        self._momentum = momentum
        self.averages = [tf.Variable(variable, trainable=False) for variable in self._variables]

    def follow(self) -> None:
        """Update the average; part of a graph."""
        for average, variable in zip(self.averages, self._variables, strict=True):
            average.assign_sub((1 - self._momentum) * (average - variable))

    def restart(self) -> None:
        """Set the average to the current weights."""
        for average, variable in zip(self.averages, self._variables, strict=True):
            average.assign(variable)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the averages as the model's weights inside the block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for average, variable in zip(self.averages, self._variables, strict=True):
            before = variable.numpy()
            variable.assign(average)
            average.assign(before)
