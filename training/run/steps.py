"""The compiled halves of a step: from images to one flat gradient, and from its mean to new weights.

Communication comes between the two, in Python, or begins inside of the first: no graph waits for a message.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from commlib.tensorflow import DistributedGradients, cut_up, dense_gradients, flattened, tensor_of
from commlib.vectors import Float32
from pto.keras import LossScale

Array = npt.NDArray[Any]


def _losses(logits: Any, labels: Any, smoothing: float) -> Any:
    """Return the cross-entropy of each sample; ``smoothing`` of the weight is shared by all classes."""
    exact = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    if not smoothing:
        return exact
    uniform = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
    return (1 - smoothing) * exact + smoothing * uniform


class Backward:
    """Loss and gradient of one input and batch size, one graph for it.

    ``inputs``: the shape ``(samples, size, size, channels)`` and dtype of its input. ``scale``: the loss
    scale, if any. ``overlapped``: where the graph submits its gradients, bucket by bucket; it then returns
    tokens in place of the gradient.

    ``found``: the BatchNormalization statistics before the latest call, see :meth:`put_back`.
    """

    def __init__(
        self,
        model: keras.Model,
        inputs: tf.TensorSpec,
        *,
        smoothing: float = 0.0,
        scale: LossScale | None = None,
        overlapped: DistributedGradients | None = None,
    ) -> None:
        labels = tf.TensorSpec(inputs.shape[:1], tf.int64)
        variables = [variable.value for variable in model.trainable_variables]
        names = [variable.path for variable in model.trainable_variables]
        shapes = [tuple(variable.shape) for variable in model.trainable_variables]
        # Moving averages of BatchNormalization: a forward pass changes them before a NaN is detected.
        self._statistics = [variable.value for variable in model.non_trainable_weights]

        @tf.function(input_signature=[inputs, labels])
        def backward(images: Any, labels: Any) -> tuple[Any, Any, list[Any]]:
            found = [tf.identity(variable) for variable in self._statistics]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(_losses(model(images, training=True), labels, smoothing))
                scaled = loss if scale is None else scale.scaled(loss)
            gradients = tape.gradient(scaled, variables)
            if scale is not None:
                gradients = scale.unscaled(gradients)
            if overlapped is not None:
                return loss, overlapped.submit(gradients), found
            return loss, flattened(dense_gradients(gradients, names, shapes)), found

        self._backward, self._overlapped = backward, overlapped
        self._inputs = inputs
        self._is_prepared = False
        self.found: list[Any] = []
        # State that a forward pass changes: statistics of BatchNormalization, states of random generators.
        self._changed = [each.value for each in model.variables if not each.trainable]

    def __call__(self, images: Array, labels: Array) -> tuple[float, Any]:
        """Return the mean loss of the samples, and its gradient: a float32 tensor, one entry a weight.

        Where it is ``overlapped``, the gradient is submitted.
        """
        loss, flat, self.found = self._backward(images, labels)
        return float(loss), flat

    def put_back(self, found: Sequence[Any]) -> None:
        """Restore the statistics from before the latest call (``found``), for a step that is skipped."""
        for variable, value in zip(self._statistics, found, strict=True):
            variable.assign(value)

    def prepare(self) -> None:
        """Compile and run it once without changing any state: the first step is as fast as the others."""
        if self._is_prepared:
            return
        self._is_prepared = True
        before = [variable.numpy() for variable in self._changed]
        shape = self._inputs.shape
        with nullcontext() if self._overlapped is None else self._overlapped.rehearsal():
            self._backward(tf.zeros(shape, self._inputs.dtype), tf.zeros(shape[:1], tf.int64))
        for variable, value in zip(self._changed, before, strict=True):
            variable.assign(value)


class Update:
    """Applies the mean gradient with an optimizer. ``average``: updated as well, see :class:`Average`."""

    def __init__(self, variables: Sequence[Any], optimizer: Any, average: "Average | None" = None) -> None:
        shapes = [tuple(variable.shape) for variable in variables]
        size = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes)

        @tf.function(input_signature=[tf.TensorSpec([size], tf.float32)])
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


class Forward:
    """Counts correct answers."""

    def __init__(self, model: keras.Model) -> None:
        self._forward = tf.function(lambda images: model(images, training=False), reduce_retracing=True)

    def right(self, images: Array, labels: Array, counts: Array) -> npt.NDArray[np.int64]:
        """Return how many of the samples that count have their label first, and among the first five.

        Classes of equal logits are ranked by index, NaNs last.
        """
        logits = np.nan_to_num(np.asarray(self._forward(images)), nan=-np.inf)
        top_five = np.argsort(-logits, axis=1, kind="stable")[:, :5]
        hits = (top_five == labels[:, None])[counts]
        return np.array([hits[:, :1].any(axis=1).sum(), hits.any(axis=1).sum()], np.int64)
