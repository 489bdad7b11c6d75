"""One generation of records: filled by all processes of a node at once, then frozen and only read.

A generation is a folder ``gen-<fingerprint>`` with an LMDB environment, keys of 8 bytes big-endian. While it
is open any process may put records, one transaction a batch; what a killed process was putting is not there,
and all else is. When every id is in it one process syncs it and writes ``COMPLETE``; from then on it is never
changed (see :mod:`datacache.frozen`), except that records found damaged are replaced beside it.
"""

import contextlib
import errno
import os
import secrets
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from datacache import environments
from datacache.capacity import check_room, free_bytes, lmdb_bytes, readable
from datacache.errors import CacheFull, Damaged
from datacache.folders import (
    BROKEN,
    COMPLETE,
    PREFIX,
    Description,
    boot,
    enter,
    held_bytes,
    promised_bytes,
)
from datacache.frozen import Frozen, freeze
from datacache.order import Ids
from datacache.records import HEADER_BYTES

Use = Callable[[int, memoryview], None]

_PUT_SECONDS = 10.0  # that a put waits for other writers before it is given up
_REPAIRS = "repairs"

# LMDB calls a write that the filesystem cuts short for lack of room an input/output error.
_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EIO)
_STRUCTURE_ERRORS = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
)


@dataclass(frozen=True)
class Unread:
    """Positions, in the ids that were asked for, of records that were not there, or not as they were put."""

    missing: list[int]
    damaged: list[int]


