"""Layers of attention, and their models: the Transformer (Vaswani et al. 2017), GPT-2 and BERT.

Shapes: B sequences, T or S positions, H heads of D entries, V tokens of the vocabulary. Layers compute in the
precision of the policy; softmax, sines and logits are float32.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from commlib.errors import InvalidArgument
from training.datasets.vocabulary import PAD
from training.models import AttentionOptions, BertOptions, TransformerOptions

KeysAndValues = tuple[Any, Any]
"""The keys and the values of positions, each (B, H, S, D)."""

HIDDEN = -1e9  # score of a masked position: its softmax weight is 0, and finite if all are masked
DEVIATION = 0.02  # standard deviation of the truncated normal initial weights of GPT-2 and BERT


class Attention(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Multi-head attention (Vaswani et al. 2017, section 3.2) to keys and values that decoding can keep.

    Keras's layer computes the keys and values of all positions at each call.
    """

    def __init__(self, options: AttentionOptions, deviation: float | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        width, self.heads, self.size = options.width, options.heads, options.width // options.heads
        self.to_query, self.to_key, self.to_value, self.to_output = (
            layers.Dense(width, kernel_initializer=kernels(deviation), dtype=self.dtype_policy, name=name)
            for name in ("query", "key", "value", "output")
        )
        self.dropout = layers.Dropout(options.dropout, dtype=self.dtype_policy)

    def build(self, shape: Any) -> None:
        for dense in (self.to_query, self.to_key, self.to_value, self.to_output):
            dense.build(shape)

    def keys_and_values(self, x: Any) -> KeysAndValues:
        """Return the keys and values of the positions of ``x``, (B, S, width)."""
        return self._by_head(self.to_key(x)), self._by_head(self.to_value(x))

    def call(self, x: Any, keys: Any, values: Any, visible: Any, training: bool = False) -> Any:
        """Return the weighted sum of values for each position of ``x``, (B, T, width).

        ``visible``: the positions that each may attend to, booleans that broadcast to (B, H, T, S).
        """
        # Queries are scaled, not scores: float16 may have no room for their products.
        queries = self._by_head(self.to_query(x)) * self.size**-0.5
        scores = ops.cast(ops.einsum("bhtd,bhsd->bhts", queries, keys), "float32")
        shares = tf.nn.softmax(ops.where(visible, scores, HIDDEN))
        shares = self.dropout(ops.cast(shares, self.compute_dtype), training=training)
        mixtures = ops.transpose(ops.einsum("bhts,bhsd->bhtd", shares, values), (0, 2, 1, 3))
        return self.to_output(ops.reshape(mixtures, ops.shape(x)))

    def _by_head(self, x: Any) -> Any:
        """Return (B, H, S, D) of (B, S, width)."""
        parts = ops.reshape(x, (*ops.shape(x)[:2], self.heads, self.size))
        return ops.transpose(parts, (0, 2, 1, 3))


class Block(layers.Layer):  # type: ignore[misc]
    """Self-attention, attention to a memory where ``crosses``, and two dense layers, each added to its input.

    ``pre``: normalise the input of each part, not the sum (Xiong et al. 2020). ``deviation``: of the normal
    distribution that kernels start from; Glorot's uniform distribution without it.
    """

    def __init__(
        self,
        options: AttentionOptions,
        *,
        activation: str = "gelu",
        pre: bool,
        epsilon: float,
        deviation: float | None = None,
        crosses: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        own: dict[str, Any] = {"dtype": self.dtype_policy}
        self.pre = pre
        self.attention = Attention(options, deviation, name="attention", **own)
        self.cross: Any = Attention(options, deviation, name="cross", **own) if crosses else None
        self.expand = layers.Dense(
            options.hidden, activation, kernel_initializer=kernels(deviation), name="expand", **own
        )
        self.contract = layers.Dense(
            options.width, kernel_initializer=kernels(deviation), name="contract", **own
        )
        names = ["attention", *["cross"] * crosses, "dense"]
        self.norms = [
            layers.LayerNormalization(epsilon=epsilon, name=f"{each}_norm", **own) for each in names
        ]
        self.dropout = layers.Dropout(options.dropout, **own)

    def build(self, shape: Any) -> None:
        parts = [self.attention, *([self.cross] if self.cross else []), self.expand, *self.norms]
        for part in parts:
            part.build(shape)
        self.contract.build((*shape[:-1], self.expand.units))

    def call(
        self,
        x: Any,
        visible: Any,
        past: KeysAndValues | None = None,
        memory: KeysAndValues | None = None,
        memory_visible: Any = None,
        training: bool = False,
    ) -> tuple[Any, KeysAndValues]:
        """Return the vectors of the positions of ``x``, and the keys and values up to the last of them.

        ``past``: keys and values of the positions before ``x``. ``memory``: those that ``cross`` attends to.
        """
        kept: Any = None

        def attend(own: Any) -> Any:
            nonlocal kept
            kept = self.attention.keys_and_values(own)
            if past is not None:
                kept = tuple(ops.concatenate(pair, axis=2) for pair in zip(past, kept, strict=True))
            return self.attention(own, *kept, visible, training=training)

        def recall(own: Any) -> Any:
            return self.cross(own, *(memory or ()), memory_visible, training=training)

        def expand(own: Any) -> Any:
            return self.contract(self.expand(own))

        parts = [attend, expand] if self.cross is None else [attend, recall, expand]
        for part, norm in zip(parts, self.norms, strict=True):
            if self.pre:
                x = x + self.dropout(part(norm(x)), training=training)
            else:
                x = norm(x + self.dropout(part(x), training=training))
        return x, kept


def kernels(deviation: float | None) -> Any:
    """Return a new initializer: kernels that share one would start equal."""
    if deviation is None:
        return keras.initializers.GlorotUniform()
    return keras.initializers.TruncatedNormal(stddev=deviation)


class TiedEmbedding(layers.Embedding):  # type: ignore[misc]
    """An embedding whose table also makes the logits of tokens (Press and Wolf 2017)."""

    def logits(self, x: Any) -> Any:
        """Return the float32 logits (…, vocabulary) of vectors (…, width)."""
        table = ops.cast(self.embeddings, self.compute_dtype)
        return ops.cast(ops.matmul(ops.cast(x, self.compute_dtype), ops.transpose(table)), "float32")


def tokens_in(tokens: Any) -> Any:
    """Return which positions of (B, S) hold tokens, those that others attend to, (B, 1, 1, S)."""
    return ops.not_equal(tokens, PAD)[:, None, None, :]


def causal(positions: Any, before: Any = 0) -> Any:
    """Return the causal mask (1, 1, T, before + T): each position sees itself and earlier positions."""
    return (ops.arange(positions)[:, None] + before >= ops.arange(before + positions))[None, None]


def sinusoids(first: Any, positions: Any, width: int) -> Any:
    """Return sines and cosines of the positions from ``first`` on, float32 (T, width).

    ``sin(t/10000^(2i/width))`` in the first half of the entries, the cosines in the second (Vaswani et al.
    2017, section 3.5, up to the order of entries).
    """
    frequencies = np.power(10_000.0, -np.arange(0, width, 2) / width).astype(np.float32)
    angles = ops.cast(ops.arange(positions) + first, "float32")[:, None] * frequencies
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=1)


def checked_length(tokens: Any, longest: int, before: Any = 0) -> Any:
    """Return T of sequences (B, T); raise ``InvalidArgument`` unless they fit after ``before`` positions.

    A graph that knows T only when it runs raises TensorFlow's error with the same line.
    """
    length, expected = tokens.shape[1], f"expected sequences of at most {longest} tokens (longest), got"
    if length is None or not isinstance(before, int):
        length = tf.shape(tokens)[1]
        fits = tf.debugging.Assert(before + length <= longest, [expected, before + length])
        with tf.control_dependencies([fits] if tf.inside_function() else []):
            return tf.identity(length)
    if before + length > longest:
        raise InvalidArgument(f"{expected} {before + length}")
    return length


# Models of these layers


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
        start = keras.initializers.RandomNormal(stddev=options.width**-0.5)
        self.embedding = TiedEmbedding(vocabulary_size, options.width, start, name="embedding")
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
        pasts = [None] * len(self.decoder) if past is None else past
        for block, own, cross in zip(self.decoder, pasts, memory.keys_and_values, strict=True):
            x, latest = block(x, visible, own, cross, memory.visible, training=training)
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

    def vectors(self, tokens: Any, visible: Any, training: bool) -> Any:
        """Return the vectors of tokens (B, T) after all blocks; ``visible`` as for :class:`Attention`."""
        x = self.embedding(tokens) + self.positions(ops.arange(checked_length(tokens, self.longest)))
        x = self.dropout(x if self.pre else self.begin(x), training=training)
        for block in self.blocks:
            x, _ = block(x, visible, training=training)
        return x


class Gpt(Stack):
    """GPT-2, from tokens (B, T) to the logits of the token after each, float32 (B, T, V).

    Each position attends to itself and earlier ones. One table makes the embedding and the logits: 124.4
    million weights at 50,257 tokens, as in the smallest GPT-2.
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
        x = self.vectors(tokens, causal(ops.shape(tokens)[1]), training)
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
        x = self.vectors(tokens, tokens_in(tokens), training)
        return self.table.logits(self.end(self.transform(x))) + ops.cast(self.bias, "float32")
