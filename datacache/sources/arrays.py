"""Samples that are arrays, in memory or in ``.npy`` files."""

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from datacache.errors import SourceChanged
from datacache.manifest import Manifest
from datacache.order import Ids
from datacache.sources.base import Source, StoredSource, check_ids, stamps
from datacache.storage import File, ProgressCallback, no_report

Images = npt.NDArray[np.uint8]
npy: Any = np.lib.format  # without types
HEADER_BYTES = 1 << 16  # more than any header of a .npy file of few dimensions


class Arrays(Source):
    """Images ``(samples, height, width[, channels])``, uint8, and integer labels, in memory; not copied."""

    payload = "array"

    def __init__(self, images: Images, labels: npt.NDArray[Any]) -> None:
        _check_images("images", images.dtype, images.shape)
        _check_labels("labels", labels, len(images))
        self._images = images
        self._labels = labels

    def scan(self, report: ProgressCallback = no_report) -> Manifest:
        manifest = self._manifest([self._file()], **_columns(self._images.shape, 0, self._labels))
        report(len(manifest), len(manifest))
        return manifest

    def read(self, manifest: Manifest, ids: Ids) -> list[bytes]:
        check_ids(manifest, ids)
        return [self._images[sample].tobytes() for sample in ids.tolist()]

    def check(self, manifest: Manifest) -> None:
        if not np.array_equal(stamps([self._file()]), manifest.stamps):
            raise SourceChanged("the arrays in memory are others than those that the manifest was made of")

    def _file(self) -> File:
        digest = xxhash.xxh3_128(np.ascontiguousarray(self._images).data)
        digest.update(self._labels.astype("<i8").tobytes())
        return File("memory", self._images.nbytes, digest.hexdigest())


class StoredArrays(StoredSource):
    """Images and labels as in :class:`Arrays`, in two ``.npy`` files of a folder; a sample is a range."""

    payload = "array"

    def __init__(
        self,
        url: str,
        *,
        images: str = "images.npy",
        labels: str = "labels.npy",
        storage: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(url, storage=storage)
        self._images = images
        self._labels = labels

    def files(self, report: ProgressCallback = no_report) -> list[File]:
        return [self._storage.file(self._images), self._storage.file(self._labels)]

    def scan(self, report: ProgressCallback = no_report) -> Manifest:
        files = self.files()
        shape, header_bytes = self._header(files[0])
        path = f"{self.url}/{self._labels}"
        try:
            labels = np.load(io.BytesIO(self._storage.read(self._labels)), allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path}: expected a .npy file: {error}") from error
        _check_labels(path, labels, shape[0])
        manifest = self._manifest(files, **_columns(shape, header_bytes, labels))
        report(len(manifest), len(manifest))
        return manifest

    def _header(self, file: File) -> tuple[tuple[int, ...], int]:
        """Return the shape of the images, and the byte at which they begin."""
        path = f"{self.url}/{file.path}"
        head = io.BytesIO(self._storage.read(file.path, 0, min(file.size, HEADER_BYTES)))
        try:
            version = npy.read_magic(head)
            read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
            shape, fortran, dtype = read(head)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}: expected a .npy file: {error}") from error
        _check_images(path, dtype, shape)
        if fortran:
            raise ValueError(f"{path}: expected samples one after another (C order), got Fortran order")
        expected = head.tell() + math.prod(shape)
        if file.size != expected:
            raise ValueError(f"{path}: expected {expected} bytes for shape {shape}, got {file.size}")
        return shape, head.tell()


def _columns(shape: tuple[int, ...], first_byte: int, labels: npt.NDArray[Any]) -> dict[str, Any]:
    """Return the manifest's columns of images of this shape, which follow each other in a file."""
    samples = shape[0]
    one = (*shape[1:], 1) if len(shape) == 3 else shape[1:]
    size = math.prod(one)
    return {
        "file": np.zeros(samples, np.int32),
        "start": first_byte + size * np.arange(samples, dtype=np.int64),
        "sizes": np.full(samples, size, np.int64),
        "labels": labels.astype(np.int64),
        "shape": one,
    }


def _check_images(path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if dtype != np.uint8 or len(shape) not in (3, 4):
        raise ValueError(f"{path}: expected uint8 (samples, height, width[, channels]), got {dtype} {shape}")


def _check_labels(path: str, labels: npt.NDArray[Any], samples: int) -> None:
    if labels.shape != (samples,) or labels.dtype.kind not in "iu":
        raise ValueError(f"{path}: expected integers ({samples},), got {labels.dtype} {labels.shape}")
