"""Texts with labels, a line each."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from datacache.manifest import Manifest
from datacache.sources.base import StoredSource, names, stamps
from datacache.sources.lines import find_lines
from datacache.storage import File, ProgressCallback, no_report, progress

# ATIS as it is passed round: "BOS show flights to boston EOS", a tab, a slot a word, and the intent.
_ATIS = re.compile(rb"BOS (?P<text>.*?) EOS\t.*?(?P<label>\S+)\s*")
_TABBED = re.compile(rb"(?P<label>[^\t]*?\S)\t(?P<text>.*\S.*)")
LONGEST_SHOWN = 60


class LabelledText(StoredSource):
    """Each line of a UTF-8 file is a text with its label: ``label<TAB>text``, or as the files of ATIS are.

    ATIS's lines are ``BOS text EOS<TAB>slots label``. A payload is the text. Labels are indices of the
    classes, sorted by name; for a part of a data set that may lack a class, pass the ``classes`` of the
    whole.
    """

    payload = "text"

    def __init__(
        self,
        url: str,
        name: str,
        *,
        classes: Sequence[str] | None = None,
        storage: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(url, storage=storage)
        self._name = name
        self._classes = None if classes is None else tuple(classes)

    def files(self, report: ProgressCallback = no_report) -> list[File]:
        """See :meth:`StoredSource.files`."""
        return [self._storage.file(self._name)]

    def scan(self, report: ProgressCallback = no_report) -> Manifest:
        """See :meth:`Source.scan`; ``report`` counts bytes."""
        (file,) = files = self.files()
        lines = find_lines(self._storage, file, progress(file.size, report))
        lines.check_none_blank(self.url)
        content = self._storage.read(file.path, 0, file.size)
        bounds = zip(lines.starts.tolist(), lines.sizes.tolist(), strict=True)
        found = [self._parsed(content[at : at + size], number) for number, (at, size) in enumerate(bounds, 1)]
        of_lines = [label for label, _, _ in found]
        classes = tuple(sorted(set(of_lines))) if self._classes is None else self._classes
        index = {name: label for label, name in enumerate(classes)}
        if unknown := [number for number, name in enumerate(of_lines) if name not in index]:
            shown = f"line {unknown[0] + 1} has label {of_lines[unknown[0]]!r}"
            raise ValueError(f"{self.url}/{self._name}: {shown}, which is none of the {len(classes)} classes")
        spans = np.array([(start, stop) for _, start, stop in found], np.int64).reshape(-1, 2)
        return Manifest(
            payload=self.payload,
            files=names(files),
            stamps=stamps(files),
            file=np.zeros(len(found), np.int32),
            start=lines.starts + spans[:, 0],
            sizes=spans[:, 1] - spans[:, 0],
            labels=np.array([index[name] for name in of_lines], np.int64),
            classes=classes,
        )

    def _parsed(self, line: bytes, number: int) -> tuple[str, int, int]:
        """Return the label of a line, and where its text begins and ends in it."""
        match = _ATIS.fullmatch(line) or _TABBED.fullmatch(line)
        if match is None:
            shown = line.decode()
            shown = shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}…"
            raise ValueError(
                f"{self.url}/{self._name}: line {number}: expected label<TAB>text, got {shown!r}"
            )
        return match["label"].decode(), match.start("text"), match.end("text")
