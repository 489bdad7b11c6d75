"""What the tasks of text share: windows, weights of tokens, padding; and text classification."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from datacache import BatchSpec, Collation, EvaluationOrder, Order, Pools, Preprocessing, unpack_tokens
from datacache.batches import Arrays, Sample
from datacache.order import Ids
from datacache.text_orders import Tokens, Windows
from training.config import records
from training.config.records import AnyConfig, DatasetRecord
from training.config.schema import Count, imported
from training.datasets import LabelledTextDataset, TextDataset
from training.datasets.vocabulary import PAD
from training.models import MODELS, TEXT_CLASSES
from training.tasks.image_classification import hits
from training.tasks.task import Evaluation, Inputs, Means, Metric, Reading, Samples, Task, Tiny, traced

LARGEST_EXPONENT = 700.0  # e to this is nearly the largest float
TEST_WINDOWS, TEST_TEXTS = 32, 64  # of one rank in a step
# Of a dry run:
TINY_BATCH = 2  # rows in a step of one rank, and for each part of `accumulate`
TINY_LENGTH = 8  # tokens
TINY_WORDS = 12


class TextTask(Task):
    """A task whose samples are tokens of a vocabulary, which the weights belong to."""

    unit = "tokens"

    def identity(self, dataset: Any) -> str:
        return f"vocabulary {dataset.vocabulary.fingerprint}"

    def check(self, config: AnyConfig) -> None:
        """See :meth:`Task.check`: sequences are no longer than a built-in model takes."""
        longest = longest_of(config)
        for number, phase in enumerate(config.phases):
            if longest is not None and (length := phase.sequence_length) > longest:
                expected = f"at most the {longest} tokens that {config.model.name} takes"
                raise ValueError(f"phases[{number}].sequence_length: expected {expected}, got {length}")

    def check_samples(self, samples: Samples) -> None:
        """See :meth:`Task.check_samples`: every phase can read the text."""
        for number, phase in enumerate(samples.config.phases):
            try:
                self.inputs(phase, samples)
            except ValueError as error:
                raise ValueError(f"phases[{number}]: {error}") from error

    def generated(
        self, config: AnyConfig, dataset: Any, ranks: int, phases: Iterable[Mapping[str, Any]], **options: Any
    ) -> Tiny:
        """Return a dry run on generated text with the vocabulary size of ``dataset``.

        ``phases``: what changes in each phase. ``options``: of the data set ``synthetic_text``.
        """
        keys = {"name": "synthetic_text", "tokens": dataset.vocabulary_size, **options}
        small = [
            phase.model_copy(update=changes) for phase, changes in zip(config.phases, phases, strict=True)
        ]
        return Tiny(DatasetRecord.model_validate(keys), small, self.epochs(config, dataset, ranks))


class WindowPhase(records.Phase):
    """A phase that reads windows of a text."""

    sequence_length: Count
    """Tokens of a window."""
    batch_size: Count
    """Windows in a step of one rank."""


class WindowTask(TextTask):
    """A task that reads windows of running text, with a weight for each token."""

    Phase = WindowPhase
    dataset = TextDataset
    rows = "windows"
    streams = False  # whether a rank's rows are streams, equally many at each step

    def describe(self, phase: WindowPhase) -> str:
        return f"{phase.sequence_length} tokens"

    def tiny(self, config: AnyConfig, ranks: int) -> Tiny:
        batch = TINY_BATCH * config.accumulate
        lines = batch * ranks * TINY_LENGTH
        small = [
            {"sequence_length": min(phase.sequence_length, TINY_LENGTH), "batch_size": batch}
            for phase in config.phases
        ]
        options = {"samples": lines, "test_samples": lines, "words": TINY_WORDS}
        return self.generated(config, config.make_dataset(), ranks, small, **options)

    def windows(self, phase: WindowPhase, samples: Samples, ahead: int) -> tuple[Windows, Windows]:
        """Return the windows to train on and to test; ``ahead``: tokens after a window that it needs."""
        config, length, ranks = samples.config, phase.sequence_length, samples.ranks
        tokens, test_tokens = samples.training.more["tokens"], samples.test.more["tokens"]
        rows, parts = phase.batch_size * ranks, config.accumulate
        return (
            Windows(tokens, length, rows, config.seed, ahead=ahead, multiple=parts),
            Windows(test_tokens, length, TEST_WINDOWS * ranks, seed=0, ahead=ahead),
        )

    def specs(self, phase: WindowPhase, samples: Samples) -> Sequence[Any]:
        """See :meth:`Task.specs`: inputs, targets, and weights of the targets."""
        import tensorflow as tf

        shape = phase.batch_size if self.streams else None, phase.sequence_length
        return [tf.TensorSpec(shape, dtype) for dtype in (tf.int32, tf.int32, tf.float32)]


class TextPhase(records.Phase):
    """A phase that reads whole texts."""

    batch_size: Count
    """Texts in a step of one rank."""


class TextClassification(TextTask):
    """Texts with one label each: the cross-entropy of a model's logits ``(batch, classes)``."""

    Phase = TextPhase
    dataset = LabelledTextDataset
    signature = TEXT_CLASSES
    unit = rows = "texts"
    metrics = {"accuracy": Metric("test accuracy", "higher", share=True)}

    check_samples = Task.check_samples

    def check(self, config: AnyConfig) -> None:
        self.check_accumulate(config)

    def describe(self, phase: TextPhase) -> str:
        return "whole texts"

    def tiny(self, config: AnyConfig, ranks: int) -> Tiny:
        dataset, batch = config.make_dataset(), TINY_BATCH * config.accumulate
        options = {"kind": "labelled", "classes": dataset.classes}
        options |= {"samples": batch * ranks, "test_samples": ranks}
        small = [{"batch_size": batch} for _ in config.phases]
        return self.generated(config, dataset, ranks, small, **options)

    def inputs(self, phase: TextPhase, samples: Samples) -> Inputs:
        texts, preprocessing = Texts(), Preprocessing("text")
        training = Order(len(samples.training), 1, phase.batch_size * samples.ranks, samples.config.seed)
        test = EvaluationOrder(len(samples.test), TEST_TEXTS, samples.ranks)
        return Inputs(Reading(training, texts, preprocessing), Reading(test, texts, preprocessing))

    def specs(self, phase: TextPhase, samples: Samples) -> Sequence[Any]:
        import tensorflow as tf

        rows = phase.batch_size
        return [tf.TensorSpec((rows, None), tf.int32), tf.TensorSpec((rows,), tf.int64)]

    def losses(self, model: Any, arrays: Sequence[Any], phase: TextPhase) -> Any:
        tokens, labels = arrays
        return cross_entropies(labels, model(tokens, training=True))

    def evaluation(self, model: Any, samples: Samples) -> Evaluation:
        forward = traced(lambda tokens: model(tokens, training=False))
        return Means(lambda batch: {"accuracy": hits(np.asarray(forward(batch.arrays[0])), batch)["top1"]})


