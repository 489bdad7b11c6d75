"""ImageNet, or any pictures in its formats."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from commlib.errors import look_up
from datacache import ImageFolder, TFRecord
from datacache.manifest import Split
from datacache.storage import Storage
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
    """Return the pictures at ``path``: to train on, and those of the validation to test on.

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
    request = _Request(path, classes, label_offset, storage)
    if validation_share is not None:
        return _split_folder(request, format, contents, validation_share, split_seed or 0)
    if split_seed is not None:
        raise ValueError(f"split_seed: expected none without validation_share, got {split_seed}")
    return FORMATS[_format_at(path, format, contents)].build(request)


@dataclass(frozen=True)
class _Contents:
    """The names right below a URL."""

    folders: list[str]
    files: list[str]


@dataclass(frozen=True)
class _Request:
    path: str
    classes: int | None
    label_offset: int | None
    storage: Mapping[str, Any] | None


@dataclass(frozen=True)
class _Format:
    expected: str
    is_in: Callable[[_Contents], bool]
    build: Callable[[_Request], ImageDataset]


def _image_folder(wanted: _Request) -> ImageDataset:
    urls = [f"{wanted.path.rstrip('/')}/{folder}" for folder in FOLDERS]
    # Both parts count these, so that one which lacks a class has the same labels as the other.
    names = _classes(urls[0], _contents(urls[0], wanted.storage), wanted)
    training, test = (ImageFolder(url, classes=names, storage=wanted.storage) for url in urls)
    return ImageDataset(training, test, channels=CHANNELS, classes=len(names), class_names=tuple(names))


def _split_folder(
    wanted: _Request, format: str | None, contents: _Contents, share: float, seed: int
) -> ImageDataset:
    """Return the pictures of one folder, divided by a seed."""
    if not isinstance(share, float) or not 0 < share < 1:
        raise ValueError(f"validation_share: expected a number in (0, 1), got {share!r}")
    if format not in (None, "image_folder"):
        raise ValueError(f"validation_share: expected none where format is {format}, got {share}")
    if there := [name for name in FOLDERS if name in contents.folders]:
        raise ValueError(
            f"validation_share: expected none where {wanted.path} has {' and '.join(there)}, got {share}"
        )
    names = _classes(wanted.path, contents, wanted)
    training, test = (
        ImageFolder(wanted.path, classes=names, split=Split(part, share, seed), storage=wanted.storage)
        for part in ("training", "validation")
    )
    return ImageDataset(training, test, channels=CHANNELS, classes=len(names), class_names=tuple(names))


def _classes(url: str, contents: _Contents, wanted: _Request) -> list[str]:
    """Return the names of the folders at a URL, which are those of the classes."""
    if wanted.label_offset is not None:
        raise ValueError(
            f"label_offset: expected none, folders are counted by name; got {wanted.label_offset}"
        )
    names = [name for name in contents.folders if not name.startswith(".")]
    if not names:
        raise ValueError(f"{url}: expected a folder for every class, found none")
    if wanted.classes not in (None, len(names)):
        raise ValueError(f"classes: expected {len(names)}, the folders of {url}, got {wanted.classes}")
    return names


def _tfrecord(wanted: _Request) -> ImageDataset:
    offset = LABEL_OFFSET if wanted.label_offset is None else wanted.label_offset
    training, test = (
        TFRecord(wanted.path, pattern=pattern, label_offset=offset, storage=wanted.storage)
        for pattern in PATTERNS
    )
    return ImageDataset(training, test, channels=CHANNELS, classes=wanted.classes or CLASSES)


def _has_folders(contents: _Contents) -> bool:
    return set(FOLDERS) <= set(contents.folders)


def _has_records(contents: _Contents) -> bool:
    return all(any(fnmatch(name, pattern) for name in contents.files) for pattern in PATTERNS)


FORMATS: dict[str, _Format] = {
    "image_folder": _Format(f"folders {' and '.join(FOLDERS)}", _has_folders, _image_folder),
    "tfrecord": _Format(f"files {' and '.join(PATTERNS)}", _has_records, _tfrecord),
}


def _format_at(path: str, given: str | None, contents: _Contents) -> str:
    """Return the format that was asked for, or the only one that is there."""
    asked = FORMATS if given is None else {given: look_up(FORMATS, "format", given)}
    there = [name for name, format in asked.items() if format.is_in(contents)]
    if len(there) == 1:
        return there[0]
    if there:
        raise ValueError(f"{path}: format: expected one of {', '.join(there)}, both are there, got none")
    expected = " or ".join(f"{format.expected} ({name})" for name, format in asked.items())
    if "image_folder" in asked and contents.folders and not set(FOLDERS) & set(contents.folders):
        expected += ", or folders of classes and validation_share"
    found = sorted([*(f"{name}/" for name in contents.folders), *contents.files])
    shown = [*found[:NAMES_SHOWN], *(["…"] if len(found) > NAMES_SHOWN else [])]
    raise ValueError(f"{path}: expected {expected}, found {', '.join(shown) or 'nothing'}")


def _contents(url: str, storage: Mapping[str, Any] | None) -> _Contents:
    try:
        return _Top(url.rstrip("/"), **(storage or {})).contents()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{url}: no such folder") from error


class _Top(Storage):
    """A storage of which only the top folder is listed: below it may be a million files."""

    def contents(self) -> _Contents:
        """Return the names there, sorted."""
        self._filesystem.invalidate_cache()
        level = self._level([self._root])
        folders = (self._relative(name.rstrip("/")) or name for name in level.folders)
        return _Contents(sorted(folders), sorted(file.path for file in level.files))
