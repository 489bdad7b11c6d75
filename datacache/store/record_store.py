"""A store of records: filled by all processes of a node at once, then sealed and only read.

After a crash only the record that was being written is missing. When a store has every id, one process seals
it. From then on it never changes, except that replacements of damaged records are written to ``repairs``.
"""

import contextlib
import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from datacache.capacity import check_room, free_bytes, readable, store_bytes
from datacache.errors import CacheFull, Damaged
from datacache.order import Flags, Ids
from datacache.store import folders, locks
from datacache.store.files import create_file, make_folder, read_file
from datacache.store.record_files import LOG, RECORDS, SealedStore, UnsealedStore
from datacache.store.records import HEADER_BYTES, Bytes, Record, seed_of

RecordCallback = Callable[[int, Bytes], None]
"""``use(position, record)`` of each record that :meth:`RecordStore.read_many` finds."""

_PUT_SECONDS = 10.0  # that a put waits for other writers before it gives up
_WRITER, _REPAIRS = "writer", "repairs"


@dataclass(frozen=True)
class Misses:
    """Positions in the requested ids of the records that are missing, and of those that are damaged."""

    missing: list[int]
    damaged: list[int]


class RecordStore:
    """The records of the sorted ``ids`` under ``root``; threads and processes may use it at the same time.

    ``fingerprint`` must cover everything that the records depend on, and which ids they are: two parts of the
    same samples are two stores. ``sizes``: the payloads' bytes, or estimates of them. ``note`` is stored in
    the folder's description. ``seed``: of the checksums of its records.

    Opening joins a store that other processes fill or have sealed, and removes one that is unusable: of
    another format, damaged, or unfinished when the machine restarted. It raises :class:`CacheFull` if there
    is no room for a new store; an existing one without room for more is read only, and ``no_room`` is the
    reason. It raises ``PermissionError`` if the folder is missing and cannot be created,
    :class:`datacache.errors.Untrusted` if others can change it, ``RuntimeError`` if another job uses an
    unusable one.
    """

    def __init__(
        self,
        root: Path,
        fingerprint: str,
        ids: Ids,
        sizes: npt.NDArray[np.int64],
        *,
        note: Mapping[str, Any] | None = None,
    ) -> None:
        if len(ids) != len(sizes):
            raise ValueError(f"sizes: expected one for each of {len(ids)} ids, got {len(sizes)}")
        if np.any(ids[1:] <= ids[:-1]):
            raise ValueError("ids: expected to be sorted and different, got others")
        self._ids, self.seed = ids, seed_of(fingerprint)
        self._broken = self.is_full = False
        self.no_room: str | None = None
        self._patience = _PUT_SECONDS
        self._may_repair = True
        self._sealed: SealedStore | None = None
        self._unsealed: UnsealedStore | None = None
        wanted = folders.Description(
            fingerprint=fingerprint,
            samples=len(ids),
            ids=xxh3_128_hexdigest(ids.astype("<i8").tobytes()),
            expected_bytes=store_bytes(np.asarray(sizes, np.int64) + HEADER_BYTES),
            note=dict(note or {}),
            boot=folders.boot(),
        )
        self._in_use = folders.enter(root, wanted, lambda new: _create(new, wanted), self._open)
        self._leave = weakref.finalize(self, os.close, self._in_use)
        if self._sealed is None:
            try:
                _check_room(root, wanted)
            except CacheFull as error:
                self.is_full, self.no_room = True, str(error)

    def _open(self, folder: Path) -> None:
        self.folder, self._complete = folder, str(folder / folders.COMPLETE)
        if os.path.exists(self._complete):
            self._sealed = SealedStore(folder, self.seed)
        else:
            self._unsealed = UnsealedStore(folder, self._ids, self.seed)

    @property
    def is_sealed(self) -> bool:
        """Whether the store has every id and is only read."""
        return self._find_sealed() is not None

    def read_many(self, ids: Ids, use: RecordCallback) -> Misses:
        """Call ``use(position, record)`` for each record that the store has; return the misses.

        ``use`` raises :class:`Damaged` if the record is damaged, and is called again with its replacement, if
        there is one.
        """
        rows = self._rows(ids)
        own, damaged = np.flatnonzero(rows >= 0), []
        missing = np.flatnonzero(rows < 0).tolist()
        for position, found in zip(own.tolist(), self._files().records(rows[own]), strict=True):
            try:
                if found is None:
                    missing.append(position)
                else:
                    use(position, found)
            except Damaged:
                damaged.append(position)
        damaged = [position for position in damaged if not self._use_repaired(ids, position, use)]
        return Misses(sorted(missing), damaged)

    def put_many(self, ids: Ids, records: Sequence[Record]) -> None:
        """Store the records of these ids; existing records do not change.

        Does nothing once the store is sealed or full. Raises :class:`CacheFull` once when there is no more
        room, or the folder was removed; the records of this call that are stored then are complete. While
        another process blocks the writers' lock for longer than ten seconds, nothing is stored: training
        does not wait for the cache.
        """
        rows = self._rows(ids)
        if np.any(rows < 0):
            raise ValueError(f"ids: {ids[rows < 0][0]} does not belong to {self.folder}")
        if self.is_full or self._broken or self.is_sealed:
            return
        try:
            self._put(rows, records)
        except Damaged as error:
            self._give_up(error)
        except OSError as error:
            self.is_full = True
            left = f"{readable(free_bytes(self.folder))} left"
            reason = left if self._is_at_its_path() else "it was removed"
            raise CacheFull(f"{self.folder}: nothing more is stored here ({reason}): {error}") from error

    def seal(self) -> bool:
        """Seal the store if it has every id and no other process is writing; return whether it is sealed."""
        if self.is_sealed:
            return True
        if self._broken or self.stored() < len(self._ids):
            return False
        try:
            with locks.exclusive(self.folder / _WRITER, 0.0) as held:
                if held and not self.is_sealed and self._is_at_its_path():
                    assert self._unsealed is not None
                    self._unsealed.seal(self.folder)
        except Damaged as error:
            self._give_up(error)
        except OSError:  # no room for the index, or the folder was removed
            return False
        return self.is_sealed

    def replace(self, ids: Ids, records: Sequence[Record]) -> None:
        """Store replacements of damaged records; without room for them, warn once and do nothing."""
        if not self._may_repair:
            return
        folder = self.folder / _REPAIRS
        try:
            make_folder(folder)
            for key, record in zip(ids.tolist(), records, strict=True):
                temporary = folder / f".{key}-{secrets.token_hex(4)}"
                create_file(temporary, b"".join(record))
                temporary.rename(folder / str(key))
        except OSError as error:
            self._may_repair = False
            warnings.warn(f"{self.folder}: repaired records cannot be stored: {error}", stacklevel=2)

    def stored(self) -> int:
        """Return how many of the ids are stored."""
        return len(self._ids) - int(np.count_nonzero(self._files().missing()))

    def missing_ids(self) -> Ids:
        """Return the ids that are not stored yet."""
        return self._ids[self._files().missing()]

    def close(self) -> None:
        """Release the folder. Threads that are reading can finish."""
        self._leave()

    def __enter__(self) -> "RecordStore":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _find_sealed(self) -> SealedStore | None:
        """Return the sealed files, also if another process has sealed them since the last call."""
        if self._sealed is None and not self._broken and os.path.exists(self._complete):
            try:
                self._sealed = SealedStore(self.folder, self.seed)
            except Damaged as error:
                self._give_up(error)
            except OSError:  # such as too many open files: the next call may succeed
                return None
        return self._sealed

    def _files(self) -> SealedStore | UnsealedStore:
        """Return the files, with all records that any process has stored so far."""
        if (sealed := self._find_sealed()) is not None:
            return sealed
        assert self._unsealed is not None
        if not self._broken:
            try:
                self._unsealed.refresh()
            except Damaged as error:  # earlier records can still be read
                self._give_up(error)
        return self._unsealed

    def _put(self, rows: Ids, records: Sequence[Record]) -> None:
        with locks.exclusive(self.folder / _WRITER, self._patience) as held:
            if not held:
                if self._patience:
                    warnings.warn(
                        f"{self.folder}: another process blocks all writers: "
                        "samples that are read meanwhile are not stored",
                        stacklevel=4,
                    )
                self._patience = 0.0  # the next puts only try
                return
            self._patience = _PUT_SECONDS
            if not self.is_sealed and self._unsealed is not None:
                self._unsealed.append(rows, records)

    def _is_at_its_path(self) -> bool:
        """Return whether the folder is still the one that was opened."""
        is_same = folders.is_at(self._in_use, self.folder / folders.IN_USE)
        return is_same and self._unsealed is not None and self._unsealed.is_at_its_path()

    def _use_repaired(self, ids: Ids, position: int, use: RecordCallback) -> bool:
        """Call ``use`` with the replacement of a damaged record; return whether there is a good one."""
        try:
            use(position, np.frombuffer(read_file(self.folder / _REPAIRS / str(ids[position])), np.uint8))
        except (OSError, Damaged):
            return False
        return True

    def includes(self, ids: Ids) -> Flags:
        """Return for each id whether it belongs to the store, stored already or not."""
        return self._rows(ids) >= 0

    def _rows(self, ids: Ids) -> Ids:
        """Return the position of each id among the store's ids, −1 if it does not belong to them."""
        if len(self._ids) == 0:
            return np.full(len(ids), -1)
        rows = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return np.where(self._ids[rows] == ids, rows, -1)

    def _give_up(self, error: Damaged) -> None:
        """Mark a damaged store: nothing more is stored in it, and it is removed when it is next opened."""
        if self._broken:
            return
        self._broken = True
        warnings.warn(f"{self.folder}: damaged, it is filled again at the next start: {error}", stacklevel=4)
        if folders.is_at(self._in_use, self.folder / folders.IN_USE):  # not a new folder of the same name
            with contextlib.suppress(OSError):
                create_file(self.folder / folders.BROKEN)


def _check_room(root: Path, wanted: folders.Description) -> None:
    folder = root / (folders.PREFIX + wanted.fingerprint)
    needed = wanted.expected_bytes - folders.used_bytes(folder)
    if needed > 0:
        check_room(root, needed + folders.reserved_bytes(root, but=folder), f"{wanted.samples} samples")


def _create(folder: Path, wanted: folders.Description) -> None:
    _check_room(folder.parent, wanted)
    try:
        for name in (RECORDS, LOG):
            create_file(folder / name)
    except OSError as error:
        raise CacheFull(f"{folder.parent}: no room for an empty cache: {error}") from error
