"""Text classification: one label a text, cross-entropy, accuracy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from datacache import BatchSpec, Collation, EvaluationOrder, Order, Pools, Preprocessing, unpack_tokens
from training.config import records
from training.config.records import AnyConfig
from training.config.schema import Count
from training.datasets import LabelledTextDataset
from training.models import TEXT_CLASSES
from training.tasks.image_classification import hits
from training.tasks.task import (
    Evaluation,
    Inputs,
    KerasModel,
    Means,
    Metric,
    Reading,
    Samples,
    Task,
    Tiny,
    check_accumulate,
    traced,
)
from training.tasks.text import TINY_BATCH, Arrays, Labels, Payloads, TextTask, cross_entropies, padded

TEST_BATCH = 64  # of one rank in a step


class TextPhase(records.Phase):
    """A phase that reads whole texts."""

    batch_size: Count
    """Texts in a step of one rank."""


class TextClassification(TextTask):
    """Texts with one label each: the cross-entropy of a model's logits ``(batch, classes)``."""

    Phase = TextPhase
    dataset = LabelledTextDataset
    signature = TEXT_CLASSES
    unit = "texts"
    metrics = {"accuracy": Metric("test accuracy", "higher", share=True)}

    check_samples = Task.check_samples

    def check(self, config: AnyConfig) -> None:
        check_accumulate(config)

    def describe(self, phase: TextPhase) -> str:
        return "whole texts"

    def describe_batch(self, phase: TextPhase) -> str:
        return f"{phase.batch_size} texts"

    def tiny(self, config: AnyConfig, ranks: int) -> Tiny:
        """See :meth:`Task.tiny`: generated texts of as many classes."""
        dataset, batch = config.make_dataset(), TINY_BATCH * config.accumulate
        options = {"kind": "labelled", "classes": dataset.classes}
        options |= {"samples": batch * ranks, "test_samples": ranks}
        small = [{"batch_size": batch} for _ in config.phases]
        return self.generated(config, dataset, ranks, small, **options)

    def inputs(self, phase: TextPhase, samples: Samples) -> Inputs:
        texts, preprocessing = Texts(), Preprocessing("text")
        training = Order(len(samples.training), 1, phase.batch_size * samples.ranks, samples.config.seed)
        test = EvaluationOrder(len(samples.test), TEST_BATCH, samples.ranks)
        return Inputs(Reading(training, texts, preprocessing), Reading(test, texts, preprocessing))

    def specs(self, phase: TextPhase, samples: Samples) -> Sequence[Any]:
        """See :meth:`Task.specs`: tokens, and labels."""
        import tensorflow as tf

        rows = phase.batch_size
        return [tf.TensorSpec((rows, None), tf.int32), tf.TensorSpec((rows,), tf.int64)]

    def losses(self, model: KerasModel, arrays: Sequence[Any], phase: TextPhase) -> Any:
        tokens, labels = arrays
        return cross_entropies(labels, model(tokens, training=True))

    def evaluation(self, model: KerasModel, samples: Samples) -> Evaluation:
        forward = traced(lambda tokens: model(tokens, training=False))
        return Means(lambda batch: {"accuracy": hits(np.asarray(forward(batch.arrays[0])), batch)["top1"]})


class Texts(Collation):
    """The tokens of texts, ``(texts, tokens of the longest)``, and their labels."""

    def arrays(self, samples: Payloads, labels: Labels, spec: BatchSpec, pools: Pools) -> Arrays:
        """See :class:`Collation`: int32 and int64."""
        return padded([unpack_tokens(sample)[0] for sample in samples]), labels
