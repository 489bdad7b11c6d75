"""CIFAR-10 in its authors' binary version: records of a label and three colour planes."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from datacache.errors import BadSample
from datacache.manifest import Manifest
from datacache.order import Ids
from datacache.sources.base import StoredSource
from datacache.storage import File, ProgressCallback, no_report, progress

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PARTS: Mapping[str, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("test_batch.bin",),
}
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
        self, url: str, *, part: Literal["train", "test"] = "train", storage: Mapping[str, Any] | None = None
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
        return [_interleave(planes) for planes in super().read(manifest, ids)]

    def _file(self, name: str) -> File:
        try:
            return self._storage.file(name)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{self.url}/{name}: no such file, expected those of CIFAR-10's binary version"
            ) from error

    def _count(self, file: File) -> int:
        records, rest = divmod(file.size, RECORD_BYTES)
        if rest or not records:
            raise ValueError(
                f"{self.url}/{file.path}: expected records of {RECORD_BYTES} bytes, got {file.size} bytes, "
                f"{records} records and {rest} bytes: cut off, or not of CIFAR-10's binary version"
            )
        return records

    def _labels(self, file: File, add: Callable[[int], None]) -> npt.NDArray[np.uint8]:
        block_bytes = BLOCK_RECORDS * RECORD_BYTES
        blocks = []
        for start in range(0, file.size, block_bytes):
            block = self._storage.read(file.path, start, min(block_bytes, file.size - start))
            blocks.append(np.frombuffer(block, np.uint8)[::RECORD_BYTES].copy())
            add(len(block))
        labels: npt.NDArray[np.uint8] = np.concatenate(blocks)
        wrong = np.flatnonzero(labels >= len(CLASSES))
        if len(wrong):
            raise BadSample(
                f"{self.url}/{file.path}: record {wrong[0]}: label: expected 0 … {len(CLASSES) - 1}, got "
                f"{labels[wrong[0]]}: damaged, or not of CIFAR-10's binary version"
            )
        return labels


def _interleave(planes: bytes) -> bytes:
    """Return pixels ``(height, width, channels)`` for planes ``(channels, height, width)``."""
    return np.frombuffer(planes, np.uint8).reshape(CHANNELS, SIDE, SIDE).transpose(1, 2, 0).tobytes()
