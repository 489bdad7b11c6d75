"""Data sets by name."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from datacache import Arrays, Source


@dataclass(frozen=True)
class Dataset:
    """A training and a test part, and what a model must know of them."""

    training: Source
    test: Source
    channels: int
    classes: int


def digits() -> Dataset:
    """Return scikit-learn's 1,797 handwritten digits of 8 × 8 pixels: 1,437 to train on, 360 to test on."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images[..., np.newaxis] * (255 / 16)).astype(np.uint8)  # 17 shades of grey
    # The file is ordered by writer: a fixed shuffle gives both parts the same kind of digits.
    order = np.random.Generator(np.random.Philox(key=1797)).permutation(len(images))
    training, test = (Arrays(images[ids], bunch.target[ids]) for ids in np.split(order, [1437]))
    return Dataset(training, test, channels=1, classes=10)


DATASETS: dict[str, Callable[[], Dataset]] = {
    "digits": digits,
}
