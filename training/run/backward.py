"""The gradient of batches, and which tables of embeddings have gradients that travel as rows."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy.typing as npt
import tensorflow as tf

from commlib.tensorflow import DistributedGradients
from pto.keras import LossScale
from training.config.schema import ConfigurationError

Array = npt.NDArray[Any]

NAME = "embeddings"  # that Keras gives the table of an embedding


class Backward:
    """Computes the loss and the gradient of batches that have the same ``specs``, in one compiled graph.

    ``losses(arrays)`` returns the loss of each row of a batch's arrays. ``gradients``: the exchange, to which
    the graph submits each bucket if it ``overlaps``. ``carried``: variables of the task that a step changes.
    ``scale``: the loss scale, if any.

    ``before``: the non-trainable weights and ``carried`` as before the latest call, see :meth:`undo`.
    """

    def __init__(
        self,
        model: keras.Model,
        losses: Callable[[Sequence[Any]], Any],
        specs: Sequence[tf.TensorSpec],
        gradients: DistributedGradients,
        *,
        carried: Sequence[tf.Variable] = (),
        scale: LossScale | None = None,
        overlaps: bool = False,
    ) -> None:
        variables = [variable.value for variable in model.trainable_variables]
        give = gradients.submit_in_graph if overlaps else gradients.inputs
        # Moving averages of BatchNormalization: a forward pass changes them before a NaN is detected.
        self._restorable = [*(variable.value for variable in model.non_trainable_weights), *carried]

        @tf.function(input_signature=specs, autograph=False)  # type: ignore[untyped-decorator]
        def backward(*arrays: Any) -> tuple[Any, list[Any], list[Any]]:
            before = [tf.identity(variable) for variable in self._restorable]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(losses(arrays))
                scaled = loss if scale is None else scale.scaled(loss)
            own = tape.gradient(scaled, variables)
            return loss, give(own if scale is None else scale.unscaled(own)), before

        self._backward, self._gradients, self.overlaps = backward, gradients, overlaps
        self._specs = specs
        self._is_prepared = False
        self.before: list[Any] = []
        # State that a forward pass changes: also of random generators.
        self._changed = [*(each.value for each in model.variables if not each.trainable), *carried]

    def __call__(self, *arrays: Array) -> tuple[float, list[Any]]:
        """Return the mean loss of a batch, and its gradient, which is submitted where this ``overlaps``."""
        loss, gradient, self.before = self._backward(*arrays)
        return float(loss), gradient

    def undo(self, before: Sequence[Any]) -> None:
        """Restore the values ``before`` of a call, for a step that is skipped."""
        assign(self._restorable, before)

    def prepare(self) -> None:
        """Compile and run it once without changing any state: the first step is as fast as the others."""
        if self._is_prepared:
            return
        self._is_prepared = True
        before = [variable.numpy() for variable in self._changed]
        zeros = [tf.zeros([size or 1 for size in spec.shape], spec.dtype) for spec in self._specs]
        with self._gradients.rehearsal():
            self._backward(*zeros)
        assign(self._changed, before)


def assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Assign values to as many variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


@dataclass(frozen=True)
class Tables:
    """``sparse``: variables whose gradients are IndexedSlices. ``dense``: the other embedding tables.

    A model uses all rows of a dense table, for example where the logits share the embedding's weights.
    """

    sparse: Sequence[Any] = ()
    dense: Sequence[Any] = ()

    @property
    def weights(self) -> int:
        return sum(math.prod(variable.shape) for variable in self.sparse)

    def lines(self) -> Iterator[str]:
        """Yield a line on both, if any are sparse."""
        if self.sparse:
            others = f"; dense: {_paths(self.dense)}, of which the model uses all rows" if self.dense else ""
            yield f"gradients that stay rows: {_paths(self.sparse)}{others}"


def find_tables(
    model: keras.Model, losses: Callable[[Sequence[Any]], Any], specs: Sequence[tf.TensorSpec]
) -> Tables:
    """Trace a model's gradients, and return its tables; ``ConfigurationError`` if no gradient is sparse."""
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
