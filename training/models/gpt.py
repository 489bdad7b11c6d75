"""A language model made of attention to earlier tokens, as GPT-2 (Radford et al. 2019)."""

from typing import Any

import keras
from keras import layers, ops

from training.models import text_options
from training.models.attention import TiedEmbedding, blocks, causal, checked_length, kernels

DEVIATION, EPSILON = 0.02, 1e-5


def gpt(vocabulary_size: int, options: text_options.Gpt) -> keras.Model:
    """Return a model from tokens (B, T) to the logits of the one after each, float32 (B, T, V).

    One table makes the embedding and the logits: 124.4 million weights at 50,257 tokens, GPT-2's smallest.
    """
    model = Gpt(vocabulary_size, options, name="gpt")
    model.build((None, None))
    return model


class Gpt(keras.Model):  # type: ignore[misc]  # Keras has no types
    """The model; ``longest``: tokens of a sequence at most."""

    def __init__(self, vocabulary_size: int, options: text_options.Gpt, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        width, self.longest = options.width, options.longest
        self.embedding = TiedEmbedding(vocabulary_size, width, kernels(DEVIATION), name="embedding")
        self.positions = layers.Embedding(self.longest, width, kernels(DEVIATION), name="positions")
        self.dropout = layers.Dropout(options.dropout)
        self.blocks = blocks(options, pre=True, epsilon=EPSILON, deviation=DEVIATION)
        self.end = layers.LayerNormalization(epsilon=EPSILON, name="end_norm")

    def build(self, shape: Any) -> None:
        """Create the weights."""
        self.embedding.build(shape)
        self.positions.build(shape)
        for layer in (*self.blocks, self.end):
            layer.build((*shape, self.embedding.output_dim))

    def call(self, tokens: Any, training: bool = False) -> Any:
        """Return the logits."""
        positions = checked_length(tokens, self.longest)
        x = self.embedding(tokens) + self.positions(ops.arange(positions))
        x, visible = self.dropout(x, training=training), causal(positions)
        for block in self.blocks:
            x, _ = block(x, visible, training=training)
        return self.embedding.logits(self.end(x))
