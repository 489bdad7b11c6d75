"""Models by name. A builder takes the channels of the images and the number of classes."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras


def _resnet8(channels: int, classes: int) -> "keras.Model":
    from training.models.resnet import resnet8

    return resnet8(channels, classes)


# Builders import Keras when they build: a configuration is checked before TensorFlow is loaded.
MODELS: dict[str, Callable[[int, int], "keras.Model"]] = {
    "resnet8": _resnet8,
}
