"""The Transformer (Vaswani et al. 2017), GPT-2 (Radford et al. 2019) and BERT (Devlin et al. 2019)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
from keras import layers, ops

from training.models import AttentionOptions, BertOptions, TransformerOptions
from training.models.attention import (
    Block,
    KeysAndValues,
    TiedEmbedding,
    causal,
    checked_length,
    kernels,
    sinusoids,
    tokens_in,
)

DEVIATION = 0.02  # of the normal distribution that the weights of GPT-2 and BERT start from


class Encoded(NamedTuple):
    """What the decoder attends to: keys and values for each layer, and which positions hold tokens."""

    keys_and_values: Sequence[KeysAndValues]
    visible: Any


class Transformer(keras.Model):  # type: ignore[misc]  # Keras has no types
    """From tokens ``[source (B, S), target (B, T)]`` to the logits of the next, float32 (B, T, V).

    ``target`` begins with the start token. Source and target share a vocabulary, and one table makes both
    embeddings and the logits: 63.1 million weights at 37,000 tokens. Beam search calls ``encode`` once, and
    ``decode`` for each token.
    """

    def __init__(self, vocabulary_size: int, options: TransformerOptions) -> None:
        super().__init__(name="transformer")
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
        self.build([(None, None), (None, None)])

    def build(self, shapes: Any) -> None:
        self.embedding.build(shapes[0])
        for layer in (*self.encoder, *self.decoder, *self.ends):
            layer.build((None, None, self.options.width))

    def call(self, inputs: Sequence[Any], training: bool = False) -> Any:
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


class Stack(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Embeddings of tokens and positions, and blocks of self-attention.

    ``longest``: tokens of a sequence at most. ``pre``: blocks normalise their inputs, see :class:`Block`.
    """

    pre: bool
    epsilon: float

    def __init__(self, name: str, vocabulary_size: int, options: AttentionOptions) -> None:
        super().__init__(name=name)
        width, self.longest = options.width, options.longest
        self.embedding = TiedEmbedding(vocabulary_size, width, kernels(DEVIATION), name="embedding")
        self.positions = layers.Embedding(self.longest, width, kernels(DEVIATION), name="positions")
        if not self.pre:
            self.begin = layers.LayerNormalization(epsilon=self.epsilon, name="begin_norm")
        self.dropout = layers.Dropout(options.dropout)
        given: dict[str, Any] = {"pre": self.pre, "epsilon": self.epsilon, "deviation": DEVIATION}
        self.blocks = [Block(options, name=f"block_{number}", **given) for number in range(options.layers)]

    def embedded(self, tokens: Any) -> Any:
        """Return the sum of the embeddings of tokens and their positions."""
        return self.embedding(tokens) + self.positions(ops.arange(checked_length(tokens, self.longest)))

    def through_blocks(self, x: Any, visible: Any, training: bool) -> Any:
        """Return the vectors after dropout and all blocks; ``visible`` as for :class:`Attention`."""
        x = self.dropout(x, training=training)
        for block in self.blocks:
            x, _ = block(x, visible, training=training)
        return x


class Gpt(Stack):
    """GPT-2, from tokens (B, T) to the logits of the token after each, float32 (B, T, V).

    Positions attend to earlier ones. One table makes the embedding and the logits: 124.4 million weights at
    50,257 tokens, GPT-2's smallest.
    """

    pre, epsilon = True, 1e-5

    def __init__(self, vocabulary_size: int, options: AttentionOptions) -> None:
        super().__init__("gpt", vocabulary_size, options)
        self.end = layers.LayerNormalization(epsilon=self.epsilon, name="end_norm")
        self.build((None, None))

    def build(self, shape: Any) -> None:
        self.embedding.build(shape)
        self.positions.build(shape)
        for layer in (*self.blocks, self.end):
            layer.build((*shape, self.embedding.output_dim))

    def call(self, tokens: Any, training: bool = False) -> Any:
        x = self.through_blocks(self.embedded(tokens), causal(ops.shape(tokens)[1]), training)
        return self.embedding.logits(self.end(x))


class Bert(Stack):
    """BERT, from tokens (B, T), some of them masked, to logits at every position, float32 (B, T, V).

    Positions attend to all others. 109.5 million weights at 30,522 tokens, and 133.0 million if not ``tied``.
    The 133,547,324 that Ok-Topk counts (table 2) include what is not trained here: the prediction of next
    sentences (a dense layer, the pooler, before its two logits) and its two embeddings of segments.
    """

    pre, epsilon = False, 1e-12

    def __init__(self, vocabulary_size: int, options: BertOptions) -> None:
        super().__init__("bert", vocabulary_size, options)
        width = options.width
        self.transform = layers.Dense(width, "gelu", kernel_initializer=kernels(DEVIATION), name="transform")
        self.end = layers.LayerNormalization(epsilon=self.epsilon, name="end_norm")
        self.table = self.embedding
        if not options.tied:
            self.table = TiedEmbedding(vocabulary_size, width, kernels(DEVIATION), name="logits")
        self.build((None, None))

    def build(self, shape: Any) -> None:
        for table in (self.embedding, self.positions, self.table):
            table.build(shape)
        for layer in (self.begin, *self.blocks, self.transform, self.end):
            layer.build((*shape, self.embedding.output_dim))
        self.bias = self.add_weight((self.embedding.input_dim,), "zeros", name="bias")

    def call(self, tokens: Any, training: bool = False) -> Any:
        x = self.through_blocks(self.begin(self.embedded(tokens)), tokens_in(tokens), training)
        return self.table.logits(self.end(self.transform(x))) + ops.cast(self.bias, "float32")
