"""Translation: the cross-entropy of a target's tokens given its source, and BLEU of beam search."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib import Communicator
from commlib.errors import shown
from datacache import Batch, BatchOrder, BatchSpec, Collation, Manifest, Pools, Preprocessing, unpack_tokens
from datacache.batches import Arrays, Sample
from datacache.order import Ids
from datacache.text_orders import LengthBuckets, bucket_boundaries
from training.config import records
from training.config.records import AnyConfig, Part
from training.config.schema import Count, is_number, is_whole
from training.datasets import ParallelTextDataset
from training.datasets.vocabulary import PAD, START
from training.models import TRANSLATIONS
from training.tasks.task import Evaluation, Inputs, Metric, Reading, Samples, Tested, Tiny, traced
from training.tasks.text import TextTask, cross_entropies, longest_of, padded, perplexity_of, weights_of

TEST_TOKENS = 2048  # of one rank at a step, padding included
SEARCHED = ("encode", "decode", "start", "longest", "vocabulary_size")  # what beam search uses of a model
EXAMPLES = 3  # translations that are shown after a test
TINY_WORDS = 7  # of a sentence of a dry run
TINY_SENTENCES = 4  # in a step of one rank of a dry run, for each part of `accumulate`


class TranslationPhase(records.Phase):
    """A phase that reads sentences and their translations, in batches of similar lengths."""

    tokens: Count
    """Maximum tokens in a step, per rank on average: a pair counts as its longer sentence, with padding."""
    sequence_length: Count
    """Tokens of the longest sentence that is trained on, its end included."""
    label_smoothing: Part = 0.0
    """Label smoothing: share of the weight of each token that is spread over the vocabulary."""


class Translation(TextTask):
    """Sentences and their translations: a model from ``[source, target]`` to logits of the tokens to come.

    ``beams`` and ``length_penalty``: of the beam search that translates the test part, see
    :class:`training.models.decoding.Decoder`.
    """

    Phase = TranslationPhase
    dataset = ParallelTextDataset
    signature = TRANSLATIONS
    metrics = {"bleu": Metric("test BLEU", "higher"), "perplexity": Metric("test perplexity", "lower")}

    def __init__(self, *, beams: int = 4, length_penalty: float = 0.6) -> None:
        if not is_whole(beams, 1):
            raise ValueError(f"beams: expected a whole number from 1, got {shown(beams)}")
        if not is_number(length_penalty) or length_penalty < 0:
            raise ValueError(f"length_penalty: expected a number from 0, got {shown(length_penalty)}")
        self.beams, self.length_penalty = beams, float(length_penalty)

    def check(self, config: AnyConfig) -> None:
        super().check(config)
        for number, phase in enumerate(config.phases):
            if phase.sequence_length < 2:
                expected = "at least 2 tokens, a word and its end"
                raise ValueError(f"phases[{number}].sequence_length: expected {expected}, got 1")
            if phase.tokens < phase.sequence_length:
                expected = f"at least the {phase.sequence_length} of one sentence (sequence_length)"
                raise ValueError(f"phases[{number}].tokens: expected {expected}, got {phase.tokens}")

    def describe(self, phase: TranslationPhase) -> str:
        return f"up to {phase.sequence_length} tokens"

    def describe_batch(self, phase: TranslationPhase) -> str:
        return f"{phase.tokens:,} tokens"

    def tiny(self, config: AnyConfig, ranks: int) -> Tiny:
        length = min(TINY_WORDS + 1, *(phase.sequence_length for phase in config.phases))
        sentences = TINY_SENTENCES * config.accumulate
        small = [{"tokens": sentences * length, "sequence_length": length} for _ in config.phases]
        options = {"kind": "pairs", "samples": sentences * ranks, "test_samples": ranks, "words": length - 1}
        return self.generated(config, config.make_dataset(), ranks, small, **options)

    def check_samples(self, samples: Samples) -> None:
        super().check_samples(samples)
        longest, found = longest_of(samples.config), int(_lengths(samples.test).max())
        if longest is not None and found > longest:
            expected = f"at least {found}, the tokens of the longest sentence of the test"
            raise ValueError(f"model.longest: expected {expected}, got {longest}")

    def notes(self, samples: Samples) -> Iterable[str]:
        for number, phase in enumerate(samples.config.phases, 1):
            if left_out := _training_order(phase, samples).left_out:
                why = f"one of their sentences has more than {phase.sequence_length} tokens"
                yield f"phase {number}: {left_out:,} of {len(samples.training):,} pairs are left out: {why}"

    def inputs(self, phase: TranslationPhase, samples: Samples) -> Inputs:
        lengths = _lengths(samples.test)
        boundaries = bucket_boundaries(int(lengths.max()))
        tokens = max(TEST_TOKENS, boundaries[-1]) * samples.ranks
        return Inputs(
            _reading(_training_order(phase, samples), samples.training),
            _reading(LengthBuckets(lengths, tokens, seed=0, boundaries=boundaries), samples.test),
        )

    def size(self, batch: Batch) -> int:
        return int(np.count_nonzero(batch.arrays[2]))

    def make_model(self, config: AnyConfig, dataset: ParallelTextDataset) -> Any:
        model = super().make_model(config, dataset)
        if missing := [each for each in SEARCHED if not hasattr(model, each)]:
            expected = f"one that beam search can use, with {', '.join(SEARCHED)}"
            raise ValueError(f"model: expected {expected}, {config.model.name} has no {', '.join(missing)}")
        return model

    def specs(self, phase: TranslationPhase, samples: Samples) -> Sequence[Any]:
        """See :meth:`Task.specs`: sources, targets, and weights of the targets' tokens."""
        import tensorflow as tf

        return [tf.TensorSpec((None, None), dtype) for dtype in (tf.int32, tf.int32, tf.float32)]

    def losses(self, model: Any, arrays: Sequence[Any], phase: TranslationPhase) -> Any:
        """See :meth:`Task.losses`: the weighted sum over the tokens of each target."""
        import tensorflow as tf

        sources, targets, weights = arrays
        logits = model([sources, shifted(targets)], training=True)
        losses, smoothing = cross_entropies(targets, logits), phase.label_smoothing
        if smoothing > 0:
            uniform = tf.reduce_logsumexp(logits, axis=-1) - tf.reduce_mean(logits, axis=-1)
            losses = (1 - smoothing) * losses + smoothing * uniform
        return tf.reduce_sum(weights * losses, axis=1)

    def evaluation(self, model: Any, samples: Samples) -> Evaluation:
        return TranslationTest(model, samples, self.beams, self.length_penalty)


