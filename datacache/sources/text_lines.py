"""Plain text, line by line."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from datacache.manifest import Manifest
from datacache.sources.base import StoredSource, names, stamps
from datacache.sources.lines import find_lines
from datacache.storage import File, ProgressCallback, no_report, progress


class TextLines(StoredSource):
    """Each line of UTF-8 text files is a sample, file after file; all labels are 0.

    Lines that are empty or only white space, with which some formats separate paragraphs, are left out.
    """

    payload = "text"

    def __init__(
        self, url: str, names: str | Sequence[str], *, storage: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(url, storage=storage)
        self._names = [names] if isinstance(names, str) else list(names)

    def files(self, report: ProgressCallback = no_report) -> list[File]:
        """See :meth:`StoredSource.files`: in the order in which they were named."""
        return [self._storage.file(name) for name in self._names]

    def scan(self, report: ProgressCallback = no_report) -> Manifest:
        """See :meth:`Source.scan`; ``report`` counts bytes."""
        files = self.files()
        add = progress(sum(file.size for file in files), report)
        found = self._storage.in_parallel(lambda file: find_lines(self._storage, file, add), files)
        of_file = [np.full(len(lines), number, np.int32) for number, lines in enumerate(found)]
        kept = ~np.concatenate([lines.blank for lines in found])
        if not kept.any():
            raise ValueError(f"{self.url}/{self._names[0]}: expected lines of text, found none")
        return Manifest(
            payload=self.payload,
            files=names(files),
            stamps=stamps(files),
            file=np.concatenate(of_file)[kept],
            start=np.concatenate([lines.starts for lines in found])[kept],
            sizes=np.concatenate([lines.sizes for lines in found])[kept],
            labels=np.zeros(int(kept.sum()), np.int64),
        )
