"""The two files of a generation that is being filled: records, and a log of where they are.

Whoever holds the lock of the writers appends records to the one file, then an entry for each of them to the
other: 32 bytes with a checksum, seeded with the generation. Who reads looks for new entries first, without
any lock. What a killed process was writing no whole entry names, and the next one writes over it.

Nothing is mapped into memory: under a mapping, a file that was cut short or a disk that cannot read ends the
process; a read gives an error.
"""

import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from datacache.errors import Damaged
from datacache.order import Ids
from datacache.store.private import open_file

RECORDS, LOG = "records", "log"
ENTRY = np.dtype([("key", "<i8"), ("start", "<i8"), ("bytes", "<i8"), ("check", "<u8")])

_CHECKED_BYTES = 24  # of an entry: all but its checksum
_LOOKS, _BETWEEN_SECONDS = 5, 0.01  # at an entry that is not whole: it may be just being written

Entries = npt.NDArray[np.void]


class RecordFile:
    """The file of records; any number of threads and processes read it. Closed when the last has left."""

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        self.path = path
        self.descriptor = _opened(path, flags)
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, start: int, size: int) -> memoryview:
        """Return ``size`` bytes from ``start`` on; :class:`Damaged` where there are none to be read."""
        try:
            found = os.pread(self.descriptor, size, start)
        except OSError as error:
            raise Damaged(f"{self.path}: {size} bytes at {start} cannot be read: {error}") from error
        if len(found) != size:
            raise Damaged(f"{self.path}: expected {size} bytes at {start}, got {len(found)}")
        return memoryview(found)

    def length(self) -> int:
        """Return how many bytes the file has."""
        return os.fstat(self.descriptor).st_size

    def is_at_its_path(self) -> bool:
        """ProgressCallback whether it has not been removed or replaced since it was opened."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.lstat(self.path))
        except OSError:
            return False


class Log:
    """Entries of records, one after the other."""

    def __init__(self, path: Path, seed: int, flags: int = os.O_RDONLY) -> None:
        self._file, self._seed = RecordFile(path, flags), seed

    def entries(self, start: int = 0) -> Entries:
        """Return the entries from a byte on; :class:`Damaged` if they are not what was written."""
        for _ in range(_LOOKS):
            size = self._file.length() // ENTRY.itemsize * ENTRY.itemsize - start
            if size < 0:
                raise Damaged(f"{self._file.path}: expected at least {start} bytes, got {start + size}")
            content = self._file.read(start, size)
            entries = np.frombuffer(content, ENTRY)
            if np.array_equal(_checks(content, self._seed), entries["check"]):
                return entries
            time.sleep(_BETWEEN_SECONDS)
        raise Damaged(f"{self._file.path}: entries from byte {start} on are not what was written")

    def write(self, entries: Entries, start: int) -> None:
        """Write entries from a byte on; the caller keeps other writers away."""
        content = bytearray(entries.tobytes())
        checks = _checks(memoryview(content), self._seed)
        np.frombuffer(content, ENTRY)["check"][:] = checks
        write_at(self._file.descriptor, content, start)

    def sync(self) -> None:
        """Make durable what was written."""
        os.fsync(self._file.descriptor)


@dataclass(frozen=True)
class _Known:
    """How far the log was read, in bytes, and how far its entries reach in the file of records."""

    log_bytes: int = 0
    records_bytes: int = 0


class Store:
    """The records of the sorted ``ids`` in a folder, some there and some not yet; for threads and processes.

    Raises :class:`Damaged` at opening if the files are not there, or not what was written.
    """

    def __init__(self, folder: Path, ids: Ids, seed: int) -> None:
        self._ids = ids
        self._records = RecordFile(folder / RECORDS, os.O_RDWR)
        self._log = Log(folder / LOG, seed, os.O_RDWR)
        self._starts, self._sizes = np.full(len(ids), -1), np.zeros(len(ids), np.int64)
        self._known = _Known()
        known = self.refresh()
        if self._records.length() < known.records_bytes:
            raise Damaged(
                f"{folder / RECORDS}: expected {known.records_bytes} bytes, got {self._records.length()}"
            )

    def refresh(self) -> "_Known":
        """Take notice of what others have put, and return how far that goes.

        Threads may do it at once, without a lock, which a fork could leave locked: each does the same, and
        one that falls behind costs the next a second look at some entries.
        """
        known = self._known
        entries = self._log.entries(known.log_bytes)
        if len(entries) == 0:
            return known
        places = np.searchsorted(self._ids, entries["key"])
        if np.any(places == len(self._ids)) or np.any(self._ids[places] != entries["key"]):
            raise Damaged(f"{self._records.path}: the log has entries of ids that do not belong here")
        self._sizes[places] = entries["bytes"]
        self._starts[places] = entries["start"]  # last: from now on others read it
        end = int((entries["start"] + entries["bytes"]).max())
        known = _Known(known.log_bytes + entries.nbytes, max(known.records_bytes, end))
        self._known = known
        return known

    def record(self, place: int) -> memoryview | None:
        """Return the record of the ``place``-th id, ``None`` if it is not there.

        Raises :class:`Damaged` if it cannot be read.
        """
        start = self._starts.item(place)
        return None if start < 0 else self._records.read(start, self._sizes.item(place))

    def missing(self) -> npt.NDArray[np.bool_]:
        """Return for each id whether its record is not there."""
        return self._starts < 0

    def append(self, places: Ids, records: Sequence[bytes]) -> None:
        """Write the records that are not there; the caller keeps other writers away.

        What an ``OSError`` stops is not there, or whole.
        """
        known = self.refresh()
        new = {place: each for place, each in zip(places.tolist(), records, strict=True)}
        new = {place: new[place] for place in sorted(new) if self._starts[place] < 0}
        if not new:
            return
        entries = np.zeros(len(new), ENTRY)
        entries["key"] = self._ids[list(new)]
        entries["bytes"] = [len(record) for record in new.values()]
        entries["start"] = known.records_bytes + np.cumsum(entries["bytes"]) - entries["bytes"]
        try:
            write_at(self._records.descriptor, b"".join(new.values()), known.records_bytes)
        except OSError:
            os.ftruncate(
                self._records.descriptor, known.records_bytes
            )  # no entry leads there; it may be the last room
            raise
        self._log.write(entries, known.log_bytes)
        self.refresh()

    def is_at_its_path(self) -> bool:
        """ProgressCallback whether what is written here is what others find."""
        return self._records.is_at_its_path()

    def seal(self) -> npt.NDArray[np.int64]:
        """Make all durable that is there, and return starts and sizes, shape ``(2, ids)``.

        The caller keeps writers away.
        """
        os.ftruncate(
            self._records.descriptor, self.refresh().records_bytes
        )  # what killed processes were writing
        os.fsync(self._records.descriptor)
        self._log.sync()
        return np.stack([self._starts, self._sizes])


def all_entries(folder: Path, seed: int) -> Entries:
    """Return the entries of a generation that is being filled, whatever its ids are."""
    return Log(folder / LOG, seed).entries()


def write_at(descriptor: int, content: bytes | bytearray, start: int) -> None:
    """Write all of ``content``, or raise an ``OSError``."""
    left = memoryview(content)
    while left:
        written = os.pwrite(descriptor, left, start)
        left, start = left[written:], start + written


def _checks(content: memoryview, seed: int) -> npt.NDArray[np.uint64]:
    starts = range(0, len(content), ENTRY.itemsize)
    checks = (xxh3_64_intdigest(content[start : start + _CHECKED_BYTES], seed) for start in starts)
    return np.fromiter(checks, np.uint64, len(starts))


def _opened(path: Path, flags: int) -> int:
    try:
        return open_file(path, flags)
    except FileNotFoundError as error:
        raise Damaged(f"{path}: not there") from error
