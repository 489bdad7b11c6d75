"""Manifests that are kept: each is built once, by one process, and built anew when its source has changed."""

from pathlib import Path

from xxhash import xxh3_64_hexdigest

from datacache import locks
from datacache.errors import SourceChanged
from datacache.manifest import Manifest
from datacache.sources import Source
from datacache.storage import Tell, untold

_BEFORE = ".superseded"
SCAN_SECONDS = 24 * 3600.0  # that others wait for the one that scans; a crash ends the wait at once


def manifest_of(source: Source, folder: Path | None, name: str, tell: Tell = untold) -> Manifest:
    """Return the manifest of a source, from ``folder`` if it is there and the source is what it was.

    ``name`` tells sources apart, by their URLs and options: a listing does not show these. Where several
    processes call this, one scans and the others wait.
    """
    if folder is None:
        return source.scan(tell)
    readable = "".join(each if each.isalnum() else "-" for each in name)[-60:]
    path = folder / f"manifest-{readable}-{xxh3_64_hexdigest(name.encode())}.npz"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locks.exclusive(path.with_suffix(".lock"), SCAN_SECONDS) as held:
            return _kept(source, path) or _scanned(source, path if held else None, tell)
    except OSError:  # the folder cannot be written
        return _kept(source, path) or _scanned(source, None, tell)


def superseded(folder: Path) -> set[str]:
    """Return the fingerprints of manifests that sources had before they changed."""
    before: set[str] = set()
    for path in folder.glob(f"manifest-*{_BEFORE}"):
        before |= set(path.read_text().split())
    if not before:
        return before
    return before - {fingerprint for path in folder.glob("manifest-*.npz") if (fingerprint := _held_by(path))}


def _scanned(source: Source, path: Path | None, tell: Tell) -> Manifest:
    manifest = source.scan(tell)
    if path is not None:
        before = _held_by(path)
        if before not in (None, manifest.fingerprint):
            with path.with_suffix(_BEFORE).open("a") as file:
                file.write(f"{before}\n")
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
