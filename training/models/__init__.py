"""Models by name: of the table, of an entry point ``cloudtrain.models``, or by an import path."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ValidationError, model_validator

from commlib import registry
from commlib.errors import InvalidArgument
from training.config.schema import ConfigurationError, Count, Record, expect, is_number, located_problem

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class Signature:
    """How the builder of a kind of model is called: ``build(*arguments, **given, **options)``.

    ``given``: boolean keywords, each with the key of the configuration whose presence makes it true.

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
    """Builds the image model ``name`` with ``function`` of ``training.models.images``, called with ``sizes``.

    The module, and Keras with it, is imported at the first call: a configuration is checked before TensorFlow
    is loaded. ``smallest_side``: least height and width of its images, in pixels. ``deviation``: of the first
    weights of the logits, see ``image_model``.
    """

    name: str
    function: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    smallest_side: int = 1
    deviation: float | None = 0.01
    signature: Signature = IMAGES

    def __call__(self, channels: int, classes: int, *, normalised: bool = False) -> "keras.Model":
        """Return a new model for images ``(batch, height, width, channels)`` of any size, square or not.

        Its results are logits ``(batch, classes)``, float32 under mixed precision too. Images are uint8,
        which the model maps to −1 … 1; with ``normalised`` they are float32 or float16 and used unchanged.
        """
        images = import_module("training.models.images")
        features_of = partial(getattr(images, self.function), **self.sizes)
        given = {"normalised": normalised, "deviation": self.deviation}
        return images.image_model(self.name, features_of, channels, classes, **given)


@dataclass(frozen=True)
class TextBuilder:
    """Builds the text model ``name`` of the class ``module.Class`` of ``training.models``.

    The module is imported at the first call. ``options``: the record of its options. ``defaults``: in place
    of the record's.
    """

    name: str
    path: str
    signature: Signature
    options: type[Record]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *sizes: int, **options: Any) -> "keras.Model":
        """Return a new model for a vocabulary size, and a number of classes if the model classifies.

        Its logits are float32 under mixed precision too. Tokens are whole numbers, 0 is padding.
        """
        module, _, made = self.path.partition(".")
        return getattr(import_module(f"training.models.{module}"), made)(*sizes, self.checked(options))

    def checked(self, options: Mapping[str, Any]) -> Record:
        """Return the options; ``InvalidArgument`` of one line if one is unknown or wrong."""
        try:
            return self.options(**{**self.defaults, **options})
        except ValidationError as error:
            key, text = located_problem(error.errors()[0])
            raise InvalidArgument(text, key=key) from error


# The options of text models, which are checked before Keras is loaded.
Dropout = Annotated[float, expect("a number in [0, 1)", lambda value: is_number(value) and 0 <= value < 1)]


class AttentionOptions(Record):
    """Options of models made of attention; by default those of GPT-2's smallest (Radford et al. 2019)."""

    layers: Count = 12
    """Blocks one after the other; a Transformer's encoder and its decoder each have as many."""
    width: Count = 768
    """Size of the vector of a position."""
    heads: Count = 12
    hidden: Count = 3072
    """Size of the hidden layer of each feed-forward part."""
    dropout: Dropout = 0.1
    longest: Count = 1024
    """The longest sequence, in tokens."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> "AttentionOptions":
        if self.width % self.heads:
            raise ConfigurationError(
                f"expected a divisor of width {self.width}, got {self.heads}", key="heads"
            )
        return self


class TransformerOptions(AttentionOptions):
    """Transformer base (Vaswani et al. 2017, table 3)."""

    layers: Count = 6
    width: Count = 512
    heads: Count = 8
    hidden: Count = 2048
    norm: Literal["post", "pre"] = "post"
    """Normalise after each sum, as in the paper, or before each part."""
    longest: Count = 256

    @model_validator(mode="after")
    def _positions_are_pairs(self) -> "TransformerOptions":
        if self.width % 2:
            raise ConfigurationError(f"expected an even number, got {self.width}", key="width")
        return self


class BertOptions(AttentionOptions):
    """BERT-base (Devlin et al. 2019), whose blocks are as large as GPT-2's."""

    longest: Count = 512
    tied: bool = True
    """The logits use the table of the embedding; otherwise one of their own, as in the 133.5 million weights
    of Ok-Topk's BERT."""


class LstmOptions(Record):
    """Options of LSTM models; by default those of the large one of Zaremba et al. 2014, for PTB."""

    layers: Count = 2
    units: Count = 1500
    """Of a layer; also the size of a token's vector."""
    dropout: Dropout = 0.65
    """Between layers, never along a sequence."""


