r"""Sources of UTF-8 text and of its tokens. Lines end with ``\n``; the last one may end with the file."""

import codecs
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

from datacache.errors import BadSample
from datacache.manifest import Manifest, Texts
from datacache.order import Flags, Ids
from datacache.sources.base import Source, StoredSource, check_ids
from datacache.storage import File, ProgressCallback, Range, Storage, StorageOptions, no_report, progress
from datacache.text_orders import Tokens

BLOCK_BYTES = 8 << 20
LONGEST_SHOWN = 60
SCANNED_SAMPLES = 1 << 14  # that are read and encoded at a time
Offsets = npt.NDArray[np.int64]

_COLUMNS = {1: ("tokens",), 2: ("source_tokens", "target_tokens")}  # by how many lines a sample has
_BYTES = "text_bytes"
_OWN_COLUMNS = {_BYTES, *chain.from_iterable(_COLUMNS.values())}
_INT32_BYTES = 4

# The usual form of ATIS: "BOS show flights to boston EOS", a tab, a slot a word, and the intent.
_ATIS = re.compile(rb"BOS (?P<text>.*?) EOS\t.*?(?P<label>\S+)\s*")
_TABBED = re.compile(rb"(?P<label>[^\t]*?\S)\t(?P<text>.*\S.*)")
_IS_SPACE = np.zeros(256, bool)
_IS_SPACE[list(b" \t\n\v\f\r")] = True


@dataclass(frozen=True, eq=False)
class Lines:
    r"""For each line of a file its first byte, its bytes without the ``\n``, and whether it is blank."""

    path: str
    starts: Offsets
    sizes: Offsets
    blank: Flags

    def __len__(self) -> int:
        return len(self.starts)

    def check_none_blank(self, url: str) -> None:
        """Raise ``ValueError`` that names the first line that is empty or only white space."""
        if self.blank.any():
            number, found = int(self.blank.argmax()) + 1, f"{self.blank.sum()} of {len(self)} have none"
            raise ValueError(f"{url}/{self.path}: line {number} is empty: expected text in each, {found}")


def find_lines(storage: Storage, file: File, add: Callable[[int], None]) -> Lines:
    """Return the lines of a file, without its byte order mark; ``add`` gets the bytes read."""
    ends, solids = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    solid = 0  # bytes so far that are not white space
    head = last = b""
    for start, block in _blocks(storage, file):
        content = np.frombuffer(block, np.uint8)
        breaks = np.flatnonzero(content == ord("\n"))
        counted = solid + np.cumsum(~_IS_SPACE[content])
        ends.append(start + breaks)
        solids.append(counted[breaks])
        solid, last = int(counted[-1]), block[-1:]
        head = (head + block[: len(codecs.BOM_UTF8)])[: len(codecs.BOM_UTF8)]
        add(len(block))
    if last not in (b"", b"\n"):
        ends.append(np.array([file.size]))
        solids.append(np.array([solid]))
    stops = np.concatenate(ends)
    starts = np.concatenate([[0], stops[:-1] + 1])[: len(stops)]
    mark = len(head) if head == codecs.BOM_UTF8 else 0  # as programs of Windows write
    blank = np.diff(np.concatenate(solids), prepend=mark) == 0
    starts[:1] += mark
    return Lines(file.path, starts, stops - starts, blank)


