"""The files of a record store: ``records`` and ``log`` while it is filled, ``index`` once it is sealed.

datacache/README.md describes them. A writer, under the lock ``writer``, appends records to ``records``, then
one entry a record to ``log``. Readers take no lock: they read the new entries of the log first. Sealing syncs
``records``, writes ``index`` and last ``COMPLETE``. From then on damage to ``records`` can only damage the
records that it hits.
"""

import ctypes
import os
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import config, types
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from datacache.batches import Pools
from datacache.errors import Damaged
from datacache.order import Flags, Ids, compiled
from datacache.store.files import open_file, read_file, write_atomic
from datacache.store.folders import COMPLETE, FORMAT, is_at, read_facts, write_facts
from datacache.store.records import Bytes, Record, bytes_of

RECORDS, LOG, INDEX = "records", "log", "index"
ENTRY = np.dtype([("key", "<i8"), ("start", "<i8"), ("bytes", "<i8"), ("check", "<u8")])

_MOST_BUFFERS = os.sysconf("SC_IOV_MAX")  # of one call of pwritev
_CHECKED_BYTES = 24  # of an entry: all but its checksum
_ATTEMPTS, _PAUSE_SECONDS = 5, 0.01  # to read an entry that is incomplete: it may be being written

Entries = npt.NDArray[np.void]

# Called by compiled code: threads that read a batch would else pass the GIL to each other at every record.
_SIGNATURE = types.intp(types.intc, types.intp, types.intp, types.int64)
_pread: Any = types.ExternalFunction("pread", _SIGNATURE)
if config.DISABLE_JIT:  # type: ignore[attr-defined]  # Numba sets it from the environment
    _types = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int64)
    _pread = ctypes.CFUNCTYPE(*_types)(("pread", ctypes.CDLL(None)))


@compiled
def _read(descriptor: int, starts: Ids, stops: Ids, into: Bytes) -> Ids:
    """Read the bytes from each start on into ``into``, one after the other up to ``stops``.

    Returns where each ends: before its stop if it cannot be read, or the file is shorter.
    """
    ends, end, address = np.empty(len(starts), np.int64), 0, into.ctypes.data
    for i in range(len(starts)):
        begin = end = stops[i - 1] if i else 0
        while end < stops[i]:
            count = _pread(descriptor, address + end, stops[i] - end, starts[i] + end - begin)
            if count <= 0:
                break
            end += count
        ends[i] = end
    return ends


class RecordFile:
    """An open file, read by any number of threads and processes; closed when the object is collected."""

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        self.path = path
        try:
            self.descriptor = open_file(path, flags)
        except FileNotFoundError as error:
            raise Damaged(f"{path}: not there") from error
        self._pools = Pools()
        weakref.finalize(self, os.close, self.descriptor)

    def read_many(self, starts: Ids, sizes: Ids) -> list[Bytes]:
        """Return so many bytes from each start on, fewer where they cannot be read.

        All are views of one array, which is used again when no view refers to it any more.
        """
        stops = np.cumsum(sizes)
        into = self._pools.take_bytes(int(sizes.sum()))
        ends = _read(self.descriptor, starts, stops, into)
        return [into[begin:end] for begin, end in zip((stops - sizes).tolist(), ends.tolist(), strict=True)]

    def read(self, start: int, size: int) -> memoryview:
        """Return ``size`` bytes from ``start`` on; :class:`Damaged` if they cannot be read."""
        try:
            found = os.pread(self.descriptor, size, start)
        except OSError as error:
            raise Damaged(f"{self.path}: {size} bytes at {start} cannot be read: {error}") from error
        if len(found) != size:
            raise Damaged(f"{self.path}: expected {size} bytes at {start}, got {len(found)}")
        return memoryview(found)

    def write(self, parts: Iterable[bytes | memoryview], start: int) -> None:
        """Write all parts, one after the other, from ``start`` on, or raise an ``OSError``."""
        left = deque(parts)
        while left:
            written = os.pwritev(self.descriptor, list(islice(left, _MOST_BUFFERS)), start)
            start += written
            while left and written >= (size := memoryview(left[0]).nbytes):
                left.popleft()
                written -= size
            if written:
                left[0] = memoryview(left[0]).cast("B")[written:]

    def length(self) -> int:
        """Return the number of bytes of the file."""
        return os.fstat(self.descriptor).st_size


def read_log(log: RecordFile, seed: int, start: int = 0) -> Entries:
    """Return the entries from byte ``start`` on, as added; :class:`Damaged` if a checksum does not match."""
    for _ in range(_ATTEMPTS):
        size = log.length() // ENTRY.itemsize * ENTRY.itemsize - start
        if size < 0:
            raise Damaged(f"{log.path}: expected at least {start} bytes, got {start + size}")
        content = log.read(start, size)
        entries = np.frombuffer(content, ENTRY)
        if np.array_equal(_checks(content, seed), entries["check"]):
            return entries
        time.sleep(_PAUSE_SECONDS)
    raise Damaged(f"{log.path}: entries from byte {start} on are not what was written")


@dataclass(frozen=True)
class _Read:
    """How much of the log was read, in bytes, and where its records end in the file of records."""

    log_bytes: int = 0
    records_bytes: int = 0


