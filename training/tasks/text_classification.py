"""Text classification: one label a text, cross-entropy, accuracy."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from datacache import Batch, BatchSpec, Collation, EvaluationOrder, Order, Pools, Preprocessing, unpack_tokens
from training.config import records
from training.config.records import AnyConfig, DatasetRecord
from training.config.schema import Count
from training.datasets import LabelledTextDataset
from training.models import TEXT_CLASSES
from training.tasks.language_model import cross_entropies
from training.tasks.task import Evaluation, Inputs, Means, Metric, Reading, Samples, Tiny, traced
from training.tasks.text import TextTask, padded

if TYPE_CHECKING:
    import keras


TEST_BATCH = 64  # of one rank at a step
TINY_BATCH = 2  # texts in a step of one rank of a dry run, and for each part of `accumulate`


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

    def check(self, config: AnyConfig) -> None:
        """See :meth:`Task.check`."""
        for number, phase in enumerate(_phases(config)):
            if phase.batch_size % config.accumulate:
                raise ValueError(
                    f"accumulate: expected a divisor of phases[{number}].batch_size = {phase.batch_size}, "
                    f"got {config.accumulate}"
                )

    def describe(self, phase: TextPhase) -> str:
        """See :meth:`Task.describe`."""
        return "whole texts"

    def describe_batch(self, phase: TextPhase) -> str:
        """See :meth:`Task.describe_batch`."""
        return f"{phase.batch_size} texts"

    def tiny(self, config: AnyConfig, ranks: int) -> Tiny:
        """See :meth:`Task.tiny`: generated texts of a vocabulary of the same size, of as many classes."""
        dataset = cast(LabelledTextDataset, config.make_dataset())
        batch = TINY_BATCH * config.accumulate
        options = {
            "kind": "labelled",
            "tokens": dataset.vocabulary_size,
            "classes": dataset.classes,
            "samples": batch * ranks,
            "test_samples": ranks,
        }
        return Tiny(
            DatasetRecord.model_validate({"name": "synthetic_text", **options}),
            [phase.model_copy(update={"batch_size": batch}) for phase in config.phases],
            self.epochs(config, dataset, ranks),
        )

    def inputs(self, phase: TextPhase, samples: Samples) -> Inputs:
        """See :meth:`Task.inputs`."""
        texts, preprocessing = Texts(), Preprocessing("text")
        training = Order(len(samples.training), 1, phase.batch_size * samples.ranks, samples.config.seed)
        test = EvaluationOrder(len(samples.test), TEST_BATCH, samples.ranks)
        return Inputs(Reading(training, texts, preprocessing), Reading(test, texts, preprocessing))

    def specs(self, phase: TextPhase, samples: Samples) -> Sequence[Any]:
        """See :meth:`Task.specs`: tokens, and labels."""
        import tensorflow as tf

        rows = phase.batch_size
        return [tf.TensorSpec((rows, None), tf.int32), tf.TensorSpec((rows,), tf.int64)]

    def losses(self, model: "keras.Model", arrays: Sequence[Any], phase: TextPhase) -> Any:
        """See :meth:`Task.losses`."""
        tokens, labels = arrays
        return cross_entropies(labels, model(tokens, training=True))

    def evaluation(self, model: "keras.Model", samples: Samples) -> Evaluation:
        """See :meth:`Task.evaluation`."""
        forward = traced(lambda tokens: model(tokens, training=False))

        def hits(batch: Batch) -> dict[str, npt.NDArray[Any]]:
            tokens, labels = batch.arrays
            # NaN comes last, else a model that has diverged would be right wherever the label is 0
            logits = np.nan_to_num(np.asarray(forward(tokens)), nan=-np.inf)
            best = np.argsort(-logits, axis=1, kind="stable")[:, 0]
            return {"accuracy": (best == labels)[batch.counts]}

        return Means(hits)


class Texts(Collation):
    """The tokens of texts, ``(texts, tokens of the longest)``, and their labels."""

    def arrays(
        self,
        samples: Sequence[npt.NDArray[np.uint8]],
        labels: npt.NDArray[np.int64],
        spec: BatchSpec,
        pools: Pools,
    ) -> tuple[npt.NDArray[Any], ...]:
        """See :class:`Collation`: int32 and int64."""
        return padded([unpack_tokens(sample)[0] for sample in samples]), labels


def _phases(config: AnyConfig) -> Sequence[TextPhase]:
    return cast(Sequence[TextPhase], config.phases)
