"""The interface of sources, their stored manifests, and what sources of stored files share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from datacache.errors import SourceChanged, Untrusted
from datacache.manifest import Manifest, Texts
from datacache.order import Ids
from datacache.storage import File, ProgressCallback, Range, Storage, StorageOptions, no_report
from datacache.store import locks
from datacache.store.files import append_line, check_folder, make_folder, read_file

_SUPERSEDED = ".superseded"
SCAN_SECONDS = 300.0  # that processes wait for the one that scans, before each scans itself


class Source(ABC):
    """Samples in central storage: listed once in a manifest, then read by id."""

    payload: ClassVar[str]
    """The kind of payload that :meth:`read` returns: ``"image"``, ``"array"`` or ``"text"``."""

    @abstractmethod
    def scan(self, report: ProgressCallback = no_report) -> Manifest:
        """List the samples; ``ValueError`` if there are none, or files that the source does not expect."""

    @abstractmethod
    def read(self, manifest: Manifest, ids: Ids) -> list[bytes]:
        """Return the payloads of these samples, in the order of ``ids``; any thread may call it.

        ``SourceChanged`` if a file is missing or too short, ``StorageFailed`` if it could not be read.
        """

    @abstractmethod
    def check(self, manifest: Manifest) -> None:
        """Raise ``SourceChanged`` if files were added, removed or changed; reads no samples."""

    def _manifest(self, files: Sequence[File], **columns: Any) -> Manifest:
        return Manifest(payload=self.payload, files=names(files), stamps=stamps(files), **columns)


def manifest_of(
    source: Source, folder: Path | None, name: str, report: ProgressCallback = no_report
) -> Manifest:
    """Return the manifest of a source, from ``folder`` if it is stored there and the source has not changed.

    ``name`` identifies the source, by its URL and options. If several processes call this, one scans and the
    others wait, five minutes at most. Raises ``Untrusted`` if other users can change the folder.
    """
    if folder is None:
        return source.scan(report)
    readable = "".join(each if each.isalnum() else "-" for each in name)[-60:]
    digest = xxhash.xxh3_64_hexdigest(name.encode("utf-8", "surrogatepass"))  # folders of any bytes
    path = folder / f"manifest-{readable}-{digest}.npz"
    try:
        make_folder(folder)
        with locks.exclusive(path.with_suffix(".lock"), SCAN_SECONDS) as held:
            return _stored(source, path) or _scan(source, path if held else None, report)
    except Untrusted:
        raise
    except OSError:  # the folder cannot be written
        return _stored(source, path) or _scan(source, None, report)


def superseded(folder: Path) -> set[str]:
    """Return the fingerprints of manifests that sources had before they changed."""
    check_folder(folder)
    lines = [read_file(path).decode().split() for path in folder.glob(f"manifest-*{_SUPERSEDED}")]
    before = {fingerprint for line in lines for fingerprint in line}
    current = (_load(path) for path in (folder.glob("manifest-*.npz") if before else ()))
    return before - {manifest.fingerprint for manifest in current if manifest is not None}


def _scan(source: Source, path: Path | None, report: ProgressCallback) -> Manifest:
    manifest = source.scan(report)
    if path is not None:
        before = _load(path)
        if before is not None and before.fingerprint != manifest.fingerprint:
            append_line(path.with_suffix(_SUPERSEDED), before.fingerprint)
        manifest.save(path)
    return manifest


def _stored(source: Source, path: Path) -> Manifest | None:
    manifest = _load(path)
    try:
        if manifest is not None:
            source.check(manifest)
    except (OSError, SourceChanged, ValueError):
        return None
    return manifest


def _load(path: Path) -> Manifest | None:
    try:
        return Manifest.load(path)
    except (OSError, ValueError):
        return None


class StoredSource(Source):
    """Samples that are ranges of files in a :class:`Storage`."""

    def __init__(self, url: str, *, storage: StorageOptions = None) -> None:
        self._storage = Storage(url, **(storage or {}))
        self.url = self._storage.url

    @abstractmethod
    def files(self, report: ProgressCallback = no_report) -> list[File]:
        """Return the files of the samples, always in the same order."""

    def ranges(self, manifest: Manifest, ids: Ids) -> list[Range]:
        """Return the range of each sample."""
        columns = (manifest.file, manifest.start, manifest.sizes)
        rows = zip(*(column[ids].tolist() for column in columns), strict=True)
        return [Range(manifest.files[file], start, size) for file, start, size in rows]

    def read(self, manifest: Manifest, ids: Ids) -> list[bytes]:
        check_ids(manifest, ids)
        return self.read_ranges(self.ranges(manifest, ids))

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """Return the bytes of ranges; ``SourceChanged`` if a file is missing."""
        try:
            return self._storage.read_many(ranges)
        except FileNotFoundError as error:
            raise SourceChanged(f"{self.url}: no longer there: {error}") from error

    def check(self, manifest: Manifest) -> None:
        files = self.files()
        if names(files) == manifest.files and np.array_equal(stamps(files), manifest.stamps):
            return
        before = dict(zip(manifest.files, manifest.stamps.tolist(), strict=True))
        after = dict(zip(names(files), stamps(files).tolist(), strict=True))
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        raise changed_files(self.url, changed)


def changed_files(source: str, changed: Sequence[str]) -> SourceChanged:
    """Return the error that names a changed file of a source."""
    count = "one file" if len(changed) == 1 else f"{len(changed)} files"
    return SourceChanged(
        f"{source}: {count} came, went or changed after the manifest was made, such as {changed[0]}; "
        "build the manifest again"
    )


def check_ids(manifest: Manifest, ids: Ids) -> None:
    """Raise ``ValueError`` unless all ids are samples; NumPy would take negative ones from the end."""
    if len(ids) and (ids.min() < 0 or ids.max() >= len(manifest)):
        raise ValueError(f"ids: expected 0 … {len(manifest) - 1}, got {ids.min()} … {ids.max()}")


def names(files: Sequence[File]) -> Texts:
    """Return the files' paths."""
    return Texts.of(file.path for file in files)


def stamps(files: Sequence[File]) -> npt.NDArray[np.uint64]:
    """Return a hash of each file's size and version."""
    hashes = (xxhash.xxh3_64_intdigest(f"{file.size} {file.version}".encode()) for file in files)
    return np.fromiter(hashes, np.uint64, len(files))


def labels_by_folder(
    source: str, paths: Sequence[str], classes: Sequence[str] | None = None
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Return each path's label, the index of its first folder among ``classes``, and the classes.

    Without ``classes`` they are all first folders, sorted by name.
    """
    for path in paths:
        if "/" not in path:
            raise ValueError(f"{source}: expected samples in folders named like classes, got {path}")
    of_paths = [path.partition("/")[0] for path in paths]
    folders = set(of_paths)
    known = tuple(sorted(folders) if classes is None else classes)
    if unknown := sorted(folders - set(known)):
        raise ValueError(
            f"{source}: {len(unknown)} of {len(folders)} folders are none of the {len(known)} classes given, "
            f"such as {unknown[0]}"
        )
    label = {name: number for number, name in enumerate(known)}
    return np.array([label[name] for name in of_paths], np.int64), known
