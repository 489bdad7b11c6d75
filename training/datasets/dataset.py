"""The interface of a data set to the rest of training."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from datacache import Manifest, Source, SourceChanged, StorageFailed, manifest_of
from datacache.escaping import without_secrets
from datacache.storage import ProgressCallback, no_report

# Raised for a wrong path, a missing package (s3fs, mlxtend) and a file of unexpected contents.
UNUSABLE = (OSError, ImportError, StorageFailed, SourceChanged, ValueError)


@dataclass(frozen=True)
class Dataset:
    """A training and a test part; subclasses have the properties that a kind of model needs."""

    training: Source
    test: Source
    identity: str = field(default="", kw_only=True)
    """Name, path and options: they distinguish this data set from others."""

    def manifest(
        self,
        part: Literal["training", "test"],
        folder: Path | None = None,
        report: ProgressCallback = no_report,
    ) -> Manifest:
        """Return the samples of a part, stored in ``folder`` as by :func:`datacache.manifest_of`.

        Raises a ``ValueError`` of one line where there are none, and where they are not what the data set
        expects.
        """
        source = self.training if part == "training" else self.test
        # The names of classes too: where one part gets another class, the labels of both change.
        name = " ".join([*getattr(self, "class_names", ()), self.identity, part])
        with in_one_line(f"{self.identity}: {part} samples"):
            manifest = manifest_of(source, folder, name, report)
            self.check(manifest)
        return manifest

    def check(self, manifest: Manifest) -> None:
        """Raise a ``ValueError`` of one line for samples that do not belong to this data set."""


@dataclass(frozen=True)
class ImageDataset(Dataset):
    """Images with one label each."""

    channels: int
    classes: int
    class_names: tuple[str, ...] = ()
    """Names of the labels ``0, 1, …``, if any."""

    def check(self, manifest: Manifest) -> None:
        wrong = np.flatnonzero(manifest.labels >= self.classes).tolist()
        if wrong:
            label, file = manifest.labels[wrong[0]], manifest.files[int(manifest.file[wrong[0]])]
            expected = f"0 … {self.classes - 1} ({self.classes} classes)"
            got = f"{label} for sample {wrong[0]} ({file}); {len(wrong)} of {len(manifest)} are too large"
            raise ValueError(f"labels: expected {expected}, got {got}")


@contextmanager
def in_one_line(name: str) -> Iterator[None]:
    """Re-raise errors of reading a data set as a ``ValueError`` that names the data set."""
    try:
        yield
    except UNUSABLE as error:
        raise ValueError(f"dataset {name}: {without_secrets(str(error))}") from error
