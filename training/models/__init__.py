"""Models by name: of the table, of an entry point ``cloudtrain.models``, or by an import path."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from commlib import registry
from commlib.errors import InvalidArgument, shown

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
        which the model maps to −1 … 1; with ``normalised`` they are float32 or float16 and used unchanged.
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
        Builder("mlp", "mlp"),
    )
}

SIGNATURE = "build(channels, classes, *, normalised=False) -> keras.Model"


def check_model(name: str, options: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` unless the named builder has the required signature and these options."""
    builder = registry.resolve(MODELS, "model", name)
    if "normalised" in options:
        raise InvalidArgument("normalised: expected none, it follows from the key normalise")
    try:
        registry.check_options(f"model {name}", builder, {"normalised": False, **options}, positional=2)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error}; expected {SIGNATURE} and options of its own") from error


def make_model(name: str, channels: int, classes: int, *, normalised: bool, **options: Any) -> "keras.Model":
    """Return a new model; raises a ``ValueError`` of one line if its builder returns something else."""
    import keras

    check_model(name, options)
    builder = registry.resolve(MODELS, "model", name)
    model = builder(channels, classes, normalised=normalised, **options)
    if not isinstance(model, keras.Model):
        raise InvalidArgument(f"model {name}: expected {SIGNATURE}, got {shown(model)} from it")
    return model
