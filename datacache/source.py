"""Where samples come from."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from datacache.order import Ids

Images = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Batch:
    """Images, uint8 of shape ``(samples, height, width, channels)``, and their labels, int64."""

    images: Images
    labels: npt.NDArray[np.int64]


class Source(ABC):
    """Samples addressed by id, ``0 … len(source) − 1``."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def read(self, ids: Ids) -> Batch:
        """Return the samples with these ids, in their order, as new arrays."""


class ArraySource(Source):
    """Samples already in memory: uint8 images ``(samples, height, width, channels)`` and their labels."""

    def __init__(self, images: Images, labels: npt.NDArray[np.int64]) -> None:
        if images.ndim != 4 or images.dtype != np.uint8:
            found = f"{images.dtype} {images.shape}"
            raise ValueError(f"images: expected uint8 (samples, height, width, channels), got {found}")
        if labels.shape != images.shape[:1]:
            raise ValueError(f"labels: expected shape {images.shape[:1]}, got {labels.shape}")
        self._images = images
        self._labels = labels.astype(np.int64)

    def __len__(self) -> int:
        return len(self._images)

    def read(self, ids: Ids) -> Batch:
        """See :meth:`Source.read`."""
        return Batch(self._images[ids], self._labels[ids])
