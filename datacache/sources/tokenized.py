"""Tokens of a text source."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

from datacache.errors import BadSample
from datacache.manifest import Column, Manifest, Texts
from datacache.order import Ids
from datacache.sources.base import Source, check_ids
from datacache.storage import ProgressCallback, no_report

Tokens = npt.NDArray[np.int32]
SCANNED_SAMPLES = 1 << 14  # that are read and encoded at a time
_COLUMNS = {1: ("tokens",), 2: ("source_tokens", "target_tokens")}  # by how many lines a sample has
_BYTES = "text_bytes"
_OWN_COLUMNS = {_BYTES, *chain.from_iterable(_COLUMNS.values())}
_INT32_BYTES = 4


class Encoder(Protocol):
    """What makes tokens of text."""

    @property
    def fingerprint(self) -> str:
        """Of everything that the tokens depend on besides the text."""

    def encode(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """Return the tokens of each text; any thread may call it."""


class Tokenized(Source):
    r"""The samples of a text source as tokens, int32: lines, or pairs of lines.

    The manifest counts them: column ``tokens``, or ``source_tokens`` and ``target_tokens``.
    :func:`unpack_tokens` reads a payload. The encoder's fingerprint is part of the manifest's, so nothing
    that is cached for one vocabulary is used with another.

    >>> import tempfile, pathlib
    >>> from datacache.sources import TextLines
    >>> class Bytes:
    ...     fingerprint = "bytes"
    ...     def encode(self, texts):
    ...         return [list(text.encode()) for text in texts]
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "text").write_text("ab\nxyz\n")
    >>> source = Tokenized(TextLines(str(folder), "text"), Bytes())
    >>> manifest = source.scan()
    >>> manifest.more["tokens"], unpack_tokens(source.read(manifest, np.array([1]))[0])
    (array([2, 3]), (array([120, 121, 122], dtype=int32),))
    """

    payload = "text"

    def __init__(self, source: Source, encoder: Encoder) -> None:
        if source.payload != "text":
            raise ValueError(f"source: expected one of text, got one of payload {source.payload!r}")
        self._source = source
        self._encoder = encoder
        self._name = f"encoder {encoder.fingerprint}"
        self._texts: tuple[str, Manifest] | None = None  # of the tokens' manifest with this fingerprint

    def scan(self, report: ProgressCallback = no_report) -> Manifest:
        texts = self._source.scan()
        counts: list[npt.NDArray[np.int64]] = []
        for start in range(0, len(texts), SCANNED_SAMPLES):
            ids = np.arange(start, min(start + SCANNED_SAMPLES, len(texts)))
            lines = self._encoded(texts, ids)
            counts.append(np.array([[len(line) for line in of_sample] for of_sample in lines], np.int64))
            report(int(ids[-1]) + 1, len(texts))
        tokens = np.concatenate(counts)
        columns: dict[str, Column] = dict(zip(_COLUMNS[tokens.shape[1]], tokens.T, strict=True))
        return replace(
            texts,
            files=Texts.of([*texts.files, self._name]),
            stamps=np.append(texts.stamps, np.uint64(0)),
            sizes=_INT32_BYTES * (tokens.shape[1] - 1 + tokens.sum(axis=1)),
            more={**texts.more, **columns, _BYTES: texts.sizes},
        )

    def read(self, manifest: Manifest, ids: Ids) -> list[bytes]:
        check_ids(manifest, ids)
        return [_packed(lines) for lines in self._encoded(self._of_texts(manifest), ids)]

    def texts(self, manifest: Manifest, ids: Ids) -> list[list[str]]:
        """Return the text of each line of samples, as it was before it became tokens."""
        check_ids(manifest, ids)
        return self._lines(self._of_texts(manifest), ids)

    def check(self, manifest: Manifest) -> None:
        self._source.check(self._of_texts(manifest))

    def _encoded(self, texts: Manifest, ids: Ids) -> list[list[Sequence[int]]]:
        """Return the tokens of each line of samples."""
        samples = self._lines(texts, ids)
        encoded = iter(self._encoder.encode(list(chain.from_iterable(samples))))
        return [[next(encoded) for _ in lines] for lines in samples]

    def _lines(self, texts: Manifest, ids: Ids) -> list[list[str]]:
        return [payload.decode().split("\n") for payload in self._source.read(texts, ids)]

    def _of_texts(self, manifest: Manifest) -> Manifest:
        """Return the manifest of the texts out of that of their tokens."""
        if self._texts is None or self._texts[0] != manifest.fingerprint:
            if manifest.files[-1] != self._name:
                found = manifest.files[-1].removeprefix("encoder ")
                expected = self._encoder.fingerprint
                raise ValueError(f"manifest: expected tokens of encoder {expected}, got those of {found}")
            more = {name: manifest.more[name] for name in manifest.more if name not in _OWN_COLUMNS}
            texts = replace(
                manifest,
                files=manifest.files[:-1],
                stamps=manifest.stamps[:-1],
                sizes=manifest.more[_BYTES],
                more=more,
            )
            self._texts = manifest.fingerprint, texts
        return self._texts[1]


def unpack_tokens(sample: bytes | npt.NDArray[np.uint8], *, pair: bool = False) -> tuple[Tokens, ...]:
    """Return the tokens of a sample, as views of it: of its line, or of its two lines if it is a ``pair``."""
    tokens = np.frombuffer(sample, np.int32)
    if not pair:
        return (tokens,)
    if not len(tokens) or not 0 <= tokens[0] < len(tokens):
        raise BadSample("tokens of two lines: expected how many the first one has, then these")
    return tokens[1 : 1 + tokens[0]], tokens[1 + tokens[0] :]


def _packed(lines: Sequence[Sequence[int]]) -> bytes:
    """Return the tokens of a line, or those of two lines after how many the first one has."""
    before = [len(lines[0])] if len(lines) == 2 else []
    return np.fromiter(chain(before, *lines), np.int32).tobytes()
