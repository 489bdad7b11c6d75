"""Models by name."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class Builder:
    """Builds the model ``name`` of ``training.models.<module>``.

    The module, and Keras with it, is imported at the first call: a configuration is checked before TensorFlow
    is loaded. ``smallest_side``: pixels that height and width of its images must have at least.
    """

    module: str
    name: str
    smallest_side: int = 1

    def __call__(self, channels: int, classes: int, *, normalised: bool = False) -> "keras.Model":
        """Return a new model for images ``(batch, height, width, channels)`` of any size, not square either.

        Its answers are logits ``(batch, classes)``, float32 under mixed precision too. Images are uint8,
        which the model maps to −1 … 1; with ``normalised`` they are float32 or float16 and taken as they are.
        """
        build = getattr(import_module(f"training.models.{self.module}"), self.name)
        return build(channels, classes, normalised=normalised)


MODELS: dict[str, Builder] = {
    builder.name: builder
    for builder in (
        Builder("resnet8", "resnet8"),
        Builder("resnet", "resnet20"),
        Builder("resnet", "resnet110"),
        Builder("resnet", "resnet50"),
        Builder("resnet", "wide_resnet18"),
        Builder("vgg", "vgg_tiny", smallest_side=4),
        Builder("vgg", "vgg16_cifar", smallest_side=32),
        Builder("vgg", "vgg16", smallest_side=32),
        Builder("vgg", "vgg19", smallest_side=32),
        Builder("alexnet", "alexnet", smallest_side=63),
    )
}
