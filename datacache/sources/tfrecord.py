"""Images in TFRecord files of ``tf.train.Example``, read without TensorFlow.

A record is its length (8 bytes), the length's masked CRC (4), the data, and the data's masked CRC (4). The
data is a protocol buffer ``Example{1: Features{1: map<string, Feature>}}``; a feature holds one list: of
bytes (field 1), floats (2) or integers (3), whose items are field 1 of it. Only the position of the encoded
image and the label are parsed.
"""

from array import array
from collections.abc import Callable, Iterator
from fnmatch import fnmatch

import google_crc32c
import numpy as np
import numpy.typing as npt

from datacache.errors import BadSample
from datacache.manifest import Manifest
from datacache.sources.base import StoredSource
from datacache.storage import File, ProgressCallback, Storage, StorageOptions, no_report, progress

BLOCK_BYTES = 8 << 20
HEADER_BYTES = 12
GZIP = b"\x1f\x8b"  # compressed files cannot be read in ranges
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


class TFRecord(StoredSource):
    """Examples with an encoded image and a label, in the files of a folder that match ``pattern``.

    The scan reads every byte once and verifies every checksum; after it a sample is one range of a file.
    ``label_offset`` is subtracted from the stored labels (ImageNet's begin at 1).
    """

    payload = "image"

    def __init__(
        self,
        url: str,
        *,
        pattern: str = "*",
        image_key: str = "image/encoded",
        label_key: str = "image/class/label",
        label_offset: int = 0,
        storage: StorageOptions = None,
    ) -> None:
        super().__init__(url, storage=storage)
        self._pattern = pattern
        self._image_key = image_key.encode()
        self._label_key = label_key.encode()
        self._label_offset = label_offset

    def files(self, report: ProgressCallback = no_report) -> list[File]:
        return [file for file in self._storage.files(report) if fnmatch(file.path, self._pattern)]

    def scan(self, report: ProgressCallback = no_report) -> Manifest:
        files = self.files()
        add = progress(sum(file.size for file in files), report)
        parts = self._storage.in_parallel(lambda file: self._scan_file(file, add), files)
        samples = np.concatenate([np.empty((0, 3), np.int64), *parts])
        if not len(samples):
            raise ValueError(
                f"{self.url}: expected TFRecord files that match {self._pattern!r}, found no record"
            )
        counts = [len(part) for part in parts]
        starts, sizes, labels = samples.T
        return self._manifest(
            files,
            file=np.repeat(np.arange(len(files), dtype=np.int32), counts),
            start=starts,
            sizes=sizes,
            labels=labels,
        )

    def _scan_file(self, file: File, add: Callable[[int], None]) -> npt.NDArray[np.int64]:
        """Return the start and the bytes of each image, and its label: ``(records, 3)``."""
        found = array("q")
        for at, data in records(self._storage, file, add):
            try:
                start, size, label = self._locate(data)
            except (ValueError, IndexError) as error:
                where = f"{self.url}/{file.path}: record {len(found) // 3} at byte {at - HEADER_BYTES}"
                raise BadSample(f"{where}: {error}") from error
            found.extend((at + start, size, label))
        return np.array(found, np.int64).reshape(-1, 3)

    def _locate(self, example: memoryview) -> tuple[int, int, int]:
        """Return the start of the image in the example, its bytes, and the label."""
        features = _features(example)
        for key in (self._image_key, self._label_key):
            if key not in features:
                raise ValueError(f"has no feature {key.decode()!r}")
        lists = _messages(example, *features[self._image_key], 1)
        images = [item for one in lists for item in _messages(example, *one, 1)]
        if len(images) != 1:
            raise ValueError(f"image: expected a list of one string of bytes, got {len(images)}")
        ((start, stop),) = images
        label = _only_integer(example, *features[self._label_key])
        if label < self._label_offset:
            raise ValueError(f"label: expected at least {self._label_offset} (label_offset), got {label}")
        return start, stop - start, label - self._label_offset


