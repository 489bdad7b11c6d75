"""Stored manifests: each is built once, by one process, and again after its source has changed."""

from pathlib import Path

from xxhash import xxh3_64_hexdigest

from datacache.errors import SourceChanged, Untrusted
from datacache.manifest import Manifest
from datacache.sources import Source
from datacache.storage import ProgressCallback, no_report
from datacache.store import locks
from datacache.store.files import append_line, check_folder, make_folder, read_file

_SUPERSEDED = ".superseded"
SCAN_SECONDS = 300.0  # that processes wait for the one that scans, before each scans itself


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
    path = folder / f"manifest-{readable}-{xxh3_64_hexdigest(name.encode())}.npz"
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
    before: set[str] = set()
    check_folder(folder)
    for path in folder.glob(f"manifest-*{_SUPERSEDED}"):
        before |= set(read_file(path).decode().split())
    if not before:
        return before
    return before - {_fingerprint(path) for path in folder.glob("manifest-*.npz")}


def _scan(source: Source, path: Path | None, report: ProgressCallback) -> Manifest:
    manifest = source.scan(report)
    if path is not None:
        before = _fingerprint(path)
        if before is not None and before != manifest.fingerprint:
            append_line(path.with_suffix(_SUPERSEDED), before)
        manifest.save(path)
    return manifest


def _fingerprint(path: Path) -> str | None:
    try:
        return Manifest.load(path).fingerprint
    except (OSError, ValueError):
        return None


def _stored(source: Source, path: Path) -> Manifest | None:
    try:
        manifest = Manifest.load(path)
        source.check(manifest)
    except (OSError, SourceChanged, ValueError):
        return None
    return manifest
