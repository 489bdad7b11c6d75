"""AlexNet in one tower (Krizhevsky 2014)."""

import keras
from keras import layers

from training.models.heads import hidden_layers, image_input, with_logits


def alexnet(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return AlexNet, 61.1 million weights at 1,000 classes."""
    images, x = image_input(channels, normalised=normalised)
    x = layers.ZeroPadding2D(2)(x)
    x = layers.MaxPooling2D(3, 2)(_convolution(x, 64, 11, stride=4, padding="valid"))
    x = layers.MaxPooling2D(3, 2)(_convolution(x, 192, 5))
    for filters in (384, 256, 256):
        x = _convolution(x, filters, 3)
    x = layers.MaxPooling2D(3, 2)(x)
    return with_logits(images, hidden_layers(x, side=6, units=4096), classes, "alexnet")


def _convolution(
    x: keras.KerasTensor, filters: int, kernel: int, *, stride: int = 1, padding: str = "same"
) -> keras.KerasTensor:
    convolution = layers.Conv2D(filters, kernel, stride, padding, kernel_initializer="he_normal")
    return layers.ReLU()(convolution(x))
