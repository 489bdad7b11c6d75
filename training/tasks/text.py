"""What the tasks of text share: windows, weights of tokens, padding, generated text for dry runs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from datacache import BatchSpec, Manifest, Windows, unpack_tokens
from datacache.text_orders import TextOrder, Tokens
from training.config import records
from training.config.parts import imported
from training.config.records import AnyConfig, DatasetRecord
from training.config.schema import Count
from training.datasets import TextDataset
from training.datasets.vocabulary import PAD
from training.models import MODELS
from training.tasks.task import Samples, Task, Tiny

Payloads: TypeAlias = Sequence[npt.NDArray[np.uint8]]
Labels: TypeAlias = npt.NDArray[np.int64]
Arrays: TypeAlias = tuple[npt.NDArray[Any], ...]

LARGEST_EXPONENT = 700.0  # e to this is nearly the largest float
TEST_WINDOWS = 32  # of one rank in a step
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
            if longest is not None and phase.sequence_length > longest:
                raise ValueError(
                    f"phases[{number}].sequence_length: expected at most the {longest} tokens that "
                    f"{config.model.name} takes, got {phase.sequence_length}"
                )

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

    def describe(self, phase: WindowPhase) -> str:
        return f"{phase.sequence_length} tokens"

    def describe_batch(self, phase: WindowPhase) -> str:
        return f"{phase.batch_size} windows"

    def tiny(self, config: AnyConfig, ranks: int) -> Tiny:
        """See :meth:`Task.tiny`: short windows of generated text."""
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
        tokens, rows = line_tokens(samples.training), phase.batch_size * ranks
        return (
            Windows(tokens, length, rows, config.seed, ahead=ahead, multiple=config.accumulate),
            Windows(line_tokens(samples.test), length, TEST_WINDOWS * ranks, seed=0, ahead=ahead),
        )

    def specs(self, phase: WindowPhase, samples: Samples) -> Sequence[Any]:
        """See :meth:`Task.specs`: inputs, targets, and weights of the targets."""
        import tensorflow as tf

        shape = None, phase.sequence_length
        return [tf.TensorSpec(shape, dtype) for dtype in (tf.int32, tf.int32, tf.float32)]


def longest_of(config: AnyConfig) -> int | None:
    """Return the tokens of the longest sequence that a built-in model takes, ``None`` without a limit."""
    builder: Any = imported(MODELS, "model", config.model.name)
    options = builder.checked(config.model.options) if hasattr(builder, "checked") else None
    return getattr(options, "longest", None)


def line_tokens(manifest: Manifest) -> npt.NDArray[np.int64]:
    """Return the number of tokens of each line."""
    return manifest.more["tokens"]


def rows_of(order: TextOrder, samples: Payloads, spec: BatchSpec) -> Tokens:
    """Return the tokens of a rank's rows."""
    spans = order.spans(spec.epoch, spec.step, spec.rank, spec.world_size)
    return order.rows(spans, spec.ids, [unpack_tokens(sample)[0] for sample in samples])


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