class _Store:
    """The records of a store, by row: the position of an id among those of the store."""

    file: RecordFile
    starts: Ids  # in the file; −1: missing
    sizes: Ids

    def records(self, rows: Ids) -> list[Bytes | None]:
        """Return the record of each row, cut short where it cannot be read; ``None`` if it is missing."""
        starts = self.starts[rows]  # before the sizes: a refresh sets the starts last
        there = starts >= 0
        found = iter(self.file.read_many(starts[there], self.sizes[rows[there]]))
        return [next(found) if each else None for each in there.tolist()]

    def missing(self) -> Flags:
        """Return for each id whether its record is missing."""
        return self.starts < 0


class UnsealedStore(_Store):
    """The files of a store of the sorted ``ids`` that is being filled; for any threads and processes.

    Raises :class:`Damaged` if the files are missing, or not what was written.
    """

    def __init__(self, folder: Path, ids: Ids, seed: int) -> None:
        self._ids, self._seed = ids, seed
        self.file = RecordFile(folder / RECORDS, os.O_RDWR)
        self._log = RecordFile(folder / LOG, os.O_RDWR)
        self.starts, self.sizes = np.full(len(ids), -1), np.zeros(len(ids), np.int64)
        self._read = _Read()
        read = self.refresh()
        if self.file.length() < read.records_bytes:
            raise Damaged(
                f"{folder / RECORDS}: expected {read.records_bytes} bytes, got {self.file.length()}"
            )

    def refresh(self) -> _Read:
        """Read the new entries of the log; return how far it has been read.

        Threads may do so at the same time, without a lock, which a fork could leave locked: they all store
        the same values, and one that falls behind makes the next read some entries twice.
        """
        read = self._read
        entries = read_log(self._log, self._seed, read.log_bytes)
        if len(entries) == 0:
            return read
        rows = np.searchsorted(self._ids, entries["key"])
        if np.any(rows == len(self._ids)) or np.any(self._ids[rows] != entries["key"]):
            raise Damaged(f"{self.file.path}: the log has entries of ids that do not belong here")
        self.sizes[rows] = entries["bytes"]
        self.starts[rows] = entries["start"]  # last: from now on other threads read the record
        end = int((entries["start"] + entries["bytes"]).max())
        self._read = read = _Read(read.log_bytes + entries.nbytes, max(read.records_bytes, end))
        return read

    def append(self, rows: Ids, records: Sequence[Record]) -> None:
        """Write missing records under the writers' lock; after an ``OSError`` each is missing or complete."""
        read = self.refresh()
        new = {row: each for row, each in zip(rows.tolist(), records, strict=True)}
        new = {row: new[row] for row in sorted(new) if self.starts[row] < 0}
        if not new:
            return
        entries = np.zeros(len(new), ENTRY)
        entries["key"] = self._ids[list(new)]
        entries["bytes"] = [bytes_of(record) for record in new.values()]
        entries["start"] = read.records_bytes + np.cumsum(entries["bytes"]) - entries["bytes"]
        try:
            self.file.write(chain.from_iterable(new.values()), read.records_bytes)
        except OSError:
            # No entry refers to these bytes; they may fill the disk.
            os.ftruncate(self.file.descriptor, read.records_bytes)
            raise
        entries["check"] = _checks(memoryview(entries.tobytes()), self._seed)
        self._log.write([entries.tobytes()], read.log_bytes)
        self.refresh()

    def is_at_its_path(self) -> bool:
        """Return whether what is written here is what other processes read."""
        return is_at(self.file.descriptor, self.file.path)

    def seal(self, folder: Path) -> None:
        """Sync all records, write their index, and last ``COMPLETE``; the caller holds the writers' lock."""
        end = self.refresh().records_bytes
        os.ftruncate(self.file.descriptor, end)  # cuts off the incomplete records of killed processes
        os.fsync(self.file.descriptor)
        os.fsync(self._log.descriptor)
        index = np.stack([self.starts, self.sizes]).astype("<i8").tobytes()
        write_atomic(folder / INDEX, index)
        digest = xxh3_128_hexdigest(index)
        complete = {"samples": len(self._ids), "end": end, "index": digest, "format": FORMAT}
        write_facts(folder / COMPLETE, complete, self._seed)


class SealedStore(_Store):
    """The files of a store that has all its records and never changes; for any threads, without locks.

    Raises :class:`Damaged` if a file is missing, or not what was written.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        complete = read_facts(folder / COMPLETE, seed)
        if complete.get("format") != FORMAT:
            raise Damaged(f"{folder / COMPLETE}: expected format {FORMAT}, got {complete.get('format')}")
        try:
            index = read_file(folder / INDEX)
        except FileNotFoundError:
            index = b""
        if xxh3_128_hexdigest(index) != complete["index"] or len(index) != 16 * complete["samples"]:
            raise Damaged(f"{folder / INDEX}: not what was written")
        self.starts, self.sizes = np.frombuffer(index, "<i8").reshape(2, -1)
        self.file = RecordFile(folder / RECORDS)
        if self.file.length() != complete["end"]:
            raise Damaged(f"{folder / RECORDS}: expected {complete['end']} bytes, got {self.file.length()}")

    def __len__(self) -> int:
        return len(self.starts)


def _checks(content: memoryview, seed: int) -> npt.NDArray[np.uint64]:
    starts = range(0, len(content), ENTRY.itemsize)
    checks = (xxh3_64_intdigest(content[start : start + _CHECKED_BYTES], seed) for start in starts)
    return np.fromiter(checks, np.uint64, len(starts))
