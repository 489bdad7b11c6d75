"""Images as inputs: the keys of their phases, their crops, and the order in which they are read."""

import math
from typing import Any, Literal

from pydantic import model_validator

from datacache import Augmentation, CentreCrop, Crop, EvaluationOrder, Order, Preprocessing
from training.config import records
from training.config.records import AnyConfig, CropShare, Part
from training.config.schema import Count, Positive, Record, problem
from training.tasks.task import Inputs, Reading, Samples

EVALUATION_BATCH = 256


class AugmentationRecord(Record):
    """A random box of each image, another in every epoch, resized to the input."""

    area: tuple[CropShare, CropShare] = (0.08, 1.0)
    """Smallest and largest share of the image's area."""
    aspect: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    """Smallest and largest width over height."""
    mirror: bool = True
    """Flip half of them horizontally."""

    @model_validator(mode="before")
    @classmethod
    def _lists_are_pairs(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: tuple(each) if isinstance(each, list) else each for key, each in value.items()}

    @model_validator(mode="after")
    def _smallest_first(self) -> "AugmentationRecord":
        for key in ("area", "aspect"):
            smallest, largest = getattr(self, key)
            if smallest > largest:
                raise problem(f"expected the smaller one first, got {[smallest, largest]}", key=key)
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
    """Side of the square in the centre that is tested on, of the image's shorter side."""
    kept_size: Count | None = None
    """Shorter side at which images are cached, in pixels; else the input's, over 0.875 if it is a crop."""

    @property
    def kept_side(self) -> int:
        """Return the shorter side at which images are cached, in pixels."""
        if self.kept_size is not None:
            return self.kept_size
        crops = self.augmentation is not None or self.validation_crop < 1
        return math.ceil(self.input_size / 0.875) if crops else self.input_size


def image_inputs(phase: ImagePhase, samples: Samples) -> Inputs:
    """Return what a phase reads of images."""
    config, ranks = samples.config, samples.ranks
    shards = config.cache.shards
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
    training, test = (
        Preprocessing(manifest.payload, phase.kept_side) for manifest in (samples.training, samples.test)
    )
    return Inputs(
        Reading(order, training_crop(config, phase), training),
        Reading(test_order, test_crop(config, phase), test),
    )


def training_crop(config: AnyConfig, phase: ImagePhase) -> Crop:
    """Return the crop of an image to train on."""
    settings = _settings(config, phase)
    if phase.augmentation is None:
        return CentreCrop(ratio=1.0, **settings)
    return Augmentation(**settings, **phase.augmentation.model_dump())


def test_crop(config: AnyConfig, phase: ImagePhase) -> Crop:
    """Return the crop of an image to test on."""
    return CentreCrop(ratio=phase.validation_crop, **_settings(config, phase))


def _settings(config: AnyConfig, phase: ImagePhase) -> dict[str, Any]:
    settings: dict[str, Any] = {"input_size": phase.input_size, "dtype": input_dtype(config)}
    if config.normalise is not None:
        settings |= {"mean": tuple(config.normalise.mean), "std": tuple(config.normalise.std)}
    return settings


def input_dtype(config: AnyConfig) -> Literal["uint8", "float16", "float32"]:
    """Return the dtype of a model's inputs: levels, or normalised values in the precision of the model."""
    if config.normalise is None:
        return "uint8"
    return "float16" if config.precision == "float16" else "float32"
