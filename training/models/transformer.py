"""The Transformer: an encoder and a decoder made of attention (Vaswani et al. 2017)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
from keras import layers, ops

from training.models.attention import (
    Block,
    KeysAndValues,
    TiedEmbedding,
    causal,
    checked_length,
    sinusoids,
    tokens_in,
)
from training.models.text_options import TransformerOptions


def transformer(vocabulary_size: int, options: TransformerOptions) -> keras.Model:
    """Return a model from tokens ``[source (B, S), target (B, T)]`` to the logits of the next, (B, T, V).

    ``target`` begins with the start token. Source and target share a vocabulary, and one table makes both
    embeddings and the logits: 63.1 million weights at 37,000 tokens.
    """
    model = Transformer(vocabulary_size, options, name="transformer")
    model.build([(None, None), (None, None)])
    return model


class Encoded(NamedTuple):
    """What the decoder attends to: keys and values for each layer, and which positions hold tokens."""

    keys_and_values: Sequence[KeysAndValues]
    visible: Any


class Transformer(keras.Model):  # type: ignore[misc]  # Keras has no types
    """The model; beam search calls ``encode`` once, and ``decode`` for each token."""

    def __init__(self, vocabulary_size: int, options: TransformerOptions, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.options, self.longest, self.vocabulary_size = options, options.longest, vocabulary_size
        self.embedding = TiedEmbedding(
            vocabulary_size,
            options.width,
            embeddings_initializer=keras.initializers.RandomNormal(stddev=options.width**-0.5),
            name="embedding",
        )
        self.dropout = layers.Dropout(options.dropout)
        given: dict[str, Any] = {"activation": "relu", "pre": options.norm == "pre", "epsilon": 1e-6}
        self.encoder = [Block(options, name=f"encoder_{n}", **given) for n in range(options.layers)]
        self.decoder = [
            Block(options, crosses=True, name=f"decoder_{n}", **given) for n in range(options.layers)
        ]
        ends = ("encoder_norm", "decoder_norm") if options.norm == "pre" else ()
        self.ends = [layers.LayerNormalization(epsilon=1e-6, name=name) for name in ends]

    def build(self, shapes: Any) -> None:
        """Create the weights."""
        self.embedding.build(shapes[0])
        for layer in (*self.encoder, *self.decoder, *self.ends):
            layer.build((None, None, self.options.width))

    def call(self, inputs: Sequence[Any], training: bool = False) -> Any:
        """Return the logits of the token after each of the target, float32 (B, T, V)."""
        source, target = inputs
        return self.decode(target, self.encode(source, training=training), training=training)[0]

    def encode(self, source: Any, training: bool = False) -> Encoded:
        """Return what the decoder attends to of the source (B, S)."""
        visible, x = tokens_in(source), self._embedded(source, 0, training)
        for block in self.encoder:
            x, _ = block(x, visible, training=training)
        x = self._ended(x, 0)
        return Encoded([block.cross.keys_and_values(x) for block in self.decoder], visible)

    def start(self, rows: Any) -> list[KeysAndValues]:
        """Return the keys and values before the first token of a target: of no position."""
        options = self.options
        empty = ops.zeros((rows, options.heads, 0, options.width // options.heads), self.compute_dtype)
        return [(empty, empty)] * options.layers

    def decode(
        self,
        target: Any,
        memory: Encoded,
        past: Sequence[KeysAndValues] | None = None,
        training: bool = False,
    ) -> tuple[Any, list[KeysAndValues]]:
        """Return the logits after each token of the target, and the keys and values of all so far.

        ``past``: of the tokens before ``target``, as an earlier call returned them.
        """
        before = 0 if past is None else ops.shape(past[0][0])[2]
        x = self._embedded(target, before, training)
        visible, kept = causal(ops.shape(target)[1], before), []
        for number, block in enumerate(self.decoder):
            own = None if past is None else past[number]
            x, latest = block(
                x, visible, own, memory.keys_and_values[number], memory.visible, training=training
            )
            kept.append(latest)
        return self.embedding.logits(self._ended(x, 1)), kept

    def _embedded(self, tokens: Any, before: Any, training: bool) -> Any:
        width = self.options.width
        positions = sinusoids(before, checked_length(tokens, self.longest, before), width)
        x = self.embedding(tokens) * width**0.5 + ops.cast(positions, self.compute_dtype)
        return self.dropout(x, training=training)

    def _ended(self, x: Any, half: int) -> Any:
        """Normalise what the blocks of the encoder (0) or decoder (1) return, if ``norm`` is ``pre``."""
        return self.ends[half](x) if self.ends else x
