"""Data sets by name: of the table, of an entry point ``cloudtrain.datasets``, or by an import path.

>>> dataset = make_dataset("synthetic", classes=4, side=8, samples=12)
>>> dataset.classes, dataset.channels, dataset.manifest("training").shape
(4, 3, (8, 8, 3))
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from commlib import registry
from commlib.errors import InvalidArgument, shown
from datacache.escaping import without_secrets
from datacache.storage import Storage
from training.datasets.dataset import Dataset, ImageDataset, in_one_line
from training.datasets.images import cifar10, digits, imagenet, mnist5k
from training.datasets.synthetic import synthetic, synthetic_text
from training.datasets.text import (
    LabelledTextDataset,
    ParallelTextDataset,
    TextDataset,
    labelled_text,
    parallel_text,
    text,
)
from training.datasets.vocabulary import VocabularySettings

__all__ = [
    "DATASETS",
    "Dataset",
    "ImageDataset",
    "LabelledTextDataset",
    "ParallelTextDataset",
    "TextDataset",
    "check_dataset",
    "make_dataset",
]

# Name -> builder. One that reads files takes `path` first; its keywords are the options of the data set.
DATASETS: dict[str, Callable[..., Dataset]] = {
    "digits": digits,
    "mnist5k": mnist5k,
    "cifar10": cifar10,
    "imagenet": imagenet,
    "synthetic": synthetic,
    "text": text,
    "parallel_text": parallel_text,
    "labelled_text": labelled_text,
    "synthetic_text": synthetic_text,
}


def make_dataset(name: str, path: str | Path | None = None, **options: Any) -> Dataset:
    """Return the named data set, from the folder or URL ``path`` unless it is bundled.

    Raises a ``ValueError`` of one line if the name, the path or an option is invalid, and if the files at
    the path are not those that the data set expects.
    """
    check_dataset(name, path, options)
    load = registry.resolve(DATASETS, "dataset", name)
    location = {} if path is None else {"path": str(path)}
    with in_one_line(name):
        dataset = load(**location, **options)
    if not isinstance(dataset, Dataset):
        raise InvalidArgument(f"dataset {name}: expected a training.datasets.Dataset, got {shown(dataset)}")
    # Account keys do not affect the samples, and the identity is part of file names.
    settings = [f"{key}={value}" for key, value in sorted(options.items()) if key != "storage"]
    return replace(dataset, identity=" ".join([name, *map(without_secrets, location.values()), *settings]))


def check_dataset(name: str, path: str | Path | None, options: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` unless the named data set takes this path and these options; no file is touched.

    A data set checks the values of its own options when it is loaded.
    """
    load = registry.resolve(DATASETS, "dataset", name)
    parameters = registry.options_of(load)
    if "path" in parameters and path is None:
        raise ValueError(f"dataset {name}: path: expected a folder or URL, got none")
    if "path" not in parameters and path is not None:
        raise ValueError(f"dataset {name}: path: expected none, {name} reads no files, got '{path}'")
    registry.check_options(f"dataset {name}", load, {**options, **({} if path is None else {"path": path})})
    if (storage := options.get("storage")) is not None:
        if not isinstance(storage, Mapping):
            raise ValueError(f"dataset {name}: storage: expected keys and values, got {storage!r}")
        try:
            registry.check_options(f"dataset {name}: storage", Storage, storage, positional=1)
        except InvalidArgument as error:
            raise InvalidArgument(error.text, key=f"storage.{error.key}") from error
    if "vocabulary" in options and name in DATASETS:
        with in_one_line(name):
            VocabularySettings.of(options["vocabulary"])
