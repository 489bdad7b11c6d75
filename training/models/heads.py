"""The first and the last layers of models, and pooling of maps of any size before dense layers."""

from typing import Any

import keras
from keras import layers, ops


def image_input(channels: int, *, normalised: bool) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Return the model's input and, in floats, the input of its first layer.

    Without ``normalised``, levels 0 … 255 become −1 … 1, in float32 whatever the policy: half precision would
    round levels before the first convolution has seen them. With it, images are cast to the policy's compute
    dtype and nothing else, so that float16 images of a float16 model stay as they are.
    """
    if normalised:
        dtype = keras.config.dtype_policy().compute_dtype
        images = keras.Input((None, None, channels), dtype=dtype, name="images")
        return images, images
    images = keras.Input((None, None, channels), name="images")
    return images, layers.Rescaling(1 / 127.5, offset=-1, dtype="float32")(images)


def with_logits(
    images: keras.KerasTensor, features: keras.KerasTensor, classes: int, name: str
) -> keras.Model:
    """Return the model from ``images`` to the float32 logits of ``features`` ``(batch, size)``.

    Weights start from a normal distribution of deviation 0.01, so that all classes start about equally likely
    (Goyal et al. 2017, section 5.1).
    """
    logits = layers.Dense(
        classes,
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),
        dtype="float32",
        name="logits",
    )
    return keras.Model(images, logits(features), name=name)


def hidden_layers(maps: keras.KerasTensor, *, side: int, units: int) -> keras.KerasTensor:
    """Return ``(batch, units)``: maps of any size averaged to ``side`` × ``side``, then two dense layers.

    Half of their outputs is dropped in training. Masks follow the random state at construction, the one that
    ``keras.utils.set_random_seed`` sets: ranks that are seeded differently drop different ones.
    """
    x = layers.Flatten()(AdaptiveAveragePooling2D(side)(maps))
    for _ in range(2):
        x = layers.Dense(units, activation="relu", kernel_initializer="he_normal")(x)
        x = layers.Dropout(0.5)(x)
    return x


class AdaptiveAveragePooling2D(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Average maps of any size over ``side`` × ``side`` bins that cover them.

    Takes ``(batch, height, width, channels)`` and returns ``(batch, side, side, channels)``, same dtype.
    Of ``h`` rows, bin ``i`` holds those from ``⌊i·h/side⌋`` to before ``⌈(i + 1)·h/side⌉``: where ``side``
    does not divide ``h``, neighbours overlap, and with ``h < side`` rows are repeated.
    """

    def __init__(self, side: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.side = side

    def call(self, maps: Any) -> Any:
        """Return the means over the bins."""
        if tuple(maps.shape[1:3]) == (self.side, self.side):
            return maps
        height, width = ops.shape(maps)[1:3]
        rows = ops.einsum("ih,bhwc->biwc", self._shares(height), maps)
        return ops.einsum("jw,biwc->bijc", self._shares(width), rows)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Return ``(batch, side, side, channels)``."""
        return (input_shape[0], self.side, self.side, input_shape[3])

    def _shares(self, size: Any) -> Any:
        """Return what each of ``size`` positions weighs in the mean of each bin, ``(side, size)``."""
        bins, positions = ops.arange(self.side)[:, None], ops.arange(size)[None, :]
        starts = bins * size // self.side
        stops = ((bins + 1) * size + self.side - 1) // self.side
        inside = ops.logical_and(starts <= positions, positions < stops)
        return ops.cast(inside, self.compute_dtype) / ops.cast(stops - starts, self.compute_dtype)
