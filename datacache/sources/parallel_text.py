"""Sentences and their translations, line by line in two files."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from datacache.errors import BadSample
from datacache.manifest import Manifest
from datacache.order import Ids
from datacache.ranges import Range
from datacache.sources.base import StoredSource, check_ids, names, stamps
from datacache.sources.lines import Lines, Offsets, find_lines
from datacache.storage import File, ProgressCallback, no_report, progress


class ParallelText(StoredSource):
    r"""Line ``i`` of the file ``source`` and line ``i`` of the file ``target``, UTF-8; all labels are 0.

    A payload is both lines: :func:`unpack_pair` separates them. A line without text is refused.
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
        source, target = self._storage.in_parallel(lambda file: find_lines(self._storage, file, add), files)
        self._check_partners(source, target)
        return Manifest(
            payload=self.payload,
            files=names(files),
            stamps=stamps(files),
            file=np.zeros(len(source), np.int32),
            start=source.starts,
            sizes=source.sizes + 1 + target.sizes,
            labels=np.zeros(len(source), np.int64),
            more={"source_bytes": source.sizes, "target_start": target.starts},
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

    def _check_partners(self, source: Lines, target: Lines) -> None:
        """Raise ``ValueError`` that names the first line without a partner, or without text."""
        if len(source) != len(target):
            longer = source if len(source) > len(target) else target
            raise ValueError(
                f"{self.url}: expected as many lines in both files, got {len(source)} in {source.path} and "
                f"{len(target)} in {target.path}: line {min(len(source), len(target)) + 1} of {longer.path} "
                "has no translation"
            )
        for lines in (source, target):
            lines.check_none_blank(self.url)


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
