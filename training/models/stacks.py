"""Language models of one stack of attention blocks: GPT-2 (Radford et al. 2019), BERT (Devlin et al.)."""

from typing import Any

import keras
from keras import layers, ops

from training.models.attention import Block, TiedEmbedding, causal, checked_length, kernels, tokens_in
from training.models.text_options import AttentionOptions, BertOptions, GptOptions

DEVIATION = 0.02  # of the normal distribution that weights start from


def gpt(vocabulary_size: int, options: GptOptions) -> keras.Model:
    """Return a model from tokens (B, T) to the logits of the token after each, float32 (B, T, V).

    One table makes the embedding and the logits: 124.4 million weights at 50,257 tokens, GPT-2's smallest.
    """
    model = Gpt(vocabulary_size, options, name="gpt")
    model.build((None, None))
    return model


def bert(vocabulary_size: int, options: BertOptions) -> keras.Model:
    """Return a model from tokens (B, T), some of them masked, to logits at every position, float32 (B, T, V).

    109.5 million weights at 30,522 tokens, and 133.0 million if not ``tied``. The 133,547,324 that Ok-Topk
    counts (table 2) include what is not trained here: the prediction of next sentences (a dense layer, the
    pooler, before its two logits) and its two embeddings of segments.
    """
    model = Bert(vocabulary_size, options, name="bert")
    model.build((None, None))
    return model


class Stack(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Embeddings of tokens and positions, and blocks of self-attention.

    ``longest``: tokens of a sequence at most. ``pre``: blocks normalise their inputs, see :class:`Block`.
    """

    pre: bool
    epsilon: float

    def __init__(self, vocabulary_size: int, options: AttentionOptions, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        width, self.longest = options.width, options.longest
        self.embedding = TiedEmbedding(vocabulary_size, width, kernels(DEVIATION), name="embedding")
        self.positions = layers.Embedding(self.longest, width, kernels(DEVIATION), name="positions")
        if not self.pre:
            self.begin = layers.LayerNormalization(epsilon=self.epsilon, name="begin_norm")
        self.dropout = layers.Dropout(options.dropout)
        self.blocks = [
            Block(
                options,
                activation="gelu",
                pre=self.pre,
                epsilon=self.epsilon,
                deviation=DEVIATION,
                name=f"block_{number}",
            )
            for number in range(options.layers)
        ]

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
    """GPT-2, whose positions attend to earlier ones."""

    pre, epsilon = True, 1e-5

    def __init__(self, vocabulary_size: int, options: GptOptions, **kwargs: Any) -> None:
        super().__init__(vocabulary_size, options, **kwargs)
        self.end = layers.LayerNormalization(epsilon=self.epsilon, name="end_norm")

    def build(self, shape: Any) -> None:
        """Create the weights."""
        self.embedding.build(shape)
        self.positions.build(shape)
        for layer in (*self.blocks, self.end):
            layer.build((*shape, self.embedding.output_dim))

    def call(self, tokens: Any, training: bool = False) -> Any:
        """Return the logits."""
        x = self.through_blocks(self.embedded(tokens), causal(ops.shape(tokens)[1]), training)
        return self.embedding.logits(self.end(x))


class Bert(Stack):
    """BERT, whose positions attend to all others."""

    pre, epsilon = False, 1e-12

    def __init__(self, vocabulary_size: int, options: BertOptions, **kwargs: Any) -> None:
        super().__init__(vocabulary_size, options, **kwargs)
        width = options.width
        self.transform = layers.Dense(width, "gelu", kernel_initializer=kernels(DEVIATION), name="transform")
        self.end = layers.LayerNormalization(epsilon=self.epsilon, name="end_norm")
        self.table = self.embedding
        if not options.tied:
            self.table = TiedEmbedding(vocabulary_size, width, kernels(DEVIATION), name="logits")

    def build(self, shape: Any) -> None:
        """Create the weights."""
        for table in (self.embedding, self.positions, self.table):
            table.build(shape)
        for layer in (self.begin, *self.blocks, self.transform, self.end):
            layer.build((*shape, self.embedding.output_dim))
        self.bias = self.add_weight((self.embedding.input_dim,), "zeros", name="bias")

    def call(self, tokens: Any, training: bool = False) -> Any:
        """Return the logits."""
        x = self.through_blocks(self.begin(self.embedded(tokens)), tokens_in(tokens), training)
        return self.table.logits(self.end(self.transform(x))) + ops.cast(self.bias, "float32")
