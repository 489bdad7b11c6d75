"""Sentences and their translations, line by line in two files."""

import codecs
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from datacache.errors import BadSample
from datacache.manifest import Manifest
from datacache.order import Ids
from datacache.ranges import Range
from datacache.sources.base import StoredSource, check_ids, names, stamps
from datacache.storage import File, ProgressCallback, no_report, progress

BLOCK_BYTES = 8 << 20
Offsets = npt.NDArray[np.int64]


class ParallelText(StoredSource):
    r"""Line ``i`` of the file ``source`` and line ``i`` of the file ``target``, UTF-8; all labels are 0.

    A payload is both lines: :func:`unpack_pair` separates them. Lines end with ``\n``; empty ones count.
    """

    payload = "text"

    def __init__(
        self, url: str, *, source: str, target: str, storage: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(url, storage=storage)
        self._names = (source, target)

    def files(self, report: ProgressCallback = no_report) -> list[File]:
        """See :meth:`StoredSource.files`: source and target, in this order."""
        return [self._storage.file(name) for name in self._names]

    def scan(self, report: ProgressCallback = no_report) -> Manifest:
        """See :meth:`Source.scan`; ``report`` counts bytes."""
        files = self.files()
        add = progress(sum(file.size for file in files), report)
        source, target = self._storage.in_parallel(lambda file: self._lines(file, add), files)
        if len(source) != len(target):
            raise ValueError(
                f"{self.url}: expected as many lines in both files, got {len(source) - 1} in "
                f"{self._names[0]} and {len(target) - 1} in {self._names[1]}"
            )
        samples = len(source) - 1
        source_bytes, target_bytes = np.diff(source) - 1, np.diff(target) - 1
        return Manifest(
            payload=self.payload,
            files=names(files),
            stamps=stamps(files),
            file=np.zeros(samples, np.int32),
            start=source[:-1],
            sizes=source_bytes + 1 + target_bytes,
            labels=np.zeros(samples, np.int64),
            more={"source_bytes": source_bytes, "target_start": target[:-1]},
        )

    def read(self, manifest: Manifest, ids: Ids) -> list[bytes]:
        """See :meth:`Source.read`."""
        check_ids(manifest, ids)
        source_bytes = manifest.more["source_bytes"][ids]
        target_bytes = manifest.sizes[ids] - 1 - source_bytes
        sources = _ranges(manifest.files[0], manifest.start[ids], source_bytes)
        targets = _ranges(manifest.files[1], manifest.more["target_start"][ids], target_bytes)
        lines = self.read_ranges(sources + targets)
        pairs = zip(lines[: len(ids)], lines[len(ids) :], strict=True)
        return [b"\n".join(pair) for pair in pairs]

    def _lines(self, file: File, add: Callable[[int], None]) -> Offsets:
        r"""Return the byte at which each line begins, and the byte after the last line's ``\n``."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        ends = [np.zeros(0, np.int64)]
        last = b""
        for start in range(0, file.size, BLOCK_BYTES):
            block = self._storage.read(file.path, start, min(BLOCK_BYTES, file.size - start))
            last = block[-1:]
            try:
                decoder.decode(block, final=start + len(block) == file.size)
            except UnicodeDecodeError as error:
                where = f"{self.url}/{file.path}: near byte {start + error.start}"
                raise BadSample(f"{where}: no UTF-8: {error.reason}") from error
            ends.append(start + np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")))
            add(len(block))
        if last not in (b"", b"\n"):
            ends.append(np.array([file.size]))
        return np.concatenate([[0], np.concatenate(ends) + 1])


def pack_pair(source: str, target: str) -> bytes:
    r"""Return two lines as one payload.

    >>> unpack_pair(pack_pair("a house", "ein Haus"))
    ('a house', 'ein Haus')
    """
    for line in (source, target):
        if "\n" in line:
            raise ValueError(f"a line of text: expected no line break in it, got {line!r}")
    return f"{source}\n{target}".encode()


def unpack_pair(payload: bytes | memoryview) -> tuple[str, str]:
    """Return the two lines of a payload."""
    source, separator, target = bytes(payload).decode().partition("\n")
    if not separator or "\n" in target:
        raise BadSample("a pair of lines: expected one line break")
    return source, target


def _ranges(path: str, starts: Offsets, lengths: Offsets) -> list[Range]:
    return [Range(path, *each) for each in zip(starts.tolist(), lengths.tolist(), strict=True)]
