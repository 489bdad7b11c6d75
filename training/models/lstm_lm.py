"""A language model of LSTM layers whose state is carried from one call to the next (Zaremba et al. 2014)."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import layers, ops

from training.models import text_options


def lstm_lm(vocabulary_size: int, options: text_options.LstmLm) -> keras.Model:
    """Return a model from ``[tokens (B, T), state]`` to ``[logits of the next of each, (B, T, V), state]``.

    ``state``: float32 (B, layers, 2, units), see ``zero_state``. 66.02 million weights at 10,000 tokens.
    """
    model = LstmLm(vocabulary_size, options, name="lstm_lm")
    model.build([(None, None), (None, options.layers, 2, options.units)])
    return model


class LstmLm(keras.Model):  # type: ignore[misc]  # Keras has no types
    """The model."""

    def __init__(self, vocabulary_size: int, options: text_options.LstmLm, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = options.units
        self.embedding = layers.Embedding(vocabulary_size, options.units, name="embedding")
        self.lstms = [
            layers.LSTM(options.units, return_sequences=True, return_state=True, name=f"lstm_{number}")
            for number in range(options.layers)
        ]
        self.dropout = layers.Dropout(options.dropout)
        self.head = layers.Dense(vocabulary_size, name="logits")

    def build(self, shapes: Any) -> None:
        """Create the weights."""
        self.embedding.build(shapes[0])
        for layer in (*self.lstms, self.head):
            layer.build((*shapes[0], self.units))

    def zero_state(self, rows: int) -> Any:
        """Return the state before the first token of ``rows`` sequences."""
        return ops.zeros((rows, len(self.lstms), 2, self.units))

    def call(self, inputs: Sequence[Any], training: bool = False) -> list[Any]:
        """Return the logits, and the state after the last token: that of the tokens after these."""
        tokens, state = inputs
        x, states = self.embedding(tokens), []
        for number, lstm in enumerate(self.lstms):
            before = [state[:, number, 0], state[:, number, 1]]
            x, *after = lstm(self.dropout(x, training=training), initial_state=before)
            states.append(ops.stack(after, axis=1))
        logits = self.head(self.dropout(x, training=training))
        return [ops.cast(logits, "float32"), ops.cast(ops.stack(states, axis=1), "float32")]
