"""Masked language models: tokens of a text that are hidden from the model (Devlin et al. 2019)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from commlib.errors import shown
from datacache import Batch, BatchSpec, Collation, Pools, Preprocessing, Windows
from datacache.order import Flags, Ids, hashed
from datacache.text_orders import Spans, Tokens
from training.config.records import AnyConfig
from training.datasets import TextDataset
from training.datasets.vocabulary import MASK, SPECIAL
from training.models import MASKED_TOKENS
from training.tasks.language_model import cross_entropies
from training.tasks.task import Evaluation, Inputs, Means, Metric, Reading, Samples, Tiny, traced
from training.tasks.text import (
    TextTask,
    WindowPhase,
    check_lengths,
    check_orders,
    line_tokens,
    rows_of,
    tiny_text,
    weights_of,
)

if TYPE_CHECKING:
    import keras


TEST_WINDOWS = 32  # of one rank at a step
MASKED, KEPT = 0.8, 0.1  # of the chosen tokens: hidden, and left as they are; others are replaced
_CHOSEN, _CHANGED, _REPLACED = range(20, 23)  # keys of what is drawn for a token
_BITS = 53  # of a float's fraction


class MaskedLanguageModel(TextTask):
    """Running text: the cross-entropy of tokens that are hidden, given those on both sides.

    ``share``: of the tokens, those that are to be found. Of these 80 % are replaced by the mask, 10 % by
    another token, and 10 % are left as they are. Which, is a function of the seed, the epoch and the place
    in the text; tests always hide the same ones. What ends a line is never hidden.
    """

    Phase = WindowPhase
    dataset = TextDataset
    signature = MASKED_TOKENS
    unit = "tokens"
    metrics = {
        "masked_loss": Metric("test loss of masked tokens", "lower"),
        "masked_accuracy": Metric("test accuracy of masked tokens", "higher", share=True),
    }

    def __init__(self, *, share: float = 0.15) -> None:
        if not isinstance(share, float) or not 0 < share < 1:
            raise ValueError(f"share: expected a number in (0, 1), got {shown(share)}")
        self.share = share

    def check(self, config: AnyConfig) -> None:
        """See :meth:`Task.check`."""
        check_lengths(config)

    def describe(self, phase: WindowPhase) -> str:
        """See :meth:`Task.describe`."""
        return f"{phase.sequence_length} tokens"

    def describe_batch(self, phase: WindowPhase) -> str:
        """See :meth:`Task.describe_batch`."""
        return f"{phase.batch_size} windows"

    def tiny(self, config: AnyConfig, ranks: int) -> Tiny:
        """See :meth:`Task.tiny`: generated text."""
        return tiny_text(self, config, ranks)

    def check_samples(self, samples: Samples) -> None:
        """See :meth:`Task.check_samples`."""
        check_orders(self, samples)
        if not samples.dataset.vocabulary.has_mask:
            raise ValueError("dataset.vocabulary.mask: expected true for masked_language_model, got false")

    def inputs(self, phase: WindowPhase, samples: Samples) -> Inputs:
        """See :meth:`Task.inputs`."""
        config, length = samples.config, phase.sequence_length
        training = Windows(
            line_tokens(samples.training),
            length,
            phase.batch_size * samples.ranks,
            config.seed,
            ahead=0,
            multiple=config.accumulate,
        )
        test = Windows(line_tokens(samples.test), length, TEST_WINDOWS * samples.ranks, seed=0, ahead=0)
        return Inputs(*(self._reading(order, samples) for order in (training, test)))

    def _reading(self, order: Windows, samples: Samples) -> Reading:
        tokens = samples.dataset.vocabulary_size
        return Reading(order, MaskedTokens(order, self.share, tokens), Preprocessing("text"))

    def size(self, batch: Batch) -> int:
        """See :meth:`Task.size`: all tokens, not only those that are hidden."""
        return int(np.count_nonzero(batch.arrays[1]))

    def specs(self, phase: WindowPhase, samples: Samples) -> Sequence[Any]:
        """See :meth:`Task.specs`: tokens, some of them hidden, as they are, and their weights."""
        import tensorflow as tf

        shape = None, phase.sequence_length
        return [tf.TensorSpec(shape, dtype) for dtype in (tf.int32, tf.int32, tf.float32)]

    def losses(self, model: "keras.Model", arrays: Sequence[Any], phase: WindowPhase) -> Any:
        """See :meth:`Task.losses`."""
        import tensorflow as tf

        hidden, tokens, weights = arrays
        return tf.reduce_sum(weights * cross_entropies(tokens, model(hidden, training=True)), axis=1)

    def evaluation(self, model: "keras.Model", samples: Samples) -> Evaluation:
        """See :meth:`Task.evaluation`."""
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

    ``share``: of the tokens, those that are chosen. ``size``: of the vocabulary.
    """

    def __init__(self, order: Windows, share: float, size: int) -> None:
        self._order, self._share, self._size = order, share, size

    def arrays(
        self,
        samples: Sequence[npt.NDArray[np.uint8]],
        labels: npt.NDArray[np.int64],
        spec: BatchSpec,
        pools: Pools,
    ) -> tuple[npt.NDArray[Any], ...]:
        """See :class:`Collation`: int32, int32 and float32, ``(rows, length)``."""
        tokens = rows_of(self._order, samples, spec)
        spans = self._order.spans(spec.epoch, spec.step, spec.rank, spec.world_size)
        chosen, positions = self._chosen(spans, spec)
        every = self._order.spans(spec.epoch, spec.step, 0, 1)
        total = int(self._chosen(every, spec)[0].sum())
        hidden = np.where(chosen, self._changed(tokens, positions, spec), tokens)
        return hidden, tokens, weights_of(chosen, total, spec.world_size)

    def _chosen(self, spans: Spans, spec: BatchSpec) -> tuple[Flags, Ids]:
        """Return which tokens of rows are chosen, and the position of each in the text."""
        positions = spans.starts[:, np.newaxis] + np.arange(self._order.length)
        can_be = (positions < spans.stops[:, np.newaxis]) & ~self._order.ends_sample(positions)
        return can_be & (_drawn(positions, _CHOSEN, spec) < self._share), positions

    def _changed(self, tokens: Tokens, positions: Ids, spec: BatchSpec) -> Tokens:
        """Return what is shown in place of each token, if it is chosen."""
        drawn = _drawn(positions, _CHANGED, spec)
        others = SPECIAL + (_drawn(positions, _REPLACED, spec) * (self._size - SPECIAL)).astype(np.int32)
        return np.where(drawn < MASKED, MASK, np.where(drawn < MASKED + KEPT, tokens, others)).astype(
            np.int32
        )


def _drawn(positions: Ids, use: int, spec: BatchSpec) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each position: a function of seed, epoch and position."""
    bits = hashed(positions.ravel(), use, spec.seed, spec.epoch)
    return ((bits >> np.uint64(64 - _BITS)) / float(1 << _BITS)).reshape(positions.shape)
