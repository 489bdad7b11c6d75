"""Running text: language models (the next token) and masked ones (hidden tokens, Devlin et al. 2019)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib import Communicator
from commlib.errors import shown
from datacache import Batch, BatchSpec, Collation, Pools, Preprocessing, Streams, Windows, unpack_tokens
from datacache.batches import Arrays, Sample
from datacache.order import Flags, Ids, hashed
from datacache.text_orders import Spans, TextOrder
from training.config.records import AnyConfig
from training.datasets import TextDataset
from training.datasets.vocabulary import MASK, SPECIAL
from training.models import MASKED_TOKENS, NEXT_TOKENS
from training.tasks.task import Evaluation, Inputs, Means, Metric, Reading, Samples, Tested, traced
from training.tasks.text import WindowPhase, WindowTask, cross_entropies, perplexity_of, weights_of

TEST_STREAMS = 32  # of all ranks: the same tokens have the same text before them at every world size
MASKED, KEPT = 0.8, 0.1  # of the chosen tokens: hidden, and left as they are; others are replaced
_CHOSEN, _CHANGED, _REPLACED = range(20, 23)  # keys of what is drawn for a token
_BITS = 53  # of a float's fraction


class LanguageModel(WindowTask):
    """Running text: the cross-entropy of each token, given those before it.

    ``streams``: whether the text is read in parallel streams along which the model carries its state from
    batch to batch: a recurrent model, from ``[tokens, state]`` to ``[logits, state]``, with a method
    ``zero_state(rows)``. Otherwise windows of the text are shuffled, and the model maps tokens to logits.
    """

    signature = NEXT_TOKENS
    metrics = {"perplexity": Metric("test perplexity", "lower")}

    def __init__(self, *, streams: bool = False) -> None:
        if streams not in (True, False):
            raise ValueError(f"streams: expected true or false, got {streams!r}")
        self.streams = streams
        self.rows = "streams" if streams else "windows"

    def check(self, config: AnyConfig) -> None:
        super().check(config)
        if not self.streams:
            return
        if config.accumulate > 1:
            raise ValueError(f"accumulate: expected 1 where text is read in streams, got {config.accumulate}")
        first = config.phases[0].batch_size
        for number, phase in enumerate(config.phases):
            if phase.batch_size != first:
                expected = f"the {first} streams of the first phase"
                raise ValueError(f"phases[{number}].batch_size: expected {expected}, got {phase.batch_size}")

    def inputs(self, phase: WindowPhase, samples: Samples) -> Inputs:
        orders: tuple[TextOrder, TextOrder]
        if self.streams:
            length, test = phase.sequence_length, samples.test.more["tokens"]
            rows, test_rows = phase.batch_size * samples.ranks, min(TEST_STREAMS, int(test.sum()) - 1)
            training = Streams(samples.training.more["tokens"], length, rows)
            orders = training, Streams(test, length, max(1, test_rows))
        else:
            orders = self.windows(phase, samples, ahead=1)
        return Inputs(*(Reading(order, NextTokens(order), Preprocessing("text")) for order in orders))

    def size(self, batch: Batch) -> int:
        return int(np.count_nonzero(batch.arrays[2]))

    def make_model(self, config: AnyConfig, dataset: TextDataset) -> Any:
        import tensorflow as tf

        model = super().make_model(config, dataset)
        if self.streams != hasattr(model, "zero_state"):
            carries = "carries no state" if self.streams else "carries its state from batch to batch"
            expected, got = ("false", "true") if self.streams else ("true", "false")
            raise ValueError(f"task.streams: expected {expected}, {config.model.name} {carries}, got {got}")
        if self.streams:
            state = model.zero_state(config.phases[0].batch_size)
            self.carried = [tf.Variable(state, trainable=False, name="carried_state")]
        return model

    def losses(self, model: Any, arrays: Sequence[Any], phase: WindowPhase) -> Any:
        import tensorflow as tf

        tokens, targets, weights = arrays
        if self.streams:
            logits, state = model([tokens, self.carried[0]], training=True)
            self.carried[0].assign(state)
        else:
            logits = model(tokens, training=True)
        return tf.reduce_sum(weights * cross_entropies(targets, logits), axis=1)

    def evaluation(self, model: Any, samples: Samples) -> Evaluation:
        return Perplexity(model, streams=self.streams)


class NextTokens(Collation):
    """Windows of a text, the tokens that follow each of theirs, and weights of these."""

    def __init__(self, order: TextOrder) -> None:
        self._order = order

    def arrays(self, samples: Sequence[Sample], labels: Ids, spec: BatchSpec, pools: Pools) -> Arrays:
        """See :class:`Collation`: int32, int32 and float32, ``(rows, length)``."""
        spans = self._order.spans(spec.epoch, spec.step, spec.rank, spec.world_size)
        rows = self._order.rows(spans, spec.ids, [unpack_tokens(sample)[0] for sample in samples])
        counts = np.arange(self._order.length) < (spans.stops - spans.starts)[:, np.newaxis]
        weights = weights_of(counts, self._order.size(spec.epoch, spec.step), spec.world_size)
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]), weights


class Perplexity(Evaluation):
    """e to the mean cross-entropy of all tokens; ``streams``: the state is carried from batch to batch."""

    def __init__(self, model: Any, *, streams: bool) -> None:
        def forward(tokens: Any, targets: Any, *state: Any) -> tuple[Any, ...]:
            found = model([tokens, *state] if streams else tokens, training=False)
            logits, *after = found if streams else [found]
            return (cross_entropies(targets, logits), *after)

        self._zero_state = model.zero_state if streams else None
        self._state: tuple[Any, ...] | None = None
        self._forward = traced(forward)

    def evaluate(self, batches: Iterable[Batch], comm: Communicator) -> Tested:
        self._state = None
        tested = Means(self._numbers).evaluate(batches, comm)
        return Tested({"perplexity": perplexity_of(tested.values["cross_entropy"])}, tested.count)

    def _numbers(self, batch: Batch) -> dict[str, npt.NDArray[Any]]:
        tokens, targets, weights = batch.arrays
        if self._state is None:
            self._state = () if self._zero_state is None else (self._zero_state(len(tokens)),)
        losses, *after = self._forward(tokens, targets, *self._state)
        self._state = tuple(after)
        return {"cross_entropy": np.asarray(losses)[weights > 0]}


class MaskedLanguageModel(WindowTask):
    """Running text: the cross-entropy of tokens that are hidden, given those on both sides.

    ``share``: of the tokens that are to be found. Of these 80 % are replaced by the mask, 10 % by another
    token, and 10 % are left as they are, as a function of the seed, the epoch and the place in the text;
    tests always hide the same tokens. The end of a line is never hidden.
    """

    signature = MASKED_TOKENS
    metrics = {
        "masked_loss": Metric("test loss of masked tokens", "lower"),
        "masked_accuracy": Metric("test accuracy of masked tokens", "higher", share=True),
    }

    def __init__(self, *, share: float = 0.15) -> None:
        if not isinstance(share, float) or not 0 < share < 1:
            raise ValueError(f"share: expected a number in (0, 1), got {shown(share)}")
        self.share = share

    def check_samples(self, samples: Samples) -> None:
        super().check_samples(samples)
        if not samples.dataset.vocabulary.has_mask:
            raise ValueError("dataset.vocabulary.mask: expected true for masked_language_model, got false")

    def inputs(self, phase: WindowPhase, samples: Samples) -> Inputs:
        orders = self.windows(phase, samples, ahead=0)
        size, stored = samples.dataset.vocabulary_size, Preprocessing("text")
        return Inputs(*(Reading(each, MaskedTokens(each, self.share, size), stored) for each in orders))

    def size(self, batch: Batch) -> int:
        """See :meth:`Task.size`: all tokens, not only those that are hidden."""
        return int(np.count_nonzero(batch.arrays[1]))

    def losses(self, model: Any, arrays: Sequence[Any], phase: WindowPhase) -> Any:
        import tensorflow as tf

        hidden, tokens, weights = arrays
        return tf.reduce_sum(weights * cross_entropies(tokens, model(hidden, training=True)), axis=1)

    def evaluation(self, model: Any, samples: Samples) -> Evaluation:
        import tensorflow as tf

        def forward(hidden: Any, tokens: Any) -> tuple[Any, Any]:
            logits = model(hidden, training=False)
            return cross_entropies(tokens, logits), tf.argmax(logits, axis=-1, output_type=tf.int32)

        compiled = traced(forward)

        def numbers(batch: Batch) -> Mapping[str, npt.NDArray[Any]]:
            hidden, tokens, weights = batch.arrays
            losses, found = (np.asarray(each) for each in compiled(hidden, tokens))
            counts = weights > 0
            return {"masked_loss": losses[counts], "masked_accuracy": (found == tokens)[counts]}

        return Means(numbers)


class MaskedTokens(Collation):
    """Windows of a text with some tokens hidden, the windows as they are, and weights of the hidden tokens.

    ``share``: of the tokens that are chosen. ``size``: of the vocabulary.
    """

    def __init__(self, order: Windows, share: float, size: int) -> None:
        self._order, self._share, self._size = order, share, size

    def arrays(self, samples: Sequence[Sample], labels: Ids, spec: BatchSpec, pools: Pools) -> Arrays:
        """See :class:`Collation`: int32, int32 and float32, ``(rows, length)``."""
        spans = self._order.spans(spec.epoch, spec.step, spec.rank, spec.world_size)
        tokens = self._order.rows(spans, spec.ids, [unpack_tokens(sample)[0] for sample in samples])
        chosen, positions = self._chosen(spans, spec)
        every = self._order.spans(spec.epoch, spec.step, 0, 1)
        total = int(self._chosen(every, spec)[0].sum())
        drawn = _drawn(positions, _CHANGED, spec)
        others = SPECIAL + (_drawn(positions, _REPLACED, spec) * (self._size - SPECIAL)).astype(np.int32)
        changed = np.select([drawn < MASKED, drawn < MASKED + KEPT], [np.int32(MASK), tokens], others)
        return np.where(chosen, changed, tokens), tokens, weights_of(chosen, total, spec.world_size)

    def _chosen(self, spans: Spans, spec: BatchSpec) -> tuple[Flags, Ids]:
        """Return which tokens of rows are chosen, and the position of each in the text."""
        positions = spans.starts[:, np.newaxis] + np.arange(self._order.length)
        can_be = (positions < spans.stops[:, np.newaxis]) & ~self._order.ends_sample(positions)
        return can_be & (_drawn(positions, _CHOSEN, spec) < self._share), positions


def _drawn(positions: Ids, use: int, spec: BatchSpec) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each position: a function of seed, epoch and position."""
    bits = hashed(positions.ravel(), use, spec.seed, spec.epoch)
    return ((bits >> np.uint64(64 - _BITS)) / float(1 << _BITS)).reshape(positions.shape)
