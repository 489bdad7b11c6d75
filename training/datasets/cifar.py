"""CIFAR-10, from its binary files."""

from collections.abc import Mapping
from typing import Any

from datacache.sources import CIFAR10
from datacache.sources.cifar import CLASSES
from training.datasets.dataset import ImageDataset


def cifar10(path: str, *, storage: Mapping[str, Any] | None = None) -> ImageDataset:
    """Return the pictures of 32 × 32 pixels that ``cifar-10-binary.tar.gz`` holds, unpacked at ``path``.

    ``storage``: the keywords of :class:`datacache.storage.Storage`.
    """
    training, test = (CIFAR10(path, part=part, storage=storage) for part in ("train", "test"))
    return ImageDataset(training, test, channels=3, classes=len(CLASSES), class_names=CLASSES)
