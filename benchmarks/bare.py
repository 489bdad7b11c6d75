"""Steps without a loop, for ``bench train``; imports TensorFlow."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib.memory import copy_of
from commlib.tensorflow import cut_up, tensor_of


def bare_step(learner: Any, phase: Any, batch: Any) -> Callable[[], None]:
    """Return a step on one batch, again and again: one graph of forward, backward and update."""
    model = keras.models.clone_model(learner.model)
    model.set_weights(learner.model.get_weights())
    settings = learner.config.optimizer
    optimizer = keras.optimizers.SGD(phase.rate.at(0, phase.steps), momentum=settings.momentum)
    optimizer.build(model.trainable_variables)
    variables = [variable.value for variable in model.trainable_variables]

    @tf.function
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)
        return loss

    images, labels = tf.constant(batch.images), tf.constant(batch.labels)
    return lambda: float(step(images, labels))  # type: ignore[return-value]  # float() waits for the result


def flat_and_back(shapes: Sequence[tuple[int, ...]]) -> Callable[[], object]:
    """Return what makes one vector of tensors of these shapes, in TensorFlow, and tensors of it again."""
    tensors = [tf.ones(shape) for shape in shapes]
    size = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes)
    flatten = tf.function(lambda: tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0))

    @tf.function(input_signature=[tf.TensorSpec([size], tf.float32)])
    def cut(mean: Any) -> list[Any]:
        return cut_up(mean, shapes)

    return lambda: cut(tensor_of(copy_of(np.asarray(flatten()))))  # the reducer's copy is between the two
