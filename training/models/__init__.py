"""Models by name: of the table, of an entry point ``cloudtrain.models``, or by an import path."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from commlib import registry
from commlib.errors import InvalidArgument, shown
from training.config.schema import Record, describe
from training.models.text_options import (
    BertOptions,
    ClassifierOptions,
    GptOptions,
    LstmLmOptions,
    TransformerOptions,
)

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class Signature:
    """How the builder of a kind of model is called: ``build(*arguments, **given, **options)``.

    ``given``: keywords, false by default, that follow from a key of the configuration: by keyword, that key.

    >>> print(IMAGES)
    build(channels, classes, *, normalised=False) -> keras.Model
    """

    kind: str
    arguments: tuple[str, ...]
    given: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        given = ["*", *(f"{name}=False" for name in self.given)] if self.given else []
        return f"build({', '.join([*self.arguments, *given])}) -> keras.Model"


IMAGES = Signature("images", ("channels", "classes"), {"normalised": "normalise"})
TRANSLATIONS = Signature("translations", ("vocabulary_size",))
NEXT_TOKENS = Signature("next tokens", ("vocabulary_size",))
MASKED_TOKENS = Signature("masked tokens", ("vocabulary_size",))
TEXT_CLASSES = Signature("classes of texts", ("vocabulary_size", "classes"))


@dataclass(frozen=True)
class Builder:
    """Builds the image model ``name`` with the function of that name in ``training.models.<module>``.

    The module, and Keras with it, is imported at the first call: a configuration is checked before TensorFlow
    is loaded. ``smallest_side``: least height and width of its images, in pixels.
    """

    module: str
    name: str
    smallest_side: int = 1
    kind: str = IMAGES.kind

    def __call__(self, channels: int, classes: int, *, normalised: bool = False) -> "keras.Model":
        """Return a new model for images ``(batch, height, width, channels)`` of any size, square or not.

        Its results are logits ``(batch, classes)``, float32 under mixed precision too. Images are uint8,
        which the model maps to −1 … 1; with ``normalised`` they are float32 or float16 and used unchanged.
        """
        build = getattr(import_module(f"training.models.{self.module}"), self.name)
        return build(channels, classes, normalised=normalised)


@dataclass(frozen=True)
class TextBuilder:
    """Builds the text model ``name`` with ``module.function`` of ``training.models``, imported when called.

    ``options``: the record of its options. ``defaults``: in place of the record's.
    """

    name: str
    path: str
    signature: Signature
    options: type[Record]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The kind of its signature."""
        return self.signature.kind

    def __call__(self, *sizes: int, **options: Any) -> "keras.Model":
        """Return a new model for a vocabulary size, and a number of classes if the model classifies.

        Its logits are float32 under mixed precision too. Tokens are whole numbers, 0 is padding.
        """
        module, _, function = self.path.partition(".")
        build = getattr(import_module(f"training.models.{module}"), function)
        return build(*sizes, self.checked(options))

    def checked(self, options: Mapping[str, Any]) -> Record:
        """Return the options; ``InvalidArgument`` of one line if one is unknown or wrong."""
        try:
            return self.options(**{**self.defaults, **options})
        except ValidationError as error:
            raise InvalidArgument(describe(error.errors()[0])) from error


# Defaults of small models, which train on a CPU.
FOUR_LAYERS = {"layers": 4, "width": 256, "heads": 4, "hidden": 1024, "longest": 256}
TWO_LAYERS = {"layers": 2, "width": 128, "heads": 4, "hidden": 512}
SMALL_LSTM = {"units": 200, "dropout": 0.0}  # the small LSTM of Zaremba et al. 2014
ONE_LAYER = {"layers": 1, "units": 128}

MODELS: dict[str, Callable[..., "keras.Model"]] = {
    builder.name: builder
    for builder in (
        Builder("resnet", "resnet8"),
        Builder("resnet", "resnet20"),
        Builder("resnet", "resnet110"),
        Builder("resnet", "resnet50"),
        Builder("resnet", "wide_resnet18"),
        Builder("plain", "vgg_tiny", smallest_side=4),
        Builder("plain", "vgg_small", smallest_side=8),
        Builder("plain", "vgg16_cifar", smallest_side=32),
        Builder("plain", "vgg16", smallest_side=32),
        Builder("plain", "vgg19", smallest_side=32),
        Builder("plain", "alexnet", smallest_side=63),
        Builder("plain", "mlp"),
        TextBuilder("transformer", "transformer.transformer", TRANSLATIONS, TransformerOptions),
        TextBuilder(
            "transformer_small", "transformer.transformer", TRANSLATIONS, TransformerOptions, TWO_LAYERS
        ),
        TextBuilder("gpt", "stacks.gpt", NEXT_TOKENS, GptOptions),
        TextBuilder("gpt_small", "stacks.gpt", NEXT_TOKENS, GptOptions, FOUR_LAYERS),
        TextBuilder("lstm_lm", "lstm.lstm_lm", NEXT_TOKENS, LstmLmOptions),
        TextBuilder("lstm_lm_small", "lstm.lstm_lm", NEXT_TOKENS, LstmLmOptions, SMALL_LSTM),
        TextBuilder("bert_base", "stacks.bert", MASKED_TOKENS, BertOptions),
        TextBuilder("bert_small", "stacks.bert", MASKED_TOKENS, BertOptions, FOUR_LAYERS),
        TextBuilder("lstm_classifier", "lstm.lstm_classifier", TEXT_CLASSES, ClassifierOptions),
        TextBuilder(
            "lstm_classifier_small", "lstm.lstm_classifier", TEXT_CLASSES, ClassifierOptions, ONE_LAYER
        ),
    )
}


def check_model(name: str, options: Mapping[str, Any], signature: Signature = IMAGES) -> None:
    """Raise ``InvalidArgument`` unless the named builder has the signature and these options.

    A builder that has a ``kind`` is only called by that kind of signature.
    """
    builder = registry.resolve(MODELS, "model", name)
    if (kind := getattr(builder, "kind", signature.kind)) != signature.kind:
        raise InvalidArgument(f"expected a model of {signature.kind}, got {name}, which is one of {kind}")
    if isinstance(builder, TextBuilder):
        builder.checked(options)
        return
    for keyword, key in signature.given.items():
        if keyword in options:
            raise InvalidArgument(f"{keyword}: expected none, it follows from the key {key}")
    given = dict.fromkeys(signature.given, False)
    try:
        positional = len(signature.arguments)
        registry.check_options(f"model {name}", builder, {**given, **options}, positional)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error}; expected {signature} and options of its own") from error


def make_model(
    name: str,
    signature: Signature,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    given: Mapping[str, Any] | None = None,
) -> "keras.Model":
    """Return a new model; raises a ``ValueError`` of one line if its builder returns something else."""
    import keras

    check_model(name, options, signature)
    builder = registry.resolve(MODELS, "model", name)
    model = builder(*arguments, **(given or {}), **options)
    if not isinstance(model, keras.Model):
        raise InvalidArgument(f"model {name}: expected {signature}, got {shown(model)} from it")
    return model