class Texts(Collation):
    """The tokens of texts, ``(texts, tokens of the longest)``, and their labels."""

    def arrays(self, samples: Sequence[Sample], labels: Ids, spec: BatchSpec, pools: Pools) -> Arrays:
        """See :class:`Collation`: int32 and int64."""
        return padded([unpack_tokens(sample)[0] for sample in samples]), labels


# ----------------------------------------------------------------------------------------- parts


def longest_of(config: AnyConfig) -> int | None:
    """Return the tokens of the longest sequence that a built-in model takes, ``None`` without a limit."""
    builder: Any = imported(MODELS, "model", config.model.name)
    options = builder.checked(config.model.options) if hasattr(builder, "checked") else None
    return getattr(options, "longest", None)


def weights_of(counts: npt.NDArray[np.bool_], total: int, world_size: int) -> npt.NDArray[np.float32]:
    """Return weights ``(rows, tokens)`` with which the mean over rows and ranks is the mean over all tokens.

    ``counts``: which tokens of this rank's rows count. ``total``: how many count in the global batch. The
    loss of a row is the weighted sum over its tokens; every rank has equally many rows.
    """
    weight = len(counts) * world_size / max(total, 1)
    return np.where(counts, np.float32(weight), np.float32(0))


def padded(lines: Sequence[Tokens]) -> Tokens:
    """Return the tokens of lines as ``(lines, tokens of the longest)``, filled up with padding."""
    table = np.full((len(lines), max(map(len, lines))), PAD, np.int32)
    for row, line in zip(table, lines, strict=True):
        row[: len(line)] = line
    return table


def cross_entropies(targets: Any, logits: Any) -> Any:
    """Return the cross-entropy of each target."""
    import tensorflow as tf

    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)


def perplexity_of(cross_entropy: float) -> float:
    """Return e to the mean cross-entropy of tokens, infinity where it is too large for a float."""
    return math.exp(cross_entropy) if cross_entropy < LARGEST_EXPONENT else math.inf