class Generation:
    """The records of the sorted ``ids`` under ``root``; threads and processes may use it at the same time.

    ``fingerprint`` must tell everything that the records depend on, and which ids they are: two parts of the
    same samples are two generations. ``sizes`` are the payloads' bytes, or what to plan for them. ``note`` is
    kept with the folder for those who list it.

    Opening joins what others fill or have frozen, and drops what cannot be used: another format, damaged, or
    left unfinished before the machine started anew. Without room a new one is not made, which raises
    :class:`CacheFull`; one that others began is read, with a warning, and nothing more put. It raises
    ``PermissionError`` if the folder is not there and cannot be made, ``RuntimeError`` if another job uses
    what would have to be dropped.
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
        self._ids = ids
        self._frozen: Frozen | None = None
        self._broken = False
        self.is_full = False
        self._open(root, _describe(fingerprint, ids, sizes, dict(note or {})))

    def _open(self, root: Path, wanted: Description) -> None:
        while self._frozen is None:
            self.folder, found, descriptor = enter(root, wanted, lambda new: _create(new, wanted))
            if not (self.folder / COMPLETE).exists():
                break
            try:
                self._frozen = Frozen(self.folder)
            except Damaged as error:
                os.close(descriptor)
                _mark_broken(self.folder, error)
        if self._frozen is None:
            self.is_full = not _has_room(root, wanted)
        self._complete = str(self.folder / COMPLETE)
        self._environment = environments.hold(self.folder, found.map_bytes)
        self._leave = weakref.finalize(self, _leave, self._environment, descriptor)

    @property
    def is_frozen(self) -> bool:
        """Whether every id is in it, and it is only read."""
        return self._look() is not None

    def read_many(self, ids: Ids, use: Use) -> Unread:
        """Call ``use(position, record)`` for each record that is there, and return what was not read.

        The record is a view that may end with the call: copy what is to be kept. ``use`` raises
        :class:`Damaged` when it finds it damaged (see :func:`datacache.records.unpack`), and is called again
        if a replacement has been kept.
        """
        done = np.zeros(len(ids), bool)
        damaged: list[int] = []

        def read(position: int, record: memoryview) -> None:
            try:
                use(position, record)
                done[position] = True
            except Damaged:
                damaged.append(position)

        frozen = self._look()
        if frozen is None:
            self._read_open(ids, read)
        else:
            damaged += self._read_frozen(frozen, ids, read)
        done[damaged] = True
        missing = np.flatnonzero(~done).tolist()
        return Unread(missing, [position for position in damaged if not self._repaired(ids, position, use)])

    def put_many(self, ids: Ids, records: Sequence[bytes]) -> None:
        """Keep the records of these ids, in one transaction; those that are there stay as they are.

        Does nothing once the generation is frozen or full. Raises :class:`CacheFull` once, with nothing of
        this batch kept, when there is no more room. If another process keeps all others from writing for
        long, the batch is not kept: a cache makes nobody wait.
        """
        places = self._places(ids)
        if np.any(places < 0):
            raise ValueError(f"ids: {ids[places < 0][0]} does not belong to {self.folder}")
        if self.is_full or self._broken or self.is_frozen:
            return
        keys = _keys(ids)
        items = [(keys[position], records[position]) for position in np.argsort(ids, kind="stable").tolist()]
        try:
            self._put(items)
        except lmdb.Error as error:
            if isinstance(error, _STRUCTURE_ERRORS):
                self._give_up(error)
                return
            if not _is_full(error):
                raise
            self.is_full = True
            left = readable(free_bytes(self.folder))
            raise CacheFull(f"{self.folder}: nothing more is kept here ({left} left): {error}") from error

    def freeze(self) -> bool:
        """Sync and freeze it if every id is in it and no other process is at it; return whether it is frozen.

        On a disk this may take as long as writing what the system has not written yet.
        """
        if self.is_frozen:
            return True
        if self._broken or self.stored() < len(self._ids):
            return False
        with self._environment.alone(timeout_seconds=0.0) as environment:
            if environment is None or self.is_frozen:
                return self.is_frozen
            try:
                environment.sync(True)
                freeze(self.folder, self._ids, environment.stat()["psize"])
            except (lmdb.Error, Damaged, OSError) as error:
                if isinstance(error, lmdb.Error | Damaged):
                    self._give_up(error)
                return False
        return self.is_frozen

    def replace(self, ids: Ids, records: Sequence[bytes]) -> None:
        """Keep records beside those that were found damaged; without room for them nothing is kept."""
        try:
            folder = self.folder / _REPAIRS
            folder.mkdir(exist_ok=True)
            for key, record in zip(ids.tolist(), records, strict=True):
                aside = folder / f".{key}-{secrets.token_hex(4)}"
                aside.write_bytes(record)
                aside.rename(folder / str(key))
        except OSError as error:
            warnings.warn(f"{self.folder}: repaired records cannot be kept: {error}", stacklevel=2)

    def stored(self) -> int:
        """Return how many of the ids are in it."""
        if self.is_frozen:
            return len(self._ids)
        with self._environment.read() as transaction:
            return int(transaction.stat()["entries"])

    def missing_ids(self) -> Ids:
        """Return the ids that are not in it."""
        if self.is_frozen:
            return self._ids[:0]
        with self._environment.read() as transaction:
            keys = b"".join(transaction.cursor().iternext(keys=True, values=False))
        return np.setdiff1d(self._ids, np.frombuffer(keys, ">i8"), assume_unique=True)

    def close(self) -> None:
        """Give it back. Threads that are reading still get what they read."""
        self._leave()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _look(self) -> Frozen | None:
        """Return the frozen records, also when another process has frozen them since the last look."""
        if self._frozen is None and not self._broken and os.path.exists(self._complete):
            try:
                self._frozen = Frozen(self.folder)
            except Damaged as error:
                self._give_up(error)
        return self._frozen

    def _read_frozen(self, frozen: Frozen, ids: Ids, read: Use) -> list[int]:
        """Read what belongs here; return the positions that the disk cannot read."""
        unreadable = []
        for position, place in enumerate(self._places(ids).tolist()):
            if place < 0:
                continue
            try:
                record = frozen.record(place)
            except Damaged:
                unreadable.append(position)
            else:
                read(position, record)
        return unreadable

    def _read_open(self, ids: Ids, read: Use) -> None:
        if self._broken:
            return
        keys = _keys(ids)
        try:
            with self._environment.read() as transaction:
                position = 0
                for key, record in transaction.cursor().getmulti(keys):
                    while keys[position] != key:
                        position += 1
                    read(position, memoryview(record))
                    position += 1
        except _STRUCTURE_ERRORS as error:
            self._give_up(error)

    def _put(self, items: list[tuple[bytes, bytes]]) -> None:
        with self._environment.alone(_PUT_SECONDS) as environment:
            if environment is None:
                warnings.warn(f"{self.folder}: another process keeps all others from writing", stacklevel=3)
                return
            if self.is_frozen:
                return
            environment.reader_check()  # a killed reader keeps pages from being used again
            with environment.begin(write=True) as transaction:
                transaction.cursor().putmulti(items, overwrite=False)

    def _repaired(self, ids: Ids, position: int, use: Use) -> bool:
        """Use what was put instead of a damaged record; tell whether that went well."""
        try:
            use(position, memoryview((self.folder / _REPAIRS / str(ids[position])).read_bytes()))
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

    def _give_up(self, error: Exception) -> None:
        """Put nothing more into an environment that is damaged; it is dropped when it is next opened."""
        if not self._broken:
            self._broken = True
            with contextlib.suppress(OSError):
                _mark_broken(self.folder, error)


def _describe(fingerprint: str, ids: Ids, sizes: npt.NDArray[np.int64], note: dict[str, Any]) -> Description:
    expected = lmdb_bytes(np.asarray(sizes, np.int64) + HEADER_BYTES)
    return Description(
        fingerprint=fingerprint,
        samples=len(ids),
        ids=xxh3_128_hexdigest(ids.astype("<i8").tobytes()),
        expected_bytes=expected,
        map_bytes=2 * expected + (1 << 28),  # only addresses; the sizes may have been estimates
        note=note,
        boot=boot(),
    )


def _check_room(root: Path, wanted: Description) -> None:
    folder = root / (PREFIX + wanted.fingerprint)
    needed = wanted.expected_bytes + environments.LOCK_FILE_BYTES - held_bytes(folder)
    if needed > 0:
        check_room(root, needed + promised_bytes(root, but=folder), f"{wanted.samples} samples")


def _has_room(root: Path, wanted: Description) -> bool:
    try:
        _check_room(root, wanted)
    except CacheFull as error:
        warnings.warn(f"what is there is read, and nothing more kept: {error}", stacklevel=4)
        return False
    return True


def _create(folder: Path, wanted: Description) -> None:
    _check_room(folder.parent, wanted)
    try:
        environments.create(folder, wanted.map_bytes)
    except (lmdb.Error, OSError) as error:
        if _is_full(error):
            raise CacheFull(f"{folder.parent}: no room for an empty cache: {error}") from error
        raise


def _mark_broken(folder: Path, error: Exception) -> None:
    warnings.warn(f"{folder}: damaged, to be made anew at the next start: {error}", stacklevel=3)
    (folder / BROKEN).touch()


def _leave(environment: environments.Environment, descriptor: int) -> None:
    environments.release(environment)
    os.close(descriptor)


def _keys(ids: Ids) -> list[bytes]:
    packed = ids.astype(">i8").tobytes()
    return [packed[start : start + 8] for start in range(0, len(packed), 8)]


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL_ERRORS
    if isinstance(error, lmdb.MapFullError | lmdb.DiskError):
        return True
    return any(os.strerror(number) in str(error) for number in _FULL_ERRORS)
