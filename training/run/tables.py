"""``sparse_tables``: the tables of embeddings whose gradients travel as rows."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from training.config.schema import ConfigurationError

NAME = "embeddings"  # that Keras gives the table of an embedding


@dataclass(frozen=True)
class Tables:
    """``sparse``: variables whose gradients are IndexedSlices. ``dense``: tables of embeddings whose are not.

    These are used as a whole, too, as where one table makes the logits as well.
    """

    sparse: Sequence[Any] = ()
    dense: Sequence[Any] = ()

    @property
    def weights(self) -> int:
        """Return how many weights the sparse ones have."""
        return sum(math.prod(variable.shape) for variable in self.sparse)

    def lines(self) -> Iterator[str]:
        """Yield a line on both, if any are sparse."""
        if self.sparse:
            others = f"; dense: {_paths(self.dense)}, of which the model uses all rows" if self.dense else ""
            yield f"gradients that stay rows: {_paths(self.sparse)}{others}"


def find_tables(
    model: keras.Model, losses: Callable[[Sequence[Any]], Any], specs: Sequence[tf.TensorSpec]
) -> Tables:
    """Return the tables of a model by the gradients of ``losses(arrays)``, a graph of which is made, not run.

    Raises ``ConfigurationError`` where none is sparse.
    """
    variables, found = model.trainable_variables, list[Any]()

    def look(*arrays: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(arrays))
        found.extend(tape.gradient(loss, [variable.value for variable in variables]))

    tf.function(look, input_signature=specs).get_concrete_function()
    is_sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in found]
    pairs = list(zip(variables, is_sparse, strict=True))
    dense = [variable for variable, sparse in pairs if not sparse and variable.name == NAME]
    if not any(is_sparse):
        uses = f"only {_paths(dense)}, of which it uses all rows" if dense else "no embedding"
        expected = "expected a model with an embedding that only looks rows up"
        raise ConfigurationError(f"sparse_tables: {expected}, got {model.name} with {uses}")
    return Tables([variable for variable, sparse in pairs if sparse], dense)


def _paths(variables: Sequence[Any]) -> str:
    return ", ".join(variable.path for variable in variables)