CLASSIFIER = {"layers": 4, "units": 768, "dropout": 0.2}  # of about as many weights as SparCML's for ATIS
# Defaults of small models, which train on a CPU.
FOUR_LAYERS = {"layers": 4, "width": 256, "heads": 4, "hidden": 1024, "longest": 256}
TWO_LAYERS = {"layers": 2, "width": 128, "heads": 4, "hidden": 512}
SMALL_LSTM = {"units": 200, "dropout": 0.0}  # the small LSTM of Zaremba et al. 2014
ONE_LAYER = {**CLASSIFIER, "layers": 1, "units": 128}

MODELS: dict[str, Callable[..., "keras.Model"]] = {
    builder.name: builder
    for builder in (
        # The number of weights is at 1,000 classes for ImageNet's models, at 10 for others.
        Builder("resnet8", "resnet8", deviation=None),  # 78,042
        Builder("resnet20", "cifar_resnet", {"depth": 20}),  # 0.27 million
        Builder("resnet110", "cifar_resnet", {"depth": 110}),  # 1.7 million
        Builder("resnet50", "resnet50"),  # 25.56 million
        Builder("wide_resnet18", "wide_resnet18"),  # 180 million
        Builder("vgg_tiny", "vgg", {"convolutions": (1, 1), "filters": 16, "side": 2, "units": 48}, 4),
        Builder("vgg_small", "normalised_vgg", {"convolutions": (1, 1, 1), "filters": 32}, 8),  # 94,986
        Builder("vgg16_cifar", "normalised_vgg", {"convolutions": (2, 2, 3, 3, 3)}, 32),  # 14.7 million
        Builder("vgg16", "vgg", {"convolutions": (2, 2, 3, 3, 3)}, 32),  # D of its paper, 138.4 million
        Builder("vgg19", "vgg", {"convolutions": (2, 2, 4, 4, 4)}, 32),  # E of its paper, 143.7 million
        Builder("alexnet", "alexnet", smallest_side=63),  # 61.1 million
        Builder("mlp", "mlp"),  # 10 million on images of one channel
        TextBuilder("transformer", "transformer.Transformer", TRANSLATIONS, TransformerOptions),
        TextBuilder(
            "transformer_small", "transformer.Transformer", TRANSLATIONS, TransformerOptions, TWO_LAYERS
        ),
        TextBuilder("gpt", "transformer.Gpt", NEXT_TOKENS, AttentionOptions),
        TextBuilder("gpt_small", "transformer.Gpt", NEXT_TOKENS, AttentionOptions, FOUR_LAYERS),
        TextBuilder("lstm_lm", "lstm.LstmLm", NEXT_TOKENS, LstmOptions),
        TextBuilder("lstm_lm_small", "lstm.LstmLm", NEXT_TOKENS, LstmOptions, SMALL_LSTM),
        TextBuilder("bert_base", "transformer.Bert", MASKED_TOKENS, BertOptions),
        TextBuilder("bert_small", "transformer.Bert", MASKED_TOKENS, BertOptions, FOUR_LAYERS),
        TextBuilder("lstm_classifier", "lstm.LstmClassifier", TEXT_CLASSES, LstmOptions, CLASSIFIER),
        TextBuilder("lstm_classifier_small", "lstm.LstmClassifier", TEXT_CLASSES, LstmOptions, ONE_LAYER),
    )
}


def check_model(name: str, options: Mapping[str, Any], signature: Signature) -> Any:
    """Return the named builder; raise ``InvalidArgument`` unless it has the signature and these options."""
    builder = registry.resolve(MODELS, "model", name)
    if isinstance(builder, Builder | TextBuilder) and builder.signature.kind != signature.kind:
        got = f"{name}, which is one of {builder.signature.kind}"
        raise InvalidArgument(f"expected a model of {signature.kind}, got {got}")
    if isinstance(builder, TextBuilder):
        builder.checked(options)
        return builder
    for keyword, key in signature.given.items():
        if keyword in options:
            raise InvalidArgument(f"{keyword}: expected none, it follows from the key {key}")
    given = {**dict.fromkeys(signature.given, False), **options}
    try:
        registry.check_options(f"model {name}", builder, given, len(signature.arguments))
    except InvalidArgument as error:
        text = f"{error.text}; expected {signature} and options of its own"
        raise InvalidArgument(text, key=error.key) from error
    return builder
