"""The list of a source's samples: one number a sample and column, built once, stored in a file."""

import io
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
import xxhash

from datacache.order import Permutation
from datacache.store.files import read_file, write_atomic

FORMAT = 1
Column = npt.NDArray[np.int64]
# The columns of a manifest, with their names and types in its file; in this order they are hashed.
_COLUMNS: dict[str, tuple[str, Any]] = {
    "stamps": ("stamps", np.uint64),
    "file": ("of_file", np.int32),
    "start": ("start", np.int64),
    "sizes": ("sizes", np.int64),
    "labels": ("labels", np.int64),
}


class Texts(Sequence[str]):
    """Many strings in one buffer of UTF-8, without a Python object for each; other bytes are preserved.

    >>> texts = Texts.of(["one", "zwölf"])
    >>> texts[1], len(texts), texts == Texts.of(["one", "zwölf"])
    ('zwölf', 2, True)
    """

    def __init__(self, buffer: bytes, ends: Column) -> None:
        self.buffer = buffer
        self.ends = ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Texts":
        """Return the strings of an iterable."""
        buffer, ends = bytearray(), array("q")
        for text in texts:
            buffer += text.encode("utf-8", "surrogateescape")
            ends.append(len(buffer))
        return cls(bytes(buffer), np.array(ends, np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "Texts": ...
    def __getitem__(self, index: int | slice) -> "str | Texts":
        if isinstance(index, slice):
            return Texts.of(self[at] for at in range(*index.indices(len(self))))
        at = range(len(self))[index]
        start = int(self.ends[at - 1]) if at else 0
        return self.buffer[start : int(self.ends[at])].decode("utf-8", "surrogateescape")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Texts):
            return NotImplemented
        return self.buffer == other.buffer and np.array_equal(self.ends, other.ends)


@dataclass(frozen=True, eq=False)
class Manifest:
    """The samples of a source; equal sources have equal fingerprints.

    All columns are read-only. Sample ``i`` begins at byte ``start[i]`` of ``files[file[i]]``; its payload, as
    returned by :meth:`Source.read`, has ``sizes[i]`` bytes.
    """

    payload: str
    """``"image"`` (encoded), ``"array"`` (raw uint8) or ``"text"``."""
    files: Texts
    """Paths below the source's URL."""
    stamps: npt.NDArray[np.uint64]
    """For each file a hash of its size and version."""
    file: npt.NDArray[np.int32]
    start: Column
    sizes: Column
    labels: Column
    classes: tuple[str, ...] = ()
    """Names of the labels ``0, 1, …``; empty where the source has none."""
    shape: tuple[int, ...] | None = None
    """Of each sample, ``(height, width, channels)``, where samples are arrays."""
    more: Mapping[str, Column] = field(default_factory=dict)
    """Further columns, specific to the source."""
    fingerprint: str = field(init=False)
    """Of all the above, 32 hexadecimal digits."""

    def __post_init__(self) -> None:
        for name, (_, kind) in _COLUMNS.items():
            object.__setattr__(self, name, _frozen(getattr(self, name), kind))
        object.__setattr__(self, "more", {name: _frozen(self.more[name], np.int64) for name in self.more})
        self._check()
        object.__setattr__(self, "fingerprint", self._hash())

    def __len__(self) -> int:
        return len(self.sizes)

    def samples_fingerprint(self) -> str:
        """Return the fingerprint without the stamps, which differ between copies of the same files."""
        return self._hash(without="stamps")

    def save(self, path: str | Path) -> None:
        """Write the manifest to a file atomically."""
        facts = {"format": FORMAT, "fingerprint": self.fingerprint, **self._facts()}
        columns: dict[str, Any] = {"facts": np.frombuffer(json.dumps(facts).encode(), np.uint8)}
        columns |= {name: np.frombuffer(buffer, np.uint8) for name, buffer in self._buffers().items()}
        content = io.BytesIO()
        np.savez(content, **columns)
        write_atomic(Path(path), content.getbuffer())

    @classmethod
    def load(cls, path: str | Path) -> "Manifest":
        """Return a manifest that was saved.

        ``FileNotFoundError`` if it does not exist; ``ValueError`` if it is damaged or of another format;
        ``Untrusted`` if other users may have written it.
        """
        data = read_file(Path(path))
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                columns = dict(archive)
            facts = json.loads(columns["facts"].tobytes())
            if facts["format"] == FORMAT:
                restored = {name: columns[stored].view(kind) for name, (stored, kind) in _COLUMNS.items()}
                manifest = cls(
                    payload=facts["payload"],
                    files=Texts(columns["names"].tobytes(), columns["name_ends"].view(np.int64)),
                    classes=tuple(facts["classes"]),
                    shape=None if facts["shape"] is None else tuple(facts["shape"]),
                    more={name: columns[f"more_{name}"].view(np.int64) for name in facts["more"]},
                    **restored,
                )
        except Exception as error:  # damaged bytes raise many kinds of errors in an archive's reader
            raise ValueError(f"{path}: {_DAMAGED} ({type(error).__name__}: {error})") from error
        if facts["format"] != FORMAT:
            raise ValueError(f"{path}: manifest of format {facts['format']}, expected {FORMAT}; {_REMEDY}")
        if manifest.fingerprint != facts["fingerprint"]:
            raise ValueError(f"{path}: {_DAMAGED} (its fingerprint does not match)")
        return manifest

    def _facts(self) -> dict[str, Any]:
        return {
            "payload": self.payload,
            "classes": list(self.classes),
            "shape": None if self.shape is None else list(self.shape),
            "more": sorted(self.more),
        }

    def _buffers(self) -> dict[str, bytes]:
        """Return every column by name as bytes, in a fixed order."""
        columns: dict[str, npt.NDArray[Any]] = {"name_ends": self.files.ends}
        columns |= {stored: getattr(self, name) for name, (stored, _) in _COLUMNS.items()}
        columns |= {f"more_{name}": self.more[name] for name in sorted(self.more)}
        return {"names": self.files.buffer, **{name: column.tobytes() for name, column in columns.items()}}

    def _hash(self, without: str | None = None) -> str:
        digest = xxhash.xxh3_128(json.dumps([FORMAT, self._facts()]).encode())
        for name, buffer in self._buffers().items():
            if name == without:
                continue
            digest.update(len(buffer).to_bytes(8, "little"))
            digest.update(buffer)
        return digest.hexdigest()

    def _check(self) -> None:
        samples = len(self)
        if samples == 0:
            raise ValueError("manifest: expected at least one sample, got none")
        lengths = dict.fromkeys(("file", "start", "labels"), samples) | {"stamps": len(self.files)}
        columns = {name: (getattr(self, name), length) for name, length in lengths.items()}
        columns |= {name: (column, samples) for name, column in self.more.items()}
        for name, (column, length) in columns.items():
            if column.shape != (length,):
                raise ValueError(f"manifest: {name}: expected shape ({length},), got {column.shape}")
        if min(self.start.min(), self.sizes.min(), self.labels.min()) < 0:
            raise ValueError("manifest: start, sizes, labels: expected no negative numbers")
        _check_range("file", self.file, len(self.files))
        if self.classes:
            _check_range("labels", self.labels, len(self.classes))


@dataclass(frozen=True)
class Split:
    """A part of a data set that has no split: the ``share`` of each class for validation, or the rest.

    The choice depends only on ``share``, ``seed``, the class's label and its number of samples, in the order
    of the manifest, so it is the same on every node.
    """

    part: Literal["training", "validation"]
    share: float
    seed: int = 0

    def of(self, manifest: Manifest) -> Manifest:
        """Return the manifest of this part; its files are those of the whole data set.

        Raises ``ValueError`` if a class had no training samples left, or no class had a validation sample.
        """
        labels, classes = manifest.labels, manifest.classes
        held_out = np.zeros(len(labels), bool)
        for label in np.unique(labels).tolist():
            ids = np.flatnonzero(labels == label)
            count = int(self.share * len(ids) + 0.5)
            if count == len(ids):
                name = classes[label] if classes else str(label)
                raise ValueError(
                    f"validation_share: expected one that leaves each class samples to train on, "
                    f"got {self.share}: class {name} would lose all its {len(ids)}"
                )
            held_out[ids[Permutation(len(ids), self.seed, label).at(np.arange(count))]] = True
        if not held_out.any():
            raise ValueError(
                f"validation_share: expected one that gives a class a sample, got {self.share} "
                f"of {len(labels)} samples"
            )
        chosen = held_out if self.part == "validation" else ~held_out
        columns = {name: getattr(manifest, name)[chosen] for name in ("file", "start", "sizes", "labels")}
        more = {name: column[chosen] for name, column in manifest.more.items()}
        return replace(manifest, **columns, more=more)


_REMEDY = "delete it, and it is built again"
_DAMAGED = f"not a manifest, or a damaged one; {_REMEDY}"


def _frozen(column: npt.ArrayLike, kind: Any) -> npt.NDArray[Any]:
    view = np.ascontiguousarray(column, kind).view()
    view.flags.writeable = False
    return view


def _check_range(name: str, column: npt.NDArray[Any], count: int) -> None:
    if column.min() < 0 or column.max() >= count:
        found = f"{column.min()} … {column.max()}"
        raise ValueError(f"manifest: {name}: expected 0 … {count - 1}, got {found}")
