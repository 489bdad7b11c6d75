"""A classifier of short texts, such as the requests of ATIS, by the last state of LSTM layers."""

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from training.models import text_options
from training.models.attention import PAD


def lstm_classifier(vocabulary_size: int, classes: int, options: text_options.LstmClassifier) -> keras.Model:
    """Return a model from tokens (B, T), filled up at their ends, to logits, float32 (B, classes)."""
    model = LstmClassifier(vocabulary_size, classes, options, name="lstm_classifier")
    model.build((None, None))
    return model


class LstmClassifier(keras.Model):  # type: ignore[misc]  # Keras has no types
    """The model."""

    def __init__(
        self, vocabulary_size: int, classes: int, options: text_options.LstmClassifier, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.units = options.units
        self.embedding = layers.Embedding(vocabulary_size, options.units, name="embedding")
        self.lstms = [
            layers.LSTM(options.units, return_sequences=True, name=f"lstm_{number}")
            for number in range(options.layers)
        ]
        self.dropout = layers.Dropout(options.dropout)
        self.head = layers.Dense(classes, name="logits")

    def build(self, shape: Any) -> None:
        """Create the weights."""
        self.embedding.build(shape)
        for layer in self.lstms:
            layer.build((*shape, self.units))
        self.head.build((shape[0], self.units))

    def call(self, tokens: Any, training: bool = False) -> Any:
        """Return the logits after the last token of each text; no token at all counts as one."""
        x = self.embedding(tokens)
        for lstm in self.lstms:
            x = lstm(self.dropout(x, training=training))
        # No mask in the layers: what comes after the last token changes nothing before it.
        last = ops.maximum(ops.sum(ops.cast(tokens != PAD, "int32"), axis=1) - 1, 0)
        state = tf.gather(x, last, batch_dims=1)  # for Keras' take_along_axis TensorFlow logs an error
        return ops.cast(self.head(self.dropout(state, training=training)), "float32")
