"""What the tasks of text share: keys of phases, weights of tokens, padding, generated text."""

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from datacache import BatchSpec, Manifest, unpack_tokens
from datacache.text_orders import TextOrder, Tokens
from training.config import records
from training.config.parts import imported
from training.config.records import AnyConfig, DatasetRecord
from training.config.schema import Count
from training.datasets.vocabulary import PAD
from training.models import MODELS
from training.tasks.task import Samples, Task, Tiny

LARGEST_EXPONENT = 700.0  # e to this is nearly the largest float
# Of a dry run:
TINY_BATCH = 2  # rows in a step of one rank, and for each part of `accumulate`
TINY_LENGTH = 8  # tokens
TINY_WORDS = 12


class TextTask(Task):
    """A task whose samples are tokens of a vocabulary: its weights belong to that."""

    def identity(self, dataset: Any) -> str:
        """See :meth:`Task.identity`."""
        return f"vocabulary {dataset.vocabulary.fingerprint}"


class WindowPhase(records.Phase):
    """A phase that reads windows of a text."""

    sequence_length: Count
    """Tokens of a window."""
    batch_size: Count
    """Windows in a step of one rank."""


def phases_of(config: AnyConfig) -> Sequence[WindowPhase]:
    """Return the phases of a configuration whose task reads windows."""
    return cast(Sequence[WindowPhase], config.phases)


def check_lengths(config: AnyConfig) -> None:
    """Raise a ``ValueError`` of one line for windows that are longer than what a built-in model takes."""
    longest = longest_of(config)
    for number, phase in enumerate(phases_of(config)):
        if longest is not None and phase.sequence_length > longest:
            raise ValueError(
                f"phases[{number}].sequence_length: expected at most the {longest} tokens that "
                f"{config.model.name} takes, got {phase.sequence_length}"
            )


def longest_of(config: AnyConfig) -> int | None:
    """Return the tokens of the longest sequence that a built-in model takes, ``None`` without a limit."""
    builder: Any = imported(MODELS, "model", config.model.name)
    options = builder.checked(config.model.options) if hasattr(builder, "checked") else None
    return getattr(options, "longest", None)


def check_orders(task: Task, samples: Samples) -> None:
    """Raise a ``ValueError`` of one line for a phase that cannot read the text."""
    for number, phase in enumerate(samples.config.phases):
        try:
            task.inputs(phase, samples)
        except ValueError as error:
            raise ValueError(f"phases[{number}]: {error}") from error


def line_tokens(manifest: Manifest) -> npt.NDArray[np.int64]:
    """Return the number of tokens of each line."""
    return manifest.more["tokens"]


def rows_of(order: TextOrder, samples: Sequence[npt.NDArray[np.uint8]], spec: BatchSpec) -> Tokens:
    """Return the tokens of a rank's rows."""
    spans = order.spans(spec.epoch, spec.step, spec.rank, spec.world_size)
    return order.rows(spans, spec.ids, [unpack_tokens(sample)[0] for sample in samples])


def weights_of(counts: npt.NDArray[np.bool_], total: int, world_size: int) -> npt.NDArray[np.float32]:
    """Return weights ``(rows, tokens)`` with which the mean over rows and ranks is that over all tokens.

    ``counts``: which tokens count, of this rank's rows. ``total``: how many count in the global batch. The
    loss of a row is the sum over its tokens times these weights; every rank has equally many rows.
    """
    weight = len(counts) * world_size / max(total, 1)
    return np.where(counts, np.float32(weight), np.float32(0))


def padded(lines: Sequence[Tokens]) -> Tokens:
    """Return the tokens of lines as ``(lines, tokens of the longest)``, filled up with padding."""
    table = np.full((len(lines), max(map(len, lines))), PAD, np.int32)
    for row, line in zip(table, lines, strict=True):
        row[: len(line)] = line
    return table


def perplexity_of(cross_entropy: float) -> float:
    """Return e to the mean cross-entropy of tokens, infinity where that is no float."""
    return math.exp(cross_entropy) if cross_entropy < LARGEST_EXPONENT else math.inf


def tiny_text(task: Task, config: AnyConfig, ranks: int) -> Tiny:
    """Return generated text of a vocabulary of the same size, and short windows of it, for a dry run."""
    dataset: Any = config.make_dataset()
    epochs = task.epochs(config, dataset, ranks)
    batch = TINY_BATCH * config.accumulate
    phases = [
        phase.model_copy(
            update={"sequence_length": min(phase.sequence_length, TINY_LENGTH), "batch_size": batch}
        )
        for phase in phases_of(config)
    ]
    lines = batch * ranks * TINY_LENGTH
    options = {
        "tokens": dataset.vocabulary_size,
        "samples": lines,
        "test_samples": lines,
        "words": TINY_WORDS,
    }
    return Tiny(
        DatasetRecord.model_validate({"name": "synthetic_text", **options}),
        phases,
        epochs,
    )