def records(storage: Storage, file: File, add: Callable[[int], None]) -> Iterator[tuple[int, memoryview]]:
    """Yield the start of each record's data in the file, and the data, valid until the next record.

    ``add`` is called with the bytes of each record. ``BadSample`` if a checksum does not match.
    """
    window, first = b"", 0  # the part of the file that is in memory, and where it begins

    def take(start: int, length: int) -> memoryview:
        """Return bytes from ``start``, which must not decrease between calls."""
        nonlocal window, first
        if start + length > file.size:
            raise BadSample(f"{where}: cut off: it would end at byte {start + length} of {file.size}")
        if start + length > first + len(window):
            rest = window[start - first :]
            known = start + len(rest)
            more = min(max(length - len(rest), BLOCK_BYTES), file.size - known)
            window, first = rest + storage.read(file.path, known, more), start
        return memoryview(window)[start - first : start - first + length]

    at = 0
    while at < file.size:
        where = f"{storage.url}/{file.path}: record at byte {at}"
        header = take(at, HEADER_BYTES)
        length = int.from_bytes(header[:8], "little")
        if masked_crc32c(header[:8]) != int.from_bytes(header[8:], "little"):
            zipped = "; it is gzip: unpack it" if bytes(header[:2]) == GZIP else ""
            raise BadSample(f"{where}: no TFRecord, or damaged: the length's checksum is another{zipped}")
        data = take(at + HEADER_BYTES, length + 4)
        if masked_crc32c(data[:length]) != int.from_bytes(data[length:], "little"):
            raise BadSample(f"{where}: damaged: the data's checksum is another")
        yield at + HEADER_BYTES, data[:length]
        at += HEADER_BYTES + length + 4
        add(HEADER_BYTES + length + 4)


def masked_crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C as TFRecord stores it: rotated right by 15 bits, plus a constant."""
    crc: int = google_crc32c.value(bytes(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _features(example: memoryview) -> dict[bytes, tuple[int, int]]:
    """Return start and end of each feature of an example."""
    found = {}
    for features in _messages(example, 0, len(example), 1):
        for entry in _messages(example, *features, 1):
            parts = {number: (start, stop) for number, start, stop in _fields(example, *entry)}
            if 2 in parts:
                first, last = parts.get(1, (0, 0))
                found[bytes(example[first:last])] = parts[2]
    return found


def _only_integer(example: memoryview, start: int, stop: int) -> int:
    """Return the only item of a feature's list of integers, packed or not."""
    integers: list[int] = []
    for one in _messages(example, start, stop, 3):
        for _, first, last in _fields(example, *one):
            while first < last:
                value, first = _varint(example, first, last)
                integers.append(value - (value >> 63 << 64))
    if len(integers) != 1:
        raise ValueError(f"label: expected a list of one integer, got {len(integers)}")
    return integers[0]


def _messages(data: memoryview, start: int, stop: int, number: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each field with this number."""
    return ((first, last) for found, first, last in _fields(data, start, stop) if found == number)


def _fields(data: memoryview, at: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield each field's number, and start and end of its value."""
    while at < stop:
        tag, at = _varint(data, at, stop)
        wire = tag & 7
        if wire == BYTES:
            length, at = _varint(data, at, stop)
            end = at + length
        elif wire == VARINT:
            _, end = _varint(data, at, stop)
        elif wire in (FIXED64, FIXED32):
            end = at + (8 if wire == FIXED64 else 4)
        else:
            raise ValueError(f"no tf.train.Example: wire type {wire}")
        if end > stop:
            raise ValueError("no tf.train.Example: a field is longer than what holds it")
        yield tag >> 3, at, end
        at = end


def _varint(data: memoryview, at: int, stop: int) -> tuple[int, int]:
    """Return a varint (seven bits a byte, the lowest first) and the position after it."""
    value = shift = 0
    while at < stop and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise ValueError("no tf.train.Example: an integer without an end")
