"""Language models: the next token of a text, cross-entropy, perplexity."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from commlib import Communicator
from datacache import Batch, BatchSpec, Collation, Manifest, Pools, Preprocessing, Streams, Windows
from datacache.text_orders import TextOrder
from training.config.records import AnyConfig
from training.datasets import TextDataset
from training.models import NEXT_TOKENS
from training.tasks.task import Evaluation, Inputs, Means, Metric, Reading, Samples, Tested, Tiny, traced
from training.tasks.text import (
    TextTask,
    WindowPhase,
    check_lengths,
    check_orders,
    line_tokens,
    perplexity_of,
    phases_of,
    rows_of,
    tiny_text,
    weights_of,
)

if TYPE_CHECKING:
    import keras


TEST_WINDOWS = 32  # of one rank at a step
TEST_STREAMS = 32  # of all ranks: however many there are, the same tokens have the same text before them


class LanguageModel(TextTask):
    """Running text: the cross-entropy of each token, given those before it.

    ``streams``: whether the text is read in streams, side by side, along which the model carries its state
    from batch to batch: a recurrent model, from ``[tokens, state]`` to ``[logits, state]``, that has a method
    ``zero_state(rows)``. Else windows of the text are shuffled, and the model maps tokens to logits.
    """

    Phase = WindowPhase
    dataset = TextDataset
    signature = NEXT_TOKENS
    unit = "tokens"
    metrics = {"perplexity": Metric("test perplexity", "lower")}

    def __init__(self, *, streams: bool = False) -> None:
        if streams not in (True, False):
            raise ValueError(f"streams: expected true or false, got {streams!r}")
        self.streams = streams
        self.accumulates = not streams

    def check(self, config: AnyConfig) -> None:
        """See :meth:`Task.check`."""
        check_lengths(config)
        if not self.streams:
            return
        if config.accumulate > 1:
            raise ValueError(f"accumulate: expected 1 where text is read in streams, got {config.accumulate}")
        first, *others = [phase.batch_size for phase in phases_of(config)]
        for number, rows in enumerate(others, 1):
            if rows != first:
                expected = f"the {first} streams of the first phase"
                raise ValueError(f"phases[{number}].batch_size: expected {expected}, got {rows}")

    def describe(self, phase: WindowPhase) -> str:
        """See :meth:`Task.describe`."""
        return f"{phase.sequence_length} tokens"

    def describe_batch(self, phase: WindowPhase) -> str:
        """See :meth:`Task.describe_batch`."""
        return f"{phase.batch_size} {'streams' if self.streams else 'windows'}"

    def tiny(self, config: AnyConfig, ranks: int) -> Tiny:
        """See :meth:`Task.tiny`: generated text."""
        return tiny_text(self, config, ranks)

    def check_samples(self, samples: Samples) -> None:
        """See :meth:`Task.check_samples`."""
        check_orders(self, samples)

    def inputs(self, phase: WindowPhase, samples: Samples) -> Inputs:
        """See :meth:`Task.inputs`."""
        config, length = samples.config, phase.sequence_length
        tokens = line_tokens(samples.training)
        rows = phase.batch_size * samples.ranks
        if self.streams:
            return Inputs(
                _reading(Streams(tokens, length, rows)), _reading(_test_streams(samples.test, length))
            )
        test = Windows(line_tokens(samples.test), length, TEST_WINDOWS * samples.ranks, seed=0)
        training = Windows(tokens, length, rows, config.seed, multiple=config.accumulate)
        return Inputs(_reading(training), _reading(test))

    def size(self, batch: Batch) -> int:
        """See :meth:`Task.size`."""
        return int(np.count_nonzero(batch.arrays[2]))

    def make_model(self, config: AnyConfig, dataset: TextDataset) -> "keras.Model":
        """See :meth:`Task.make_model`."""
        import tensorflow as tf

        model = super().make_model(config, dataset)
        if self.streams != hasattr(model, "zero_state"):
            carries = "carries no state" if self.streams else "carries its state from batch to batch"
            raise ValueError(
                f"task.streams: expected {str(not self.streams).lower()}, {config.model.name} {carries}, "
                f"got {str(self.streams).lower()}"
            )
        if self.streams:
            state = model.zero_state(phases_of(config)[0].batch_size)
            self.carried = [tf.Variable(state, trainable=False, name="carried_state")]
        return model

    def specs(self, phase: WindowPhase, samples: Samples) -> Sequence[Any]:
        """See :meth:`Task.specs`: tokens, those that follow them, and their weights."""
        import tensorflow as tf

        shape = phase.batch_size if self.streams else None, phase.sequence_length
        return [tf.TensorSpec(shape, dtype) for dtype in (tf.int32, tf.int32, tf.float32)]

    def losses(self, model: "keras.Model", arrays: Sequence[Any], phase: WindowPhase) -> Any:
        """See :meth:`Task.losses`."""
        import tensorflow as tf

        tokens, targets, weights = arrays
        if self.streams:
            logits, state = model([tokens, self.carried[0]], training=True)
            self.carried[0].assign(state)
        else:
            logits = model(tokens, training=True)
        return tf.reduce_sum(weights * cross_entropies(targets, logits), axis=1)

    def evaluation(self, model: "keras.Model", samples: Samples) -> Evaluation:
        """See :meth:`Task.evaluation`."""
        return Perplexity(StreamedLosses(model) if self.streams else WindowLosses(model))


class NextTokens(Collation):
    """Windows of a text, the tokens that follow each of theirs, and weights of these."""

    def __init__(self, order: TextOrder) -> None:
        self._order = order

    def arrays(
        self,
        samples: Sequence[npt.NDArray[np.uint8]],
        labels: npt.NDArray[np.int64],
        spec: BatchSpec,
        pools: Pools,
    ) -> tuple[npt.NDArray[Any], ...]:
        """See :class:`Collation`: int32, int32 and float32, ``(rows, length)``."""
        rows = rows_of(self._order, samples, spec)
        spans = self._order.spans(spec.epoch, spec.step, spec.rank, spec.world_size)
        counts = np.arange(self._order.length) < (spans.stops - spans.starts)[:, np.newaxis]
        weights = weights_of(counts, self._order.size(spec.epoch, spec.step), spec.world_size)
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]), weights


class WindowLosses:
    """The cross-entropy of each token of windows that know nothing of each other."""

    def __init__(self, model: "keras.Model") -> None:
        def forward(tokens: Any, targets: Any) -> Any:
            return cross_entropies(targets, model(tokens, training=False))

        self._forward = traced(forward)

    def begin(self) -> None:
        """Start at the beginning of the text."""

    def __call__(self, tokens: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the cross-entropies ``(rows, length)``."""
        return np.asarray(self._forward(tokens, targets))


