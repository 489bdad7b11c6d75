"""Pre-processed samples in memory: each is read and resized once, then served from there.

The two levels below this (a file cache on disk, one copy a node in shared memory) come later; what a caller
sees stays the same.
"""

from collections.abc import Iterator

import numpy as np
from PIL import Image

from datacache.order import epoch_order, evaluation_ids, training_ids
from datacache.source import Batch, Images, Source


class DataCache:
    """The samples of ``source``, resized to ``input_size`` pixels square, held in this process."""

    def __init__(self, source: Source, input_size: int) -> None:
        everything = source.read(np.arange(len(source)))
        self._samples = Batch(resize(everything.images, input_size), everything.labels)

    def __len__(self) -> int:
        return len(self._samples.labels)

    def batches(self, rank: int, size: int, epoch: int, *, batch_size: int, seed: int) -> Iterator[Batch]:
        """Yield this rank's training batches of an epoch: as many and as large on each of ``size`` ranks."""
        order = epoch_order(len(self), seed, epoch)
        for ids in training_ids(order, rank, size, batch_size):
            yield Batch(self._samples.images[ids], self._samples.labels[ids])

    def evaluation_batches(self, rank: int, size: int, *, batch_size: int) -> Iterator[Batch]:
        """Yield this rank's part in a fixed order: over all ``size`` ranks, every sample exactly once."""
        for ids in evaluation_ids(len(self), rank, size, batch_size):
            yield Batch(self._samples.images[ids], self._samples.labels[ids])


def resize(images: Images, input_size: int) -> Images:
    """Return the images at ``input_size`` pixels square, by antialiased bilinear interpolation.

    Shape ``(samples, height, width, channels)`` in, ``(samples, input_size, input_size, channels)`` out.
    """
    samples, height, width, channels = images.shape
    if height == width == input_size:
        return images
    resized = np.empty((samples, input_size, input_size, channels), np.uint8)
    for sample in range(samples):
        for channel in range(channels):
            picture = Image.fromarray(images[sample, :, :, channel])
            small = picture.resize((input_size, input_size), Image.Resampling.BILINEAR)
            resized[sample, :, :, channel] = np.asarray(small)
    return resized
