"""Whole steps of LARS, whose norms are computed in TensorFlow's graph, by pto on every rank, or in parts."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from benchmarks.pto import Tensors, raise_if_wrong
from commlib import Communicator
from commlib.vectors import Float32
from pto import Norms
from pto.keras import LARS

RATE, DECAY, TRUST = 0.1, 0.01, 0.001
FLOAT32_ROUNDING = 2.0**-24
# Sums of squares in float32, which the graph has, and the few operations after them.
STEP_ERROR = 1e-3


def lars_steps(
    comm: Communicator, tensors: Tensors, norms: Mapping[str, Norms | None]
) -> dict[str, Callable[[], object]]:
    """Return a step of LARS for each of ``norms``, checked, all of them on the same variables.

    Raises ``WrongResult`` on all ranks where a first step moves weights otherwise than the formula does.
    """
    variables = [
        keras.Variable(weight, name="kernel" if weight.ndim > 1 else "gamma") for weight in tensors.weights
    ]
    gradients = [tf.constant(gradient) for gradient in tensors.gradients]
    steps = {}
    for name, each in norms.items():
        for variable, weight in zip(variables, tensors.weights, strict=True):
            variable.assign(weight)
        steps[name] = _step(variables, gradients, each)
        steps[name]()
        raise_if_wrong(comm, f"LARS, {name}", _difference(variables, tensors))
    return steps


def _step(variables: list[Any], gradients: list[Any], norms: Norms | None) -> Callable[[], object]:
    optimizer = LARS(RATE, weight_decay=DECAY, trust=TRUST, norms=norms)
    optimizer.build(variables)
    step: Callable[[], object] = tf.function(lambda: optimizer.apply(gradients, variables))
    return step


def _difference(variables: list[Any], tensors: Tensors) -> str:
    """Return the fault of the weights after one step, an empty text if there is none."""
    for number, variable in enumerate(variables):
        weight, gradient = tensors.weights[number], tensors.gradients[number]
        step = _expected_step(weight, gradient)
        expected = weight - step
        allowed = STEP_ERROR * np.abs(step) + 2 * FLOAT32_ROUNDING * np.abs(expected)
        wrong = int(np.count_nonzero(~(np.abs(variable.numpy() - expected) <= allowed)))
        if wrong:
            return f"{wrong} of {weight.size} weights of tensor {number} are wrong after a step"
    return ""


def _expected_step(weight: Float32, gradient: Float32) -> npt.NDArray[np.float64]:
    wide, slope = weight.astype(np.float64), gradient.astype(np.float64)
    if weight.ndim == 1:  # as biases and normalisations
        return RATE * slope
    size, steepness = np.linalg.norm(wide), np.linalg.norm(slope)
    ratio = float(TRUST * size / (steepness + DECAY * size))
    return RATE * ratio * (slope + DECAY * wide)
