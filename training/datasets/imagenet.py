"""ImageNet, or any pictures in its formats."""

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from commlib.errors import look_up
from datacache import ImageFolder, TFRecord
from datacache.manifest import Split
from datacache.storage import Listing, Storage
from training.datasets.dataset import ImageDataset, check_whole

CHANNELS = 3
CLASSES = 1000
LABEL_OFFSET = 1  # ImageNet's TFRecords leave 0 for a background
FOLDERS = ("train", "val")
PATTERNS = ("train-*-of-*", "validation-*-of-*")
NAMES_SHOWN = 5


def imagenet(
    path: str,
    *,
    format: str | None = None,
    classes: int | None = None,
    label_offset: int | None = None,
    validation_share: float | None = None,
    split_seed: int | None = None,
    storage: Mapping[str, Any] | None = None,
) -> ImageDataset:
    """Return the pictures at ``path``; the validation part is the test.

    ``format``: ``image_folder`` (``train/CLASS/….JPEG`` and ``val/CLASS/…``) or ``tfrecord``
    (``train-*-of-*`` and ``validation-*-of-*``); without it, the one that is there. ``classes``: how many; as
    many as ``train`` has folders, or 1,000 in TFRecords. ``label_offset``: the first label in TFRecords, 1.
    ``validation_share``: where ``path`` holds ``CLASS/….JPEG`` without ``train`` and ``val``, the share of
    each class to test on, chosen by ``split_seed`` (0). ``storage``: the keywords of
    :class:`datacache.storage.Storage`.
    """
    check_whole(least=1, classes=classes)
    check_whole(least=0, label_offset=label_offset, split_seed=split_seed)
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
        return ImageDataset(of_training, of_test, channels=CHANNELS, classes=classes or CLASSES)
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
    return ImageDataset(training, test, channels=CHANNELS, classes=len(names), class_names=tuple(names))


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
    if there := [name for name in FOLDERS if name in contents.folders]:
        raise ValueError(
            f"validation_share: expected none where {path} has {' and '.join(there)}, got {share}"
        )


FORMATS = {"image_folder": f"folders {' and '.join(FOLDERS)}", "tfrecord": f"files {' and '.join(PATTERNS)}"}


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


def _contents(url: str, storage: Mapping[str, Any] | None) -> Listing:
    try:
        return Storage(url.rstrip("/"), **(storage or {})).top()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{url}: no such folder") from error