class Pairs(Collation):
    """Sources, targets and the weights of the targets' tokens, each ``(pairs, tokens of the longest)``."""

    def __init__(self, order: BatchOrder, target_tokens: npt.NDArray[np.int64]) -> None:
        self._order, self._target_tokens = order, target_tokens

    def arrays(self, samples: Sequence[Sample], labels: Ids, spec: BatchSpec, pools: Pools) -> Arrays:
        """See :class:`Collation`: int32, int32, float32."""
        sources, targets = zip(*(unpack_tokens(sample, pair=True) for sample in samples), strict=True)
        everywhere = self._order.batch(spec.epoch, spec.step, 0, 1)
        total = self._target_tokens[everywhere[self._order.counts(spec.epoch, spec.step, 0, 1)]].sum()
        filled = padded(targets)
        weights = weights_of((filled != PAD) & spec.counts[:, None], int(total), spec.world_size)
        return padded(sources), filled, weights


class TranslationTest(Evaluation):
    """BLEU of the beam search's translations of all sources, and the perplexity of the targets' tokens.

    BLEU is sacrebleu's of detokenized text, with sacrebleu's tokens (13a) and case.
    """

    def __init__(self, model: Any, samples: Samples, beams: int, length_penalty: float) -> None:
        from training.models.decoding import Decoder

        def forward(sources: Any, targets: Any) -> Any:
            return cross_entropies(targets, model([sources, shifted(targets)], training=False))

        self._samples = samples
        self._forward = traced(forward)
        self._decoder = Decoder(model, beams=beams, length_penalty=length_penalty)

    def evaluate(self, batches: Iterable[Batch], comm: Communicator) -> Tested:
        own, loss, tokens = dict[int, str](), 0.0, 0
        for batch in batches:
            sources, targets, weights = batch.arrays
            losses = np.asarray(self._forward(sources, targets))[weights > 0]
            loss, tokens = loss + float(losses.sum(dtype=np.float64)), tokens + len(losses)
            own |= self._translations(sources, batch)
        of_ranks = comm.allgather_objects((own, loss, tokens))
        translations = {sample: text for each, _, _ in of_ranks for sample, text in each.items()}
        mean = sum(each for _, each, _ in of_ranks) / sum(each for _, _, each in of_ranks)
        pairs = self._samples.dataset.test.texts(self._samples.test, np.arange(len(self._samples.test)))
        found = [translations[sample] for sample in range(len(pairs))]
        values = {"bleu": bleu(found, [target for _, target in pairs]), "perplexity": perplexity_of(mean)}
        examples = [
            {"source": source, "translation": translation, "reference": reference}
            for (source, reference), translation in zip(pairs, found, strict=True)
        ]
        return Tested(values, len(pairs), examples[:: math.ceil(len(pairs) / EXAMPLES)])

    def _translations(self, sources: npt.NDArray[np.int32], batch: Batch) -> dict[int, str]:
        """Return the translation of each sample of a batch that counts, by its id."""
        found = self._decoder(np.where(batch.counts[:, None], sources, PAD))[batch.counts]
        decode = self._samples.dataset.vocabulary.decode
        pairs = zip(batch.ids[batch.counts].tolist(), found.tolist(), strict=True)
        return {sample: decode(tokens) for sample, tokens in pairs}


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """Return BLEU, 0 to 100, of translations that have one reference each."""
    from sacrebleu.metrics.bleu import BLEU

    return float(BLEU(force=True).corpus_score(translations, [references]).score)


def shifted(targets: Any) -> Any:
    """Return the token before each token of targets: the start before the first."""
    import tensorflow as tf

    return tf.pad(targets[:, :-1], [[0, 0], [1, 0]], constant_values=START)


def _lengths(manifest: Manifest) -> npt.NDArray[np.int64]:
    """Return the tokens of the longer one of each pair."""
    return np.maximum(manifest.more["source_tokens"], manifest.more["target_tokens"])


def _training_order(phase: TranslationPhase, samples: Samples) -> LengthBuckets:
    config, boundaries = samples.config, bucket_boundaries(phase.sequence_length)
    tokens, lengths = phase.tokens * samples.ranks, _lengths(samples.training)
    return LengthBuckets(lengths, tokens, config.seed, boundaries, multiple=config.accumulate)


def _reading(order: LengthBuckets, manifest: Manifest) -> Reading:
    return Reading(order, Pairs(order, manifest.more["target_tokens"]), Preprocessing("text"))
