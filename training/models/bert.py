"""A masked language model made of attention in both directions (Devlin et al. 2019)."""

from typing import Any

import keras
from keras import layers, ops

from training.models import text_options
from training.models.attention import TiedEmbedding, blocks, checked_length, kernels, tokens_in

DEVIATION, EPSILON = 0.02, 1e-12


def bert(vocabulary_size: int, options: text_options.Bert) -> keras.Model:
    """Return a model from tokens (B, T), some of them masked, to logits at every position, float32 (B, T, V).

    109.5 million weights at 30,522 tokens, and 133.0 million if not ``tied``. The 133,547,324 that Ok-Topk
    counts (table 2) are these and those of what is not trained here: the prediction of next sentences (a
    dense layer, the pooler, before its two logits) and its two embeddings of segments.
    """
    model = Bert(vocabulary_size, options, name="bert")
    model.build((None, None))
    return model


class Bert(keras.Model):  # type: ignore[misc]  # Keras has no types
    """The model; ``longest``: tokens of a sequence at most."""

    def __init__(self, vocabulary_size: int, options: text_options.Bert, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        width, self.longest = options.width, options.longest
        self.embedding = TiedEmbedding(vocabulary_size, width, kernels(DEVIATION), name="embedding")
        self.positions = layers.Embedding(self.longest, width, kernels(DEVIATION), name="positions")
        self.begin = layers.LayerNormalization(epsilon=EPSILON, name="begin_norm")
        self.dropout = layers.Dropout(options.dropout)
        self.blocks = blocks(options, pre=False, epsilon=EPSILON, deviation=DEVIATION)
        self.transform = layers.Dense(width, "gelu", kernel_initializer=kernels(DEVIATION), name="transform")
        self.end = layers.LayerNormalization(epsilon=EPSILON, name="end_norm")
        self.table = (
            self.embedding
            if options.tied
            else TiedEmbedding(vocabulary_size, width, kernels(DEVIATION), name="logits")
        )

    def build(self, shape: Any) -> None:
        """Create the weights."""
        for table in (self.embedding, self.positions, self.table):
            table.build(shape)
        for layer in (self.begin, *self.blocks, self.transform, self.end):
            layer.build((*shape, self.embedding.output_dim))
        self.bias = self.add_weight((self.embedding.input_dim,), "zeros", name="bias")

    def call(self, tokens: Any, training: bool = False) -> Any:
        """Return the logits."""
        positions = checked_length(tokens, self.longest)
        x = self.embedding(tokens) + self.positions(ops.arange(positions))
        x, visible = self.dropout(self.begin(x), training=training), tokens_in(tokens)
        for block in self.blocks:
            x, _ = block(x, visible, training=training)
        return self.table.logits(self.end(self.transform(x))) + ops.cast(self.bias, "float32")
