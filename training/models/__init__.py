"""Models by name: of the table, of an entry point ``cloudtrain.models``, or by an import path."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from commlib import registry
from commlib.errors import InvalidArgument, shown
from training.config.schema import Record, describe
from training.models import text_options

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class Signature:
    """How the builder of a model of some kind is called: ``build(*arguments, **given, **options)``.

    ``arguments``: their names. ``given``: keywords that are no options of the model, and the key of the
    configuration from which each follows; they are false by default.

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
    """Builds the model ``name`` of ``training.models.<module>``.

    The module, and Keras with it, is imported at the first call: a configuration is checked before TensorFlow
    is loaded. ``smallest_side``: pixels that height and width of its images must have at least.
    """

    module: str
    name: str
    smallest_side: int = 1
    kind: str = IMAGES.kind

    def __call__(self, channels: int, classes: int, *, normalised: bool = False) -> "keras.Model":
        """Return a new model for images ``(batch, height, width, channels)`` of any size, not square either.

        Its answers are logits ``(batch, classes)``, float32 under mixed precision too. Images are uint8,
        which the model maps to −1 … 1; with ``normalised`` they are float32 or float16 and used unchanged.
        """
        build = getattr(import_module(f"training.models.{self.module}"), self.name)
        return build(channels, classes, normalised=normalised)


@dataclass(frozen=True)
class TextBuilder:
    """Builds a text model with the function that ``training.models.<module>`` is named after.

    ``options``: the record of its options, which are checked before Keras is loaded.
    """

    module: str
    name: str
    kind: str
    options: type[Record]

    def __call__(self, *sizes: int, **options: Any) -> "keras.Model":
        """Return a new model for a vocabulary of some size; one that classifies takes the classes as well.

        Its logits are float32 under mixed precision too. Tokens are whole numbers, 0 is padding.
        """
        build = getattr(import_module(f"training.models.{self.module}"), self.module)
        return build(*sizes, self.checked(options))

    def checked(self, options: Mapping[str, Any]) -> Record:
        """Return the options; ``InvalidArgument`` of one line if one is unknown or wrong."""
        try:
            return self.options(**options)
        except ValidationError as error:
            raise InvalidArgument(describe(error.errors()[0])) from error


MODELS: dict[str, Callable[..., "keras.Model"]] = {
    builder.name: builder
    for builder in (
        Builder("resnet8", "resnet8"),
        Builder("resnet", "resnet20"),
        Builder("resnet", "resnet110"),
        Builder("resnet", "resnet50"),
        Builder("resnet", "wide_resnet18"),
        Builder("vgg", "vgg_tiny", smallest_side=4),
        Builder("vgg", "vgg_small", smallest_side=8),
        Builder("vgg", "vgg16_cifar", smallest_side=32),
        Builder("vgg", "vgg16", smallest_side=32),
        Builder("vgg", "vgg19", smallest_side=32),
        Builder("alexnet", "alexnet", smallest_side=63),
        Builder("mlp", "mlp"),
        TextBuilder("transformer", "transformer", TRANSLATIONS.kind, text_options.Transformer),
        TextBuilder("transformer", "transformer_small", TRANSLATIONS.kind, text_options.TransformerSmall),
        TextBuilder("gpt", "gpt", NEXT_TOKENS.kind, text_options.Gpt),
        TextBuilder("gpt", "gpt_small", NEXT_TOKENS.kind, text_options.GptSmall),
        TextBuilder("lstm_lm", "lstm_lm", NEXT_TOKENS.kind, text_options.LstmLm),
        TextBuilder("lstm_lm", "lstm_lm_small", NEXT_TOKENS.kind, text_options.LstmLmSmall),
        TextBuilder("bert", "bert_base", MASKED_TOKENS.kind, text_options.Bert),
        TextBuilder("bert", "bert_small", MASKED_TOKENS.kind, text_options.BertSmall),
        TextBuilder("lstm_classifier", "lstm_classifier", TEXT_CLASSES.kind, text_options.LstmClassifier),
        TextBuilder(
            "lstm_classifier", "lstm_classifier_small", TEXT_CLASSES.kind, text_options.LstmClassifierSmall
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
