"""What lies in a cache's folders: listed, verified, and removed when nobody uses it."""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datacache.errors import Damaged
from datacache.store.filling import RECORDS, RecordFile, all_entries
from datacache.store.folders import (
    BROKEN,
    COMPLETE,
    PREFIX,
    all_folders,
    describe,
    held_bytes,
    is_in_use,
    reads_of,
    remove,
)
from datacache.store.private import check_folder
from datacache.store.records import key_of, seed_of, unpack
from datacache.store.sealed import SealedStore


@dataclass(frozen=True)
class Kept:
    """One folder of a cache. ``state``: ``complete``, ``unfinished``, ``unusable`` or ``stale``.

    A stale one is of a source that has changed since. ``asked`` and ``found``: samples that all processes so
    far have asked for, and those of them that were there.
    """

    folder: Path
    level: int | None
    state: str
    samples: int
    bytes: int
    in_use: bool
    days: float  # since it was made or finished
    note: dict[str, Any]
    asked: int = 0
    found: int = 0


def kept_in(root: Path, before: Collection[str] = ()) -> Iterator[Kept]:
    """Yield all that lies in a folder; nothing if it is not there, ``Untrusted`` if it is another user's.

    ``before``: fingerprints of manifests that hold no more (see :func:`datacache.catalogue.superseded`).
    """
    check_folder(root)
    for folder in all_folders(root):
        found = describe(folder)
        state = "complete" if (folder / COMPLETE).exists() else "unfinished"
        if found is None or (folder / BROKEN).exists():
            state = "unusable"
        note = found.note if found else {}
        if state != "unusable" and note.get("manifest") in before:
            state = "stale"
        asked, there = reads_of(folder)
        yield Kept(
            folder=folder,
            level=note.get("level"),
            state=state,
            samples=found.samples if found else 0,
            bytes=held_bytes(folder),
            in_use=is_in_use(folder),
            days=(time.time() - folder.stat().st_mtime) / 86400,
            note=note,
            asked=asked,
            found=there,
        )


@dataclass(frozen=True)
class Verdict:
    """What reading every record of a folder has shown.

    ``damaged``: how many of the ``records`` that are there are not what was written, also where a good one is
    kept beside it.
    """

    kept: Kept
    records: int = 0
    damaged: int = 0
    unreadable: str | None = None


def verify(kept: Kept) -> Verdict:
    """Read all records of a folder, whole or being filled, and look at every checksum."""
    if kept.state == "unusable":
        return Verdict(kept, unreadable="damaged or of another format: made again at the next start")
    seed = seed_of(kept.folder.name.removeprefix(PREFIX))
    try:
        records = list(_records(kept.folder, seed))
    except (Damaged, OSError) as error:
        return Verdict(kept, unreadable=str(error))
    return Verdict(kept, len(records), sum(not _is_whole(record, seed) for record in records))


def _records(folder: Path, seed: int) -> Iterator[Callable[[], memoryview]]:
    """Yield what reads each record that is there."""
    if (folder / COMPLETE).exists():
        sealed = SealedStore(folder, seed)
        yield from (partial(sealed.record, place) for place in range(len(sealed)))
        return
    file = RecordFile(folder / RECORDS)
    for entry in all_entries(folder, seed):
        yield partial(file.read, int(entry["start"]), int(entry["bytes"]))


def _is_whole(read: Callable[[], memoryview], seed: int) -> bool:
    try:
        record = read()
        unpack(key_of(record), record, verify=True, seed=seed)
    except Damaged:
        return False
    return True


def collect_garbage(kept: Kept, *, of_everything: bool = False) -> bool:
    """Remove a folder that no living process uses; return whether it is gone.

    Complete samples of level 1 stay: reading them again is what a cache is there to avoid. ``of_everything``
    removes these as well.
    """
    is_worth_keeping = kept.state == "complete" and kept.level == 1
    if is_worth_keeping and not of_everything:
        return False
    return remove(kept.folder)


def total_bytes(folders: list[Kept]) -> int:
    """Return what the folders take together."""
    return sum(each.bytes for each in folders)
