"""The folders of a cache: listed, verified, and removed when no process uses them."""

import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datacache.errors import Damaged
from datacache.store import folders
from datacache.store.files import check_folder
from datacache.store.record_files import LOG, RECORDS, RecordFile, SealedStore, read_log
from datacache.store.records import seed_of, unpack


@dataclass(frozen=True)
class CacheFolder:
    """One folder of a cache. ``state``: ``complete``, ``unfinished``, ``unusable`` or ``stale``.

    A stale folder is of a source that has changed since. ``requested`` and ``found``: samples that all
    processes so far have requested from it, and those that were there.
    """

    path: Path
    level: int | None
    state: str
    samples: int
    bytes: int
    in_use: bool
    days: float  # since a file in it was last created, renamed or removed
    note: dict[str, Any]
    requested: int = 0
    found: int = 0


def list_folders(root: Path, superseded: Collection[str] = ()) -> Iterator[CacheFolder]:
    """Yield all folders of a cache; ``superseded``: fingerprints of outdated manifests."""
    check_folder(root)
    for path in folders.all_folders(root):
        with suppress(FileNotFoundError):  # another process has removed it meanwhile
            yield _found(path, superseded)


def _found(path: Path, superseded: Collection[str]) -> CacheFolder:
    description = folders.describe(path)
    state = "complete" if (path / folders.COMPLETE).exists() else "unfinished"
    if description is None or (path / folders.BROKEN).exists():
        state = "unusable"
    note = description.note if description else {}
    if state != "unusable" and note.get("manifest") in superseded:
        state = "stale"
    requested, found = folders.read_counts(path)
    return CacheFolder(
        path=path,
        level=note.get("level"),
        state=state,
        samples=description.samples if description else 0,
        bytes=folders.used_bytes(path),
        in_use=folders.is_in_use(path),
        days=(time.time() - path.stat().st_mtime) / 86400,
        note=note,
        requested=requested,
        found=found,
    )


@dataclass(frozen=True)
class Verdict:
    """How many ``records`` a folder has, and how many are ``damaged``, also if they have been replaced."""

    folder: CacheFolder
    records: int = 0
    damaged: int = 0
    unreadable: str | None = None


def verify(folder: CacheFolder) -> Verdict:
    """Read all records of a folder, complete or not, and verify every checksum."""
    if folder.state == "unusable":
        return Verdict(folder, unreadable="damaged or of another format: filled again at the next start")
    path, seed = folder.path, seed_of(folder.path.name.removeprefix(folders.PREFIX))
    try:
        if (path / folders.COMPLETE).exists():
            sealed = SealedStore(path, seed)
            file, starts, sizes = sealed.file, sealed.starts, sealed.sizes
        else:
            file, entries = RecordFile(path / RECORDS), read_log(RecordFile(path / LOG), seed)
            starts, sizes = entries["start"], entries["bytes"]
    except (Damaged, OSError) as error:
        return Verdict(folder, unreadable=str(error))
    starts, sizes = np.array(starts), np.array(sizes)  # of the type that the kernel is compiled for
    damaged = 0
    for row in range(len(starts)):
        (record,) = file.read_many(starts[row : row + 1], sizes[row : row + 1])
        try:
            unpack(None, record, seed=seed)
        except Damaged:
            damaged += 1
    return Verdict(folder, len(starts), damaged)


def collect_garbage(folder: CacheFolder, *, everything: bool = False) -> bool:
    """Remove a folder that no running process uses; return whether it is gone.

    Complete folders of level 1 stay, as they save reads from central storage, unless ``everything``.
    """
    if folder.state == "complete" and folder.level == 1 and not everything:
        return False
    return folders.remove(folder.path)
