"""The layers of text models: attention, blocks, positions, and an embedding that also makes the logits.

Shapes: B sequences, T or S positions, H heads of D entries. Layers compute in the precision of the policy;
softmax, sines and logits are float32.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from commlib.errors import InvalidArgument
from training.datasets.vocabulary import PAD
from training.models import AttentionOptions

KeysAndValues = tuple[Any, Any]
"""The keys and the values of positions, each (B, H, S, D)."""

HIDDEN = -1e9  # score of a hidden position: its share is 0, and finite where all positions are hidden


class Attention(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Multi-head attention (Vaswani et al. 2017, section 3.2) to keys and values that decoding can keep.

    Keras's layer computes the keys and values of all positions at each call.
    """

    def __init__(
        self, width: int, heads: int, dropout: float, deviation: float | None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.heads, self.size = heads, width // heads
        self.to_query, self.to_key, self.to_value, self.to_output = (
            layers.Dense(width, kernel_initializer=kernels(deviation), dtype=self.dtype_policy, name=name)
            for name in ("query", "key", "value", "output")
        )
        self.dropout = layers.Dropout(dropout, dtype=self.dtype_policy)

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
        width, heads, dropout = options.width, options.heads, options.dropout
        self.pre = pre
        self.attention = Attention(width, heads, dropout, deviation, name="attention", **own)
        self.cross: Any = (
            Attention(width, heads, dropout, deviation, name="cross", **own) if crosses else None
        )
        self.expand = layers.Dense(
            options.hidden, activation, kernel_initializer=kernels(deviation), name="expand", **own
        )
        self.contract = layers.Dense(width, kernel_initializer=kernels(deviation), name="contract", **own)
        names = ["attention", *["cross"] * crosses, "dense"]
        self.norms = [
            layers.LayerNormalization(epsilon=epsilon, name=f"{each}_norm", **own) for each in names
        ]
        self.dropout = layers.Dropout(dropout, **own)

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
    """Return the earlier positions of each, (1, 1, T, before + T); ``before`` others come first."""
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
