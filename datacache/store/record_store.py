"""One generation of records: filled by all processes of a node at once, then sealed and only read.

A generation is a folder ``gen-<fingerprint>`` with a file of records. While it is open any process may put
records, one at a time (see :mod:`datacache.store.filling`); what a killed process was putting is not there,
and all else is. When every id is in it one process syncs it and writes ``COMPLETE``; from then on it is never
changed (see :mod:`datacache.store.sealed`), except that records found damaged are replaced beside it.
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
from datacache.order import Ids
from datacache.store import locks
from datacache.store.filling import LOG, RECORDS, Store
from datacache.store.folders import (
    BROKEN,
    COMPLETE,
    IN_USE,
    PREFIX,
    Description,
    boot,
    drop,
    enter,
    held_bytes,
    is_at,
    promised_bytes,
)
from datacache.store.private import create_file, make_folder, read_file
from datacache.store.records import HEADER_BYTES, seed_of
from datacache.store.sealed import SealedStore, seal

Use = Callable[[int, memoryview], None]

_PUT_SECONDS = 10.0  # that a put waits for other writers before it is given up
_WRITER, _REPAIRS = "writer", "repairs"


@dataclass(frozen=True)
class Misses:
    """Positions, in the ids that were asked for, of records that were not there, or not as they were put."""

    missing: list[int]
    damaged: list[int]


class RecordStore:
    """The records of the sorted ``ids`` under ``root``; threads and processes may use it at the same time.

    ``fingerprint`` must tell everything that the records depend on, and which ids they are: two parts of the
    same samples are two generations. ``sizes`` are the payloads' bytes, or what to plan for them. ``note`` is
    kept with the folder for those who list it.

    Opening joins what others fill or have sealed, and drops what cannot be used: another format, damaged, or
    left unfinished before the machine started again. Without room a new one is not made, which raises
    :class:`CacheFull`; one that others began is read, and nothing more put: ``no_room`` says why. It raises
    ``PermissionError`` if the folder is not there and cannot be made, :class:`datacache.errors.Untrusted` if
    others can change it, ``RuntimeError`` if another job uses what would have to be dropped.

    ``seed``: what the checksums of its records are to be seeded with.
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
        self._broken = False
        self.is_full = False
        self.no_room: str | None = None
        self._patience = _PUT_SECONDS
        self._may_repair = True
        self._sealed: SealedStore | None = None
        self._store: Store | None = None
        self._open(root, _describe(fingerprint, ids, sizes, dict(note or {})))

    def _open(self, root: Path, wanted: Description) -> None:
        while self._sealed is None and self._store is None:
            self.folder, descriptor = enter(root, wanted, lambda new: _create(new, wanted))
            try:
                if (self.folder / COMPLETE).exists():
                    self._sealed = SealedStore(self.folder, self.seed)
                else:
                    self._store = Store(self.folder, self._ids, self.seed)
            except Damaged as error:
                warnings.warn(f"{self.folder}: damaged, to be made again: {error}", stacklevel=4)
                drop(self.folder, descriptor, "damaged")
            except BaseException:
                os.close(descriptor)
                raise
        if self._sealed is None:
            try:
                _check_room(root, wanted)
            except CacheFull as error:
                self.is_full, self.no_room = True, str(error)
        self._complete = str(self.folder / COMPLETE)
        self._in_use = descriptor
        self._leave = weakref.finalize(self, os.close, descriptor)

    @property
    def is_frozen(self) -> bool:
        """Whether every id is in it, and it is only read."""
        return self._look() is not None

    def read_many(self, ids: Ids, use: Use) -> Misses:
        """Call ``use(position, record)`` for each record that is there, and return what was not read.

        The record is a view that may end with the call: copy what is to be kept. ``use`` raises
        :class:`Damaged` when it finds it damaged (see :func:`datacache.store.records.unpack`), and is called
        again if a replacement has been kept.
        """
        record, missing, damaged = self._record_of(), [], []
        for position, place in enumerate(self._places(ids).tolist()):
            try:
                found = None if place < 0 else record(place)
                if found is None:
                    missing.append(position)
                else:
                    use(position, found)
            except Damaged:
                damaged.append(position)
        return Misses(missing, [position for position in damaged if not self._repaired(ids, position, use)])

    def put_many(self, ids: Ids, records: Sequence[bytes]) -> None:
        """Keep the records of these ids; those that are there stay as they are.

        Does nothing once the generation is sealed or full. Raises :class:`CacheFull` once when there is no
        more room, or the folder has gone; what of this batch is there is whole. If another process keeps all
        others from writing for long, batches are not kept until it ends: a cache makes nobody wait.
        """
        places = self._places(ids)
        if np.any(places < 0):
            raise ValueError(f"ids: {ids[places < 0][0]} does not belong to {self.folder}")
        if self.is_full or self._broken or self.is_frozen:
            return
        try:
            self._put(places, records)
        except Damaged as error:
            self._give_up(error)
        except OSError as error:
            self.is_full = True
            left = f"{readable(free_bytes(self.folder))} left"
            if not self._is_there():
                left = "it was removed"
            raise CacheFull(f"{self.folder}: nothing more is kept here ({left}): {error}") from error

    def seal(self) -> bool:
        """Sync and seal it if every id is in it and no other process is at it; return whether it is sealed.

        On a disk this may take as long as writing what the system has not written yet.
        """
        if self.is_frozen:
            return True
        if self._broken or self.stored() < len(self._ids):
            return False
        try:
            with locks.exclusive(self.folder / _WRITER, 0.0) as held:
                if held and not self.is_frozen and self._is_there():
                    assert self._store is not None
                    seal(self.folder, self._store, self.seed)
        except Damaged as error:
            self._give_up(error)
        except OSError:  # no room for the index, or the folder has gone
            return False
        return self.is_frozen

    def replace(self, ids: Ids, records: Sequence[bytes]) -> None:
        """Keep records beside those that were found damaged; without room for them nothing is kept."""
        if not self._may_repair:
            return
        try:
            folder = self.folder / _REPAIRS
            make_folder(folder)
            for key, record in zip(ids.tolist(), records, strict=True):
                aside = folder / f".{key}-{secrets.token_hex(4)}"
                create_file(aside, record)
                aside.rename(folder / str(key))
        except OSError as error:
            self._may_repair = False
            warnings.warn(f"{self.folder}: repaired records cannot be kept: {error}", stacklevel=2)

    def stored(self) -> int:
        """Return how many of the ids are in it."""
        return len(self._ids) - int(np.count_nonzero(self._missing()))

    def missing_ids(self) -> Ids:
        """Return the ids that are not in it."""
        return self._ids[self._missing()]

    def close(self) -> None:
        """Give it back. Threads that are reading still get what they read."""
        self._leave()

    def __enter__(self) -> "RecordStore":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _look(self) -> SealedStore | None:
        """Return the sealed records, also when another process has sealed them since the last look."""
        if self._sealed is None and not self._broken and os.path.exists(self._complete):
            try:
                self._sealed = SealedStore(self.folder, self.seed)
            except Damaged as error:
                self._give_up(error)
            except OSError:  # no descriptor was free, or the like: the next look may succeed
                return None
        return self._sealed

    def _record_of(self) -> Callable[[int], memoryview | None]:
        """Return what gives the record of a place, with all that others have put until now."""
        if (sealed := self._look()) is not None:
            return sealed.record
        self._refresh()
        assert self._store is not None
        return self._store.record

    def _missing(self) -> npt.NDArray[np.bool_]:
        if self.is_frozen:
            return np.zeros(len(self._ids), bool)
        self._refresh()
        assert self._store is not None
        return self._store.missing()

    def _refresh(self) -> None:
        """Take notice of what others have put; where that is damaged, what is known already is read on."""
        if self._broken or self._store is None:
            return
        try:
            self._store.refresh()
        except Damaged as error:
            self._give_up(error)

    def _put(self, places: Ids, records: Sequence[bytes]) -> None:
        with locks.exclusive(self.folder / _WRITER, self._patience) as held:
            if not held:
                if self._patience:
                    warnings.warn(
                        f"{self.folder}: another process keeps all others from writing: "
                        "what is read meanwhile is not kept",
                        stacklevel=4,
                    )
                self._patience = 0.0  # once is enough: from now on only asked
                return
            self._patience = _PUT_SECONDS
            if not self.is_frozen and self._store is not None:
                self._store.append(places, records)

    def _is_there(self) -> bool:
        """ProgressCallback whether the folder is still the one that was opened."""
        is_same = is_at(self._in_use, self.folder / IN_USE)
        return is_same and self._store is not None and self._store.is_at_its_path()

    def _repaired(self, ids: Ids, position: int, use: Use) -> bool:
        """Use what was put instead of a damaged record; tell whether that went well."""
        try:
            use(position, memoryview(read_file(self.folder / _REPAIRS / str(ids[position]))))
        except (OSError, Damaged):
            return False
        return True

    def holds(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return for each id whether it belongs here, kept already or not."""
        return self._places(ids) >= 0

    def _places(self, ids: Ids) -> Ids:
        """Return where each id is among those that belong here, −1 if it does not."""
        if len(self._ids) == 0:
            return np.full(len(ids), -1)
        places = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return np.where(self._ids[places] == ids, places, -1)

    def _give_up(self, error: Damaged) -> None:
        """Put nothing more into what is damaged; it is dropped when it is next opened."""
        if self._broken:
            return
        self._broken = True
        warnings.warn(f"{self.folder}: damaged, to be made again at the next start: {error}", stacklevel=4)
        if is_at(self._in_use, self.folder / IN_USE):  # else it is another's
            with contextlib.suppress(OSError):
                create_file(self.folder / BROKEN)


def _describe(fingerprint: str, ids: Ids, sizes: npt.NDArray[np.int64], note: dict[str, Any]) -> Description:
    expected = store_bytes(np.asarray(sizes, np.int64) + HEADER_BYTES)
    return Description(
        fingerprint=fingerprint,
        samples=len(ids),
        ids=xxh3_128_hexdigest(ids.astype("<i8").tobytes()),
        expected_bytes=expected,
        note=note,
        boot=boot(),
    )


def _check_room(root: Path, wanted: Description) -> None:
    folder = root / (PREFIX + wanted.fingerprint)
    needed = wanted.expected_bytes - held_bytes(folder)
    if needed > 0:
        check_room(root, needed + promised_bytes(root, but=folder), f"{wanted.samples} samples")


def _create(folder: Path, wanted: Description) -> None:
    _check_room(folder.parent, wanted)
    try:
        for name in (RECORDS, LOG):
            create_file(folder / name)
    except OSError as error:
        raise CacheFull(f"{folder.parent}: no room for an empty cache: {error}") from error
