"""Images in one folder a class."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from datacache.manifest import Manifest, Split
from datacache.order import Ids
from datacache.sources.base import StoredSource, labels_by_folder, names
from datacache.storage import File, ProgressCallback, Range, StorageOptions, no_report

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff")


class ImageFolder(StoredSource):
    """Images ``CLASS/….jpg``, at any depth below the class's folder; other and hidden files are ignored.

    Labels are indices of the classes, sorted by name. For a part of a data set that may lack a class, pass
    the ``classes`` of the whole. ``split``: the part to use, if one folder holds training and validation.
    """

    payload = "image"

    def __init__(
        self,
        url: str,
        *,
        classes: Sequence[str] | None = None,
        split: Split | None = None,
        storage: StorageOptions = None,
    ) -> None:
        super().__init__(url, storage=storage)
        self._split = split
        self._classes = None if classes is None else tuple(classes)

    def files(self, report: ProgressCallback = no_report) -> list[File]:
        paths = ((file, file.path.lower()) for file in self._storage.files(report))
        return [file for file, path in paths if path.endswith(ENDINGS) and "/." not in f"/{path}"]

    def scan(self, report: ProgressCallback = no_report) -> Manifest:
        files = self.files(report)
        if not files:
            raise ValueError(f"{self.url}: expected images ({', '.join(ENDINGS)}) in folders, found none")
        labels, classes = labels_by_folder(self.url, names(files), self._classes)
        manifest = self._manifest(
            files,
            file=np.arange(len(files), dtype=np.int32),
            start=np.zeros(len(files), np.int64),
            sizes=np.fromiter((file.size for file in files), np.int64, len(files)),
            labels=labels,
            classes=classes,
        )
        return manifest if self._split is None else self._split.of(manifest)

    def ranges(self, manifest: Manifest, ids: Ids) -> list[Range]:
        # so that a file that grew is detected
        return [replace(wanted, whole=True) for wanted in super().ranges(manifest, ids)]
