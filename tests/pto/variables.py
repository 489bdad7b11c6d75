"""Keras variables of the reference's tensors, and their updates."""

import keras
import numpy as np
import tensorflow as tf

from tests.pto.reference import NAMES, SHAPES

SIZES = [int(np.prod(shape)) for shape in SHAPES]


def variables_of(weights):
    return [
        keras.Variable(weight, dtype="float32", name=name.replace("/", "_"))
        for weight, name in zip(weights, NAMES, strict=True)
    ]


def applied(update, variables, gradients, traced=False):
    """The weights after all steps, as NumPy arrays; ``update``: an optimizer or a sharded update."""
    apply = tf.function(lambda step: update.apply(step, variables)) if traced else update.apply
    for step in gradients:
        apply([tf.constant(gradient) for gradient in step])
    return [variable.numpy() for variable in variables]


def same(left, right):
    return all(np.array_equal(one, other) for one, other in zip(left, right, strict=True))
