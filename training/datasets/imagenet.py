"""ImageNet, or any pictures that are stored as it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from commlib.errors import look_up
from datacache import ImageFolder, TFRecord
from datacache.storage import Storage
from training.datasets.dataset import Dataset, check_whole

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
    storage: Mapping[str, Any] | None = None,
) -> Dataset:
    """Return the pictures at ``path``: to train on, and those of the validation to test on.

    ``format``: ``image_folder`` (``train/CLASS/….JPEG`` and ``val/CLASS/…``) or ``tfrecord``
    (``train-*-of-*`` and ``validation-*-of-*``); without it, the one that is there. ``classes``: how many; as
    many as ``train`` has folders, or 1,000 in TFRecords. ``label_offset``: the first label in TFRecords, 1.
    ``storage``: the keywords of :class:`datacache.storage.Storage`.
    """
    check_whole(least=1, classes=classes)
    check_whole(least=0, label_offset=label_offset)
    name = _format_at(path, format, _contents(path, storage))
    return FORMATS[name].build(_Request(path, classes, label_offset, storage))


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
    build: Callable[[_Request], Dataset]


def _image_folder(wanted: _Request) -> Dataset:
    if wanted.label_offset is not None:
        raise ValueError(
            f"label_offset: expected none, folders are counted by name; got {wanted.label_offset}"
        )
    urls = [f"{wanted.path.rstrip('/')}/{folder}" for folder in FOLDERS]
    folders = _contents(urls[0], wanted.storage).folders
    # Both parts count these, so that one which lacks a class has the same labels as the other.
    names = [name for name in folders if not name.startswith(".")]
    if not names:
        raise ValueError(f"{urls[0]}: expected a folder for every class, found none")
    if wanted.classes not in (None, len(names)):
        raise ValueError(f"classes: expected {len(names)}, the folders of {urls[0]}, got {wanted.classes}")
    training, test = (ImageFolder(url, classes=names, storage=wanted.storage) for url in urls)
    return Dataset(training, test, channels=CHANNELS, classes=len(names), class_names=tuple(names))


def _tfrecord(wanted: _Request) -> Dataset:
    offset = LABEL_OFFSET if wanted.label_offset is None else wanted.label_offset
    training, test = (
        TFRecord(wanted.path, pattern=pattern, label_offset=offset, storage=wanted.storage)
        for pattern in PATTERNS
    )
    return Dataset(training, test, channels=CHANNELS, classes=wanted.classes or CLASSES)


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
    found = sorted([*(f"{name}/" for name in contents.folders), *contents.files])
    shown = [*found[:NAMES_SHOWN], *(["…"] if len(found) > NAMES_SHOWN else [])]
    raise ValueError(f"{path}: expected {expected}, found {', '.join(shown) or 'nothing'}")


def _contents(url: str, storage: Mapping[str, Any] | None) -> _Contents:
    try:
        return _Top(url.rstrip("/"), **(storage or {})).contents()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{url}: no such folder") from error


class _Top(Storage):
    """A storage of which only the uppermost folder is looked at: below it may be a million files."""

    def contents(self) -> _Contents:
        """Return what is there, sorted."""
        self._filesystem.invalidate_cache()
        level = self._level([self._root])
        folders = (self._relative(name.rstrip("/")) or name for name in level.folders)
        return _Contents(sorted(folders), sorted(file.path for file in level.files))
