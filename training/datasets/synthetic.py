"""Generated pictures, for benchmarks and trials: any size, any number, and yet something to learn."""

import numpy as np
import numpy.typing as npt

from datacache import Arrays
from training.datasets.dataset import ImageDataset, check_whole

GRID = 4  # patches in a row and in a column of a pattern: coarse, so that it survives any resizing
_PATTERNS, _TRAINING, _TEST = range(3)  # keys of the random streams

Pixels = npt.NDArray[np.uint8]


def synthetic(
    *, classes: int = 10, side: int = 32, channels: int = 3, samples: int = 4096, test_samples: int = 1024
) -> ImageDataset:
    """Return ``samples`` pictures of ``side`` × ``side`` pixels to train on, ``test_samples`` to test on.

    Each is the mean of its class's pattern of patches and of noise of its own, uniform over all levels;
    sample ``i`` is of class ``i mod classes``. Equal arguments give equal pictures. They are held in memory.
    """
    check_whole(least=1, classes=classes, side=side, channels=channels)
    check_whole(least=1, samples=samples, test_samples=test_samples)
    patterns = _patterns(classes, side, channels)
    training, test = (_noisy(patterns, *part) for part in ((samples, _TRAINING), (test_samples, _TEST)))
    return ImageDataset(training, test, channels=channels, classes=classes)


def _patterns(classes: int, side: int, channels: int) -> Pixels:
    """Return a pattern a class, ``(classes, side, side, channels)``."""
    patches = _random(_PATTERNS).integers(0, 256, (classes, GRID, GRID, channels), np.uint8)
    patch_of_pixel = np.arange(side) * GRID // side
    return patches[:, patch_of_pixel[:, np.newaxis], patch_of_pixel]


def _noisy(patterns: Pixels, samples: int, key: int) -> Arrays:
    random, classes = _random(key), len(patterns)
    images = np.empty((samples, *patterns.shape[1:]), np.uint8)
    for sample, image in enumerate(images):
        noise = random.integers(0, 256, image.shape, np.uint8)
        np.add(noise >> 1, patterns[sample % classes] >> 1, out=image)
    return Arrays(images, np.arange(samples) % classes)


def _random(key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key))
