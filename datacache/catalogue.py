"""Stored manifests: each is built once, by one process, and again when its source has changed."""

from pathlib import Path

from xxhash import xxh3_64_hexdigest

from datacache.errors import SourceChanged, Untrusted
from datacache.manifest import Manifest
from datacache.sources import Source
from datacache.storage import ProgressCallback, no_report
from datacache.store import locks
from datacache.store.private import append_line, check_folder, make_folder, read_file

_BEFORE = ".superseded"
SCAN_SECONDS = 300.0  # that others wait for the one that scans, before each scans for itself


def manifest_of(
    source: Source, folder: Path | None, name: str, report: ProgressCallback = no_report
) -> Manifest:
    """Return the manifest of a source, from ``folder`` if it is there and the source is what it was.

    ``name`` tells sources apart, by their URLs and options: a listing does not show these. Where several
    processes call this, one scans and the others wait for some minutes at most. Raises ``Untrusted`` where
    other users can change what is in the folder.
    """
    if folder is None:
        return source.scan(report)
    readable = "".join(each if each.isalnum() else "-" for each in name)[-60:]
    path = folder / f"manifest-{readable}-{xxh3_64_hexdigest(name.encode())}.npz"
    try:
        make_folder(folder)
        with locks.exclusive(path.with_suffix(".lock"), SCAN_SECONDS) as held:
            return _kept(source, path) or _scanned(source, path if held else None, report)
    except Untrusted:
        raise
    except OSError:  # the folder cannot be written
        return _kept(source, path) or _scanned(source, None, report)


def superseded(folder: Path) -> set[str]:
    """Return the fingerprints of manifests that sources had before they changed."""
    before: set[str] = set()
    check_folder(folder)
    for path in folder.glob(f"manifest-*{_BEFORE}"):
        before |= set(read_file(path).decode().split())
    if not before:
        return before
    return before - {fingerprint for path in folder.glob("manifest-*.npz") if (fingerprint := _held_by(path))}


def _scanned(source: Source, path: Path | None, report: ProgressCallback) -> Manifest:
    manifest = source.scan(report)
    if path is not None:
        before = _held_by(path)
        if before is not None and before != manifest.fingerprint:
            append_line(path.with_suffix(_BEFORE), before)
        manifest.save(path)
    return manifest


def _held_by(path: Path) -> str | None:
    try:
        return Manifest.load(path).fingerprint
    except (OSError, ValueError):
        return None


def _kept(source: Source, path: Path) -> Manifest | None:
    try:
        manifest = Manifest.load(path)
        source.check(manifest)
    except (OSError, SourceChanged, ValueError):
        return None
    return manifest
