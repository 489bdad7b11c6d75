"""A perceptron: no convolutions, many weights for little work."""

import keras
from keras import layers

from training.models.heads import AdaptiveAveragePooling2D, image_input, with_logits

SIDE, UNITS, HIDDEN = 28, 2048, 3


def mlp(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return three hidden layers of 2,048 units each, 10 million weights on images of one channel.

    Images are averaged to 28 × 28 pixels. Each weight is used once a sample, in a convolution as often as the
    map has pixels: a step computes little for the gradient that it exchanges.
    """
    images, x = image_input(channels, normalised=normalised)
    x = layers.Flatten()(AdaptiveAveragePooling2D(SIDE)(x))
    for _ in range(HIDDEN):
        x = layers.Dense(UNITS, activation="relu", kernel_initializer="he_normal")(x)
    return with_logits(images, x, classes, "mlp")
