"""LSTM models: a language model whose state is carried from call to call, and a classifier of short texts."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from training.datasets.vocabulary import PAD
from training.models import LstmOptions


class Lstm(keras.Model):  # type: ignore[misc]  # Keras has no types
    """An embedding, LSTM layers with dropout between them, and logits."""

    gives_state = False

    def __init__(self, name: str, tokens: int, outputs: int, options: LstmOptions) -> None:
        super().__init__(name=name)
        self.units = options.units
        self.embedding = layers.Embedding(tokens, options.units, name="embedding")
        given = {"return_sequences": True, "return_state": self.gives_state}
        self.lstms = [layers.LSTM(options.units, name=f"lstm_{n}", **given) for n in range(options.layers)]
        self.dropout = layers.Dropout(options.dropout)
        self.head = layers.Dense(outputs, name="logits")
        self.build((None, None))

    def build(self, shape: Any) -> None:
        self.embedding.build(shape)
        for layer in (*self.lstms, self.head):
            layer.build((*shape, self.units))


class LstmLm(Lstm):
    """From ``[tokens (B, T), state]`` to ``[logits of the next of each, (B, T, V), state]``.

    ``state``: float32 (B, layers, 2, units), with which the tokens after these begin; see ``zero_state``.
    66.02 million weights at 10,000 tokens (Zaremba et al. 2014).
    """

    gives_state = True

    def __init__(self, vocabulary_size: int, options: LstmOptions) -> None:
        super().__init__("lstm_lm", vocabulary_size, vocabulary_size, options)

    def zero_state(self, rows: int) -> Any:
        """Return the state before the first token of ``rows`` sequences."""
        return ops.zeros((rows, len(self.lstms), 2, self.units))

    def call(self, inputs: Sequence[Any], training: bool = False) -> list[Any]:
        tokens, state = inputs
        x, states = self.embedding(tokens), []
        for number, lstm in enumerate(self.lstms):
            before = [state[:, number, 0], state[:, number, 1]]
            x, *after = lstm(self.dropout(x, training=training), initial_state=before)
            states.append(ops.stack(after, axis=1))
        logits = self.head(self.dropout(x, training=training))
        return [ops.cast(logits, "float32"), ops.cast(ops.stack(states, axis=1), "float32")]


class LstmClassifier(Lstm):
    """From tokens (B, T), padded at their ends, to logits after the last token, float32 (B, classes).

    A text without tokens is classified as a single padding token.
    """

    def __init__(self, vocabulary_size: int, classes: int, options: LstmOptions) -> None:
        super().__init__("lstm_classifier", vocabulary_size, classes, options)

    def call(self, tokens: Any, training: bool = False) -> Any:
        x = self.embedding(tokens)
        for lstm in self.lstms:
            x = lstm(self.dropout(x, training=training))
        # The layers need no mask: padding after the last token changes nothing before it.
        last = ops.maximum(ops.sum(ops.cast(tokens != PAD, "int32"), axis=1) - 1, 0)
        state = tf.gather(x, last, batch_dims=1)  # for Keras' take_along_axis TensorFlow logs an error
        return ops.cast(self.head(self.dropout(state, training=training)), "float32")
