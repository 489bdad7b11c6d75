"""Image classification: one label an image, cross-entropy, accuracy."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from commlib.registry import options_of
from datacache import Augmentation, Batch, CentreCrop, EvaluationOrder, Order, Preprocessing
from training.config import records
from training.config.records import AnyConfig, CropShare, DatasetRecord, Part
from training.config.schema import ConfigurationError, Count, Positive, Record, imported
from training.datasets import ImageDataset
from training.datasets.synthetic import ImageFacts, synthetic
from training.models import IMAGES, MODELS
from training.tasks.task import (
    EpochSize,
    Evaluation,
    Inputs,
    Means,
    Metric,
    Reading,
    Samples,
    Task,
    Tiny,
    traced,
)

EVALUATION_BATCH = 256
# Of a dry run:
TINY_BATCH = 2  # samples in a step of one rank, and for each part of `accumulate`
TINY_SIDE = 32  # pixels of the inputs, where the model takes so few
STEPS_GENERATED = 8  # global batches that are generated


class AugmentationRecord(Record):
    """A random box of each image, another in every epoch, resized to the input."""

    area: tuple[CropShare, CropShare] = Field((0.08, 1.0), strict=False)  # a list in files
    """Smallest and largest share of the image's area."""
    aspect: tuple[Positive, Positive] = Field((3 / 4, 4 / 3), strict=False)
    """Smallest and largest width over height."""
    mirror: bool = True
    """Flip each image horizontally with probability 1/2."""

    @model_validator(mode="after")
    def _smallest_first(self) -> "AugmentationRecord":
        for key in ("area", "aspect"):
            smallest, largest = getattr(self, key)
            if smallest > largest:
                raise ConfigurationError(
                    f"expected the smaller one first, got {[smallest, largest]}", key=key
                )
        return self


class ImagePhase(records.Phase):
    """A phase whose samples are images."""

    input_size: Count
    """Images are resized to squares of this many pixels."""
    batch_size: Count
    """Samples in a step of one rank."""
    label_smoothing: Part = 0.0
    """Label smoothing: share of the weight of each label that is spread over all classes."""
    augmentation: AugmentationRecord | None = None
    """Without it, the largest square in the centre of each image."""
    validation_crop: CropShare = 1.0
    """Side of the centre crop used in tests, as a share of the image's shorter side."""
    kept_size: Count | None = None
    """Shorter side at which images are cached, in pixels; else the input's, over 0.875 if it is a crop."""

    @property
    def kept_side(self) -> int:
        """Return the shorter side at which images are cached, in pixels."""
        if self.kept_size is not None:
            return self.kept_size
        crops = self.augmentation is not None or self.validation_crop < 1
        return math.ceil(self.input_size / 0.875) if crops else self.input_size