def _blocks(storage: Storage, file: File) -> Iterator[tuple[int, bytes]]:
    """Yield the blocks of a file and where each begins, checked to be UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, file.size, BLOCK_BYTES):
        block = storage.read(file.path, start, min(BLOCK_BYTES, file.size - start))
        begun = len(decoder.getstate()[0])  # bytes of a character that began in the block before
        try:
            decoder.decode(block, final=start + len(block) == file.size)
        except UnicodeDecodeError as error:
            at = start - begun + error.start
            raise BadSample(f"{storage.url}/{file.path}: byte {at}: no UTF-8: {error.reason}") from error
        yield start, block


class _NamedFiles(StoredSource):
    """Text in files that the user has named, read in the order of their names."""

    payload = "text"

    def __init__(self, url: str, names: Sequence[str], storage: StorageOptions) -> None:
        super().__init__(url, storage=storage)
        self._names = names

    def files(self, report: ProgressCallback = no_report) -> list[File]:
        return [self._storage.file(name) for name in self._names]

    def _find_lines(self, files: list[File], report: ProgressCallback) -> list[Lines]:
        """Return the lines of each file; ``report`` counts bytes."""
        add = progress(sum(file.size for file in files), report)
        return self._storage.in_parallel(lambda file: find_lines(self._storage, file, add), files)


class TextLines(_NamedFiles):
    """Each line of UTF-8 text files is a sample, file after file; all labels are 0.

    Lines that are empty or only white space, with which some formats separate paragraphs, are left out.
    """

    def __init__(self, url: str, names: str | Sequence[str], *, storage: StorageOptions = None) -> None:
        super().__init__(url, [names] if isinstance(names, str) else list(names), storage)

    def scan(self, report: ProgressCallback = no_report) -> Manifest:
        files = self.files()
        found = self._find_lines(files, report)
        kept = ~np.concatenate([lines.blank for lines in found])
        if not kept.any():
            raise ValueError(f"{self.url}/{self._names[0]}: expected lines of text, found none")
        return self._manifest(
            files,
            file=np.repeat(np.arange(len(files), dtype=np.int32), list(map(len, found)))[kept],
            start=np.concatenate([lines.starts for lines in found])[kept],
            sizes=np.concatenate([lines.sizes for lines in found])[kept],
            labels=np.zeros(int(kept.sum()), np.int64),
        )


class LabelledText(_NamedFiles):
    """Each line of a UTF-8 file is a text with its label: ``label<TAB>text``, or as the files of ATIS are.

    ATIS's lines are ``BOS text EOS<TAB>slots label``. A payload is the text. Labels are indices of the
    classes, sorted by name; for a part of a data set that may lack a class, pass the ``classes`` of the
    whole.
    """

    def __init__(
        self, url: str, name: str, *, classes: Sequence[str] | None = None, storage: StorageOptions = None
    ) -> None:
        super().__init__(url, [name], storage)
        self._classes = None if classes is None else tuple(classes)

    def scan(self, report: ProgressCallback = no_report) -> Manifest:
        (file,) = files = self.files()
        (lines,) = self._find_lines(files, report)
        lines.check_none_blank(self.url)
        content = self._storage.read(file.path, 0, file.size)
        bounds = zip(lines.starts.tolist(), lines.sizes.tolist(), strict=True)
        found = [self._parsed(content[at : at + size], number) for number, (at, size) in enumerate(bounds, 1)]
        of_lines = [label for label, _, _ in found]
        classes = tuple(sorted(set(of_lines))) if self._classes is None else self._classes
        index = {name: label for label, name in enumerate(classes)}
        if unknown := [number for number, name in enumerate(of_lines) if name not in index]:
            shown = f"line {unknown[0] + 1} has label {of_lines[unknown[0]]!r}"
            raise ValueError(f"{self.url}/{file.path}: {shown}, which is none of the {len(classes)} classes")
        starts, stops = np.array([span for _, *span in found], np.int64).reshape(-1, 2).T
        return self._manifest(
            files,
            file=np.zeros(len(found), np.int32),
            start=lines.starts + starts,
            sizes=stops - starts,
            labels=np.array([index[name] for name in of_lines], np.int64),
            classes=classes,
        )

    def _parsed(self, line: bytes, number: int) -> tuple[str, int, int]:
        """Return the label of a line, and where its text begins and ends in it."""
        match = _ATIS.fullmatch(line) or _TABBED.fullmatch(line)
        if match is None:
            where, text = f"{self.url}/{self._names[0]}: line {number}", line.decode()
            shown = text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
            raise ValueError(f"{where}: expected label<TAB>text, got {shown!r}")
        return match["label"].decode(), match.start("text"), match.end("text")


class ParallelText(_NamedFiles):
    r"""Line ``i`` of the file ``source`` and line ``i`` of the file ``target``, UTF-8; all labels are 0.

    A payload is both lines, with ``\n`` between them. A line without text is refused.
    """

    def __init__(self, url: str, *, source: str, target: str, storage: StorageOptions = None) -> None:
        super().__init__(url, (source, target), storage)

    def scan(self, report: ProgressCallback = no_report) -> Manifest:
        files = self.files()
        source, target = self._find_lines(files, report)
        if len(source) != len(target):
            longer = source if len(source) > len(target) else target
            raise ValueError(
                f"{self.url}: expected as many lines in both files, got {len(source)} in {source.path} and "
                f"{len(target)} in {target.path}: line {min(len(source), len(target)) + 1} of {longer.path} "
                "has no translation"
            )
        for lines in (source, target):
            lines.check_none_blank(self.url)
        return self._manifest(
            files,
            file=np.zeros(len(source), np.int32),
            start=source.starts,
            sizes=source.sizes + 1 + target.sizes,
            labels=np.zeros(len(source), np.int64),
            more={"source_bytes": source.sizes, "target_start": target.starts},
        )

    def read(self, manifest: Manifest, ids: Ids) -> list[bytes]:
        check_ids(manifest, ids)
        source_bytes = manifest.more["source_bytes"][ids]
        target_bytes = manifest.sizes[ids] - 1 - source_bytes
        sources = _ranges(manifest.files[0], manifest.start[ids], source_bytes)
        targets = _ranges(manifest.files[1], manifest.more["target_start"][ids], target_bytes)
        lines = self.read_ranges(sources + targets)
        return [b"\n".join(pair) for pair in zip(lines[: len(ids)], lines[len(ids) :], strict=True)]


def _ranges(path: str, starts: Offsets, lengths: Offsets) -> list[Range]:
    return [Range(path, *each) for each in zip(starts.tolist(), lengths.tolist(), strict=True)]


# --------------------------------------------------------------------------------------- tokens


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
        columns = dict(zip(_COLUMNS[tokens.shape[1]], tokens.T, strict=True))
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
        kept = self._texts  # once: other threads may replace it
        if kept is not None and kept[0] == manifest.fingerprint:
            return kept[1]
        if manifest.files[-1] != self._name:
            found = manifest.files[-1].removeprefix("encoder ")
            expected = self._encoder.fingerprint
            raise ValueError(f"manifest: expected tokens of encoder {expected}, got those of {found}")
        texts = replace(
            manifest,
            files=manifest.files[:-1],
            stamps=manifest.stamps[:-1],
            sizes=manifest.more[_BYTES],
            more={name: manifest.more[name] for name in manifest.more if name not in _OWN_COLUMNS},
        )
        self._texts = manifest.fingerprint, texts
        return texts


def unpack_tokens(sample: bytes | npt.NDArray[np.uint8], *, pair: bool = False) -> tuple[Tokens, ...]:
    """Return the tokens of a sample, as views of it: of its line, or of its two lines if it is a ``pair``."""
    tokens = np.frombuffer(sample, np.int32)
    if not pair:
        return (tokens,)
    if not len(tokens) or not 0 <= tokens[0] < len(tokens):
        raise BadSample("tokens of two lines: expected how many the first one has, then these")
    return tokens[1 : 1 + tokens[0]], tokens[1 + tokens[0] :]


def _packed(lines: Sequence[Sequence[int]]) -> bytes:
    """Return the tokens of a line; for two lines, the length of the first, then the tokens of both."""
    before = [len(lines[0])] if len(lines) == 2 else []
    return np.fromiter(chain(before, *lines), np.int32).tobytes()
