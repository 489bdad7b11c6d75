"""The options of text models, checked before Keras is loaded."""

from typing import Annotated, Literal

from pydantic import model_validator

from training.config.schema import Count, Record, expect, is_number, problem

Dropout = Annotated[float, expect("a number in [0, 1)", lambda value: is_number(value) and 0 <= value < 1)]


class AttentionOptions(Record):
    """The options of models made of attention."""

    layers: Count
    """Blocks one after the other; a Transformer's encoder and its decoder each have as many."""
    width: Count
    """Size of the vector of a position."""
    heads: Count
    hidden: Count
    """Size of the hidden layer of each feed-forward part."""
    dropout: Dropout = 0.1
    longest: Count
    """The longest sequence, in tokens."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> "AttentionOptions":
        if self.width % self.heads:
            raise problem(f"expected a divisor of width {self.width}, got {self.heads}", key="heads")
        return self


class TransformerOptions(AttentionOptions):
    """Transformer base (Vaswani et al. 2017, table 3)."""

    layers: Count = 6
    width: Count = 512
    heads: Count = 8
    hidden: Count = 2048
    norm: Literal["post", "pre"] = "post"
    """Normalise after each sum, as in the paper, or before each part."""
    longest: Count = 256

    @model_validator(mode="after")
    def _positions_are_pairs(self) -> "TransformerOptions":
        if self.width % 2:
            raise problem(f"expected an even number, got {self.width}", key="width")
        return self


class GptOptions(AttentionOptions):
    """GPT-2 of 124 million weights (Radford et al. 2019)."""

    layers: Count = 12
    width: Count = 768
    heads: Count = 12
    hidden: Count = 3072
    longest: Count = 1024


class BertOptions(AttentionOptions):
    """BERT-base (Devlin et al. 2019)."""

    layers: Count = 12
    width: Count = 768
    heads: Count = 12
    hidden: Count = 3072
    longest: Count = 512
    tied: bool = True
    """The logits use the table of the embedding; otherwise one of their own, as in the 133.5 million weights
    of Ok-Topk's BERT."""


class LstmLmOptions(Record):
    """The large LSTM of Zaremba et al. 2014, the papers' model for PTB."""

    layers: Count = 2
    units: Count = 1500
    """Of a layer; also the size of a token's vector."""
    dropout: Dropout = 0.65
    """Between layers, never along a sequence."""


class ClassifierOptions(Record):
    """Four LSTM layers, with about as many weights as SparCML's model for ATIS."""

    layers: Count = 4
    units: Count = 768
    """Of a layer; also the size of a token's vector."""
    dropout: Dropout = 0.2