class ImageClassification(Task):
    """Images with one label each: the cross-entropy of a model's logits ``(batch, classes)``."""

    Phase = ImagePhase
    dataset = ImageDataset
    signature = IMAGES
    unit = "images"
    metrics = {
        "top1": Metric("test accuracy", "higher", share=True, column="top1Accuracy"),
        "top5": Metric("top-5 test accuracy", "higher", share=True, column="top5Accuracy"),
    }
    takes = frozenset({"normalise", "cache.shards"})

    def check(self, config: AnyConfig) -> None:
        least = smallest_side(config.model.name)
        for number, phase in enumerate(config.phases):
            if phase.input_size < least:
                expected = f"at least the {least} pixels that {config.model.name} needs"
                raise ValueError(f"phases[{number}].input_size: expected {expected}, got {phase.input_size}")
        self.check_accumulate(config)

    def describe(self, phase: ImagePhase) -> str:
        return f"{phase.input_size} px"

    def tiny(self, config: AnyConfig, ranks: int) -> Tiny:
        facts = facts_of(config)
        phases, epochs = [], []
        batch = TINY_BATCH * config.accumulate
        for number, phase in enumerate(config.phases):
            _check_batch(phase, number, facts.samples, ranks)
            global_batch = phase.batch_size * ranks
            epochs.append(EpochSize(facts.samples // global_batch, global_batch))
            side = max(smallest_side(config.model.name), min(phase.input_size, TINY_SIDE))
            small = {"input_size": side, "kept_size": None, "batch_size": batch}
            phases.append(phase.model_copy(update=small))
        options = {
            "name": "synthetic",
            "classes": facts.classes,
            "channels": facts.channels,
            "side": max(phase.input_size for phase in phases),
            "samples": batch * ranks * STEPS_GENERATED,
            "test_samples": 2 * ranks,
        }
        return Tiny(DatasetRecord.model_validate(options), phases, epochs)

    def check_samples(self, samples: Samples) -> None:
        config, ranks, shards = samples.config, samples.ranks, samples.config.cache.shards
        for number, phase in enumerate(config.phases):
            _check_batch(phase, number, len(samples.training), ranks)
            if phase.batch_size * ranks % shards:
                raise ValueError(
                    f"cache.shards: expected a divisor of the {phase.batch_size * ranks} samples that all "
                    f"{ranks} ranks take together in a step of phases[{number}], got {shards}"
                )
        if (normalise := config.normalise) is None:
            return
        if len(normalise.mean) not in (1, channels := samples.dataset.channels):
            expected = f"1 or {channels} numbers, one a channel"
            raise ValueError(f"normalise.mean: expected {expected}, got {len(normalise.mean)}")

    def inputs(self, phase: ImagePhase, samples: Samples) -> Inputs:
        config, ranks, shards = samples.config, samples.ranks, samples.config.cache.shards
        order = Order(
            len(samples.training),
            shards,
            phase.batch_size * ranks,
            config.seed,
            # A manifest is sorted by class: parts of consecutive samples would have a few classes each.
            placement="manifest" if shards == 1 else "hash",
            exchange=config.cache.exchange,
        )
        test_order = EvaluationOrder(len(samples.test), EVALUATION_BATCH, ranks)
        crop: dict[str, Any] = {"input_size": phase.input_size, "dtype": input_dtype(config)}
        if config.normalise is not None:
            crop |= {"mean": tuple(config.normalise.mean), "std": tuple(config.normalise.std)}
        boxes = phase.augmentation and Augmentation(**crop, **phase.augmentation.model_dump())
        stored, test_stored = (
            Preprocessing(each.payload, phase.kept_side) for each in (samples.training, samples.test)
        )
        return Inputs(
            Reading(order, boxes or CentreCrop(ratio=1.0, **crop), stored),
            Reading(test_order, CentreCrop(ratio=phase.validation_crop, **crop), test_stored),
        )

    def specs(self, phase: ImagePhase, samples: Samples) -> Sequence[Any]:
        import tensorflow as tf

        shape = phase.batch_size, phase.input_size, phase.input_size, samples.dataset.channels
        return tf.TensorSpec(shape, input_dtype(samples.config)), tf.TensorSpec(shape[:1], tf.int64)

    def losses(self, model: Any, arrays: Sequence[Any], phase: ImagePhase) -> Any:
        """See :meth:`Task.losses`: ``label_smoothing`` of each label's weight is shared by all classes."""
        import tensorflow as tf

        images, labels = arrays
        logits = model(images, training=True)
        exact = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        smoothing = phase.label_smoothing
        if smoothing == 0:
            return exact
        uniform = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
        return (1 - smoothing) * exact + smoothing * uniform

    def evaluation(self, model: Any, samples: Samples) -> Evaluation:
        forward = traced(lambda images: model(images, training=False))
        return Means(lambda batch: hits(np.asarray(forward(batch.images)), batch))


def input_dtype(config: AnyConfig) -> Literal["uint8", "float16", "float32"]:
    """Return the dtype of a model's inputs: levels, or normalised values in the precision of the model."""
    if config.normalise is None:
        return "uint8"
    return "float16" if config.precision == "float16" else "float32"


def hits(logits: npt.NDArray[Any], batch: Batch) -> Mapping[str, npt.NDArray[np.bool_]]:
    """Return which of the samples that count have their label first, and among the first five.

    Classes of equal logits are ranked by index, NaNs last.
    """
    ranked = np.argsort(-np.nan_to_num(logits, nan=-np.inf), axis=1, kind="stable")
    found = (ranked[:, :5] == batch.labels[:, None])[batch.counts]
    return {"top1": found[:, 0], "top5": found.any(axis=1)}


def smallest_side(model: str) -> int:
    """Return the smallest side of images, in pixels, that a model takes; 1 if it has no limit."""
    return getattr(imported(MODELS, "model", model), "smallest_side", 1)


def _check_batch(phase: ImagePhase, number: int, samples: int, ranks: int) -> None:
    if phase.batch_size * ranks > samples:
        expected = f"at most the {samples} training samples for all {ranks} ranks together"
        raise ValueError(f"phases[{number}].batch_size: expected {expected}, got {phase.batch_size} on each")


def facts_of(config: AnyConfig) -> ImageFacts:
    """Return the properties that generated data need; a user's own data set is loaded for that."""
    dataset = config.dataset
    if dataset.name == "synthetic":
        given = {key: dataset.options.get(key, default) for key, default in options_of(synthetic).items()}
        return ImageFacts(given["samples"], given["classes"], given["channels"])
    made: Any = config.make_dataset()
    return ImageFacts(len(made.manifest("training")), made.classes, made.channels)