class StreamedLosses:
    """The cross-entropy of each token of streams, the model's state carried from one batch to the next."""

    def __init__(self, model: "keras.Model") -> None:
        def forward(tokens: Any, targets: Any, state: Any) -> tuple[Any, Any]:
            logits, after = model([tokens, state], training=False)
            return cross_entropies(targets, logits), after

        self._model, self._state = model, None
        self._forward = traced(forward)

    def begin(self) -> None:
        """Start at the beginning of each stream."""
        self._state = None

    def __call__(self, tokens: npt.NDArray[Any], targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the cross-entropies ``(rows, length)``."""
        if self._state is None:
            self._state = self._model.zero_state(len(tokens))
        found, self._state = self._forward(tokens, targets, self._state)
        return np.asarray(found)


class Perplexity(Evaluation):
    """e to the mean cross-entropy of all tokens of the test."""

    def __init__(self, losses: WindowLosses | StreamedLosses) -> None:
        self._losses = losses

    def evaluate(self, batches: Iterable[Batch], comm: Communicator) -> Tested:
        """See :meth:`Evaluation.evaluate`."""
        self._losses.begin()
        tested = Means(self._numbers).evaluate(batches, comm)
        return Tested({"perplexity": perplexity_of(tested.values["cross_entropy"])}, tested.count)

    def _numbers(self, batch: Batch) -> dict[str, npt.NDArray[Any]]:
        tokens, targets, weights = batch.arrays
        return {"cross_entropy": self._losses(tokens, targets)[weights > 0]}


def cross_entropies(targets: Any, logits: Any) -> Any:
    """Return the cross-entropy of each target; part of a graph."""
    import tensorflow as tf

    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)


def _reading(order: TextOrder) -> Reading:
    return Reading(order, NextTokens(order), Preprocessing("text"))


def _test_streams(test: Manifest, length: int) -> Streams:
    tokens = line_tokens(test)
    return Streams(tokens, length, max(1, min(TEST_STREAMS, int(tokens.sum()) - 1)))
