"""Samples that are arrays: in memory, in ``.npy`` files, or CIFAR-10 in its authors' binary version."""

import io
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from datacache.errors import BadSample, SourceChanged
from datacache.manifest import Manifest
from datacache.order import Ids
from datacache.sources.base import Source, StoredSource, check_ids, stamps
from datacache.storage import File, ProgressCallback, StorageOptions, no_report, progress

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
        storage: StorageOptions = None,
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
            labels = npy.read_array(io.BytesIO(self._storage.read(self._labels)), allow_pickle=False)
        except ValueError as error:
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


# ------------------------------------------------------------------------------------- CIFAR-10

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PARTS = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("test_batch.bin",),
}
VERSION = "CIFAR-10's binary version"
SIDE, CHANNELS = 32, 3
LABEL_BYTES, PIXEL_BYTES = 1, CHANNELS * SIDE * SIDE
RECORD_BYTES = LABEL_BYTES + PIXEL_BYTES
BLOCK_RECORDS = 2048  # of one read of the scan: 6 MiB


class CIFAR10(StoredSource):
    """The records of ``data_batch_1.bin`` … ``data_batch_5.bin``, or of ``test_batch.bin``.

    Files hold a red, a green and a blue plane; payloads are uint8 ``(32, 32, 3)``. The scan reads every byte
    once, because the labels are between the pixels.
    """

    payload = "array"

    def __init__(
        self, url: str, *, part: Literal["train", "test"] = "train", storage: StorageOptions = None
    ) -> None:
        if part not in PARTS:
            raise ValueError(f"part: expected one of {', '.join(PARTS)}, got {part!r}")
        super().__init__(url, storage=storage)
        self._names = PARTS[part]

    def files(self, report: ProgressCallback = no_report) -> list[File]:
        return [self._file(name) for name in self._names]

    def scan(self, report: ProgressCallback = no_report) -> Manifest:
        files = self.files()
        counts = [self._count(file) for file in files]
        add = progress(sum(file.size for file in files), report)
        labels = self._storage.in_parallel(lambda file: self._labels(file, add), files)
        first_records = [RECORD_BYTES * np.arange(count, dtype=np.int64) for count in counts]
        return self._manifest(
            files,
            file=np.repeat(np.arange(len(files), dtype=np.int32), counts),
            start=LABEL_BYTES + np.concatenate(first_records),
            sizes=np.full(sum(counts), PIXEL_BYTES, np.int64),
            labels=np.concatenate(labels),
            classes=CLASSES,
            shape=(SIDE, SIDE, CHANNELS),
        )

    def read(self, manifest: Manifest, ids: Ids) -> list[bytes]:
        planes = (np.frombuffer(each, np.uint8) for each in super().read(manifest, ids))
        shape = CHANNELS, SIDE, SIDE
        return [each.reshape(shape).transpose(1, 2, 0).tobytes() for each in planes]

    def _file(self, name: str) -> File:
        try:
            return self._storage.file(name)
        except FileNotFoundError as error:
            expected = f"expected those of {VERSION}"
            raise FileNotFoundError(f"{self.url}/{name}: no such file, {expected}") from error

    def _count(self, file: File) -> int:
        records, rest = divmod(file.size, RECORD_BYTES)
        if rest or not records:
            found = f"{file.size} bytes, {records} records and {rest} bytes"
            expected = f"expected records of {RECORD_BYTES} bytes, got {found}"
            raise ValueError(f"{self.url}/{file.path}: {expected}: cut off, or not of {VERSION}")
        return records

    def _labels(self, file: File, add: Callable[[int], None]) -> npt.NDArray[np.uint8]:
        block_bytes = BLOCK_RECORDS * RECORD_BYTES
        blocks = []
        for start in range(0, file.size, block_bytes):
            block = self._storage.read(file.path, start, min(block_bytes, file.size - start))
            blocks.append(np.frombuffer(block, np.uint8)[::RECORD_BYTES].copy())
            add(len(block))
        labels = np.concatenate(blocks)
        wrong = np.flatnonzero(labels >= len(CLASSES))
        if len(wrong):
            found = f"record {wrong[0]}: label: expected 0 … {len(CLASSES) - 1}, got {labels[wrong[0]]}"
            raise BadSample(f"{self.url}/{file.path}: {found}: damaged, or not of {VERSION}")
        return labels
