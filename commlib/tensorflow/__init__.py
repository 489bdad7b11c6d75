"""Reducers inside ``tf.function``. Only this package and :mod:`commlib.keras` import TensorFlow."""

from commlib.tensorflow.gradients import DistributedGradients
from commlib.tensorflow.tensors import array_of, cut_up, tensor_of, tensorflow_device

__all__ = [
    "DistributedGradients",
    "array_of",
    "cut_up",
    "tensor_of",
    "tensorflow_device",
]
