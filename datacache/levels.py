"""Reads through the levels: from memory, else disk, else central storage; misses fill the levels."""

import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from datacache.batches import Sample
from datacache.capacity import existing
from datacache.errors import BadSample, CacheFull
from datacache.escaping import escaped
from datacache.manifest import Manifest
from datacache.order import Ids
from datacache.preprocessing import Preprocessing
from datacache.sources import Source
from datacache.store.files import check_folder
from datacache.store.folders import add_read_counts
from datacache.store.record_store import Misses, RecordCallback, RecordStore
from datacache.store.records import Bytes, Record, pack, seed_of, unpack

STAND_INS = 32  # samples of a label that are tried in place of one that cannot be decoded


@dataclass(frozen=True)
class CacheDirs:
    """Folders that the ranks of a node share; ``None``: the level is not used.

    ``disk``: level 1, samples as central storage has them. ``memory``: level 2, pre-processed samples, in a
    tmpfs such as ``/dev/shm``. ``warns_when_full``: whether this process warns if there is no room, once for
    each filesystem and all caches that share this object; set it on one rank of each node.
    """

    disk: Path | None = None
    memory: Path | None = None
    warns_when_full: bool = True
    _full: set[int] = field(default_factory=set, init=False, repr=False, compare=False)

    def check(self) -> None:
        """Raise :class:`datacache.errors.Untrusted` if another user owns a folder, or may write to it."""
        for folder in (self.disk, self.memory):
            if folder is not None:
                check_folder(folder)

    def warn_full(self, folder: Path, message: str) -> None:
        """Warn that there is no room in a folder, once for each filesystem."""
        device = existing(folder).stat().st_dev
        if self.warns_when_full and device not in self._full:
            warnings.warn(message, stacklevel=5)
        self._full.add(device)


@dataclass
class Counts:
    """Samples that this rank has read so far, by where they were found, and the faulty ones."""

    memory: int = 0
    disk: int = 0
    storage: int = 0
    storage_bytes: int = 0
    remote: int = 0
    """Exchanged samples, which other nodes sent for an epoch."""
    damaged_in_memory: int = 0
    damaged_on_disk: int = 0
    stand_ins: dict[int, int] = field(default_factory=dict)
    """For each sample that cannot be decoded, the sample of the same label that is read in its place."""


class Level:
    """A store of records of the ids of ``part``. If it fails, reads go on without it, after one warning.

    ``store`` is ``None`` without a folder or room, if it cannot be opened, and after ``close``.
    """

    def __init__(
        self,
        dirs: CacheDirs,
        folder: Path | None,
        fingerprint: str,
        part: Ids,
        sizes: npt.NDArray[np.int64],
        note: Mapping[str, Any],
    ) -> None:
        self._dirs = dirs
        self.store: RecordStore | None = None
        self.seed = seed_of(fingerprint)  # of the checksums of its records
        self._requested = self._found = 0
        self._counting = threading.Lock()
        if folder is None or len(part) == 0:
            return
        try:
            self.store = RecordStore(folder, fingerprint, part, sizes, note=note)
            self.store.seal()  # a killed process may have filled it, but not sealed it
            if self.store.no_room is not None:
                message = f"samples that are stored are read, no more are stored: {self.store.no_room}"
                dirs.warn_full(folder, message)
        except CacheFull as error:
            dirs.warn_full(folder, f"level {note['level']} of the cache is not used: {error}")
        except (OSError, RuntimeError) as error:
            warnings.warn(f"level {note['level']} of the cache is not used: {error}", stacklevel=3)

    def read(self, ids: Ids, use: RecordCallback) -> Misses:
        """Give the stored records of ids to ``use``; return the positions that are missing or damaged."""
        store = self.store  # another thread may close the level
        if store is None:
            return Misses(list(range(len(ids))), [])
        misses = store.read_many(ids, use)
        with self._counting:
            self._requested += len(ids)
            self._found += len(ids) - len(misses.missing) - len(misses.damaged)
        return misses

    def put(self, ids: Ids, misses: Misses, records: Mapping[int, Record]) -> None:
        """Store the records of the misses, by position in ``ids``."""
        store = self.store
        if store is None:
            return
        damaged, missing = (np.array(each, np.int64) for each in (misses.damaged, misses.missing))
        missing = missing[store.includes(ids[missing])]
        if len(damaged):
            store.replace(ids[damaged], [records[position] for position in damaged.tolist()])
        if len(missing):
            try:
                store.put_many(ids[missing], [records[position] for position in missing.tolist()])
                store.seal()
            except CacheFull as error:
                self._dirs.warn_full(store.folder, str(error))

    def close(self) -> None:
        """Release the store and its files, and record how many samples were requested and found."""
        store, self.store = self.store, None
        if store is not None:
            with self._counting:
                add_read_counts(store.folder, self._requested, self._found)
                self._requested = self._found = 0
            store.close()


class Levels:
    """The pre-processed samples of a source on one node. Threads may read at the same time.

    ``part``: the ids, ascending, that the node stores; other samples can be read, but are not stored.
    """

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        preprocessing: Preprocessing,
        part: Ids,
        dirs: CacheDirs,
    ) -> None:
        self.counts = Counts()
        self.remote: dict[int, Sample] = {}  # the samples of other nodes, by id, held for an epoch
        self._counting = threading.Lock()
        self._source, self._manifest, self._preprocessing = source, manifest, preprocessing
        encoded = xxh3_128_hexdigest(manifest.fingerprint.encode() + part.astype("<i8").tobytes())
        prepared = xxh3_128_hexdigest(f"{encoded} {preprocessing.fingerprint}".encode())
        note = {"manifest": manifest.fingerprint, "samples of the source": len(manifest)}
        dirs.check()
        self.disk = Level(dirs, dirs.disk, encoded, part, manifest.sizes[part], {"level": 1, **note})
        planned = manifest.sizes[part]
        if dirs.memory is not None:
            planned = preprocessing.planned_bytes(planned, manifest.shape)
        note |= {"preprocessing": preprocessing.fingerprint}
        self.memory = Level(dirs, dirs.memory, prepared, part, planned, {"level": 2, **note})

    def read(self, ids: Ids) -> list[Sample]:
        """Return pre-processed samples, in the order of ``ids``.

        Samples that were not in memory are stored there. Raises what the source raises if it cannot be
        read, and :class:`BadSample` if neither a sample nor others of its label can be decoded.
        """
        remote = [self.remote.get(number) for number in ids.tolist()] if self.remote else []
        if not any(sample is not None for sample in remote):
            return self._read_own(ids)
        own = iter(self._read_own(ids[[sample is None for sample in remote]]))
        self._count(remote=sum(sample is not None for sample in remote))
        return [next(own) if sample is None else sample for sample in remote]

    def _read_own(self, ids: Ids) -> list[Sample]:
        samples: dict[int, Sample] = {}

        def use(position: int, record: Bytes) -> None:
            payload, shape = unpack(int(ids[position]), record, seed=self.memory.seed)
            if len(shape) == 4:  # the last number is the id of the stand-in
                self._note_stand_in(int(ids[position]), shape[3])
            samples[position] = payload.reshape(shape[:3])

        misses = self.memory.read(ids, use)
        positions = np.array(sorted([*misses.missing, *misses.damaged]), np.int64)
        self._count(memory=len(ids) - len(positions), damaged_in_memory=len(misses.damaged))
        if len(positions):
            prepared = dict(zip(positions.tolist(), self._prepare(ids[positions]), strict=True))
            samples |= {position: sample for position, (sample, _) in prepared.items()}
            records = {position: record for position, (_, record) in prepared.items()}
            self.memory.put(ids, misses, records)
        return [samples[position] for position in range(len(ids))]

    def payloads(self, ids: Ids) -> list[bytes]:
        """Return samples as central storage has them; those that were not on disk are stored there."""
        found: dict[int, bytes] = {}

        def use(position: int, record: Bytes) -> None:
            found[position] = unpack(int(ids[position]), record, seed=self.disk.seed)[0].tobytes()

        misses = self.disk.read(ids, use)
        positions = np.array(sorted([*misses.missing, *misses.damaged]), np.int64)
        self._count(disk=len(ids) - len(positions), damaged_on_disk=len(misses.damaged))
        if len(positions):
            fetched = self._source.read(self._manifest, ids[positions])
            self._count(storage=len(fetched), storage_bytes=sum(map(len, fetched)))
            found |= dict(zip(positions.tolist(), fetched, strict=True))
            seed = self.disk.seed
            records = {each: pack(int(ids[each]), found[each], seed=seed) for each in positions.tolist()}
            self.disk.put(ids, misses, records)
        return [found[position] for position in range(len(ids))]

    def missing(self) -> Ids:
        """Return the ids that the highest level in use does not have yet; none without levels."""
        level = self.memory.store or self.disk.store
        return np.empty(0, np.int64) if level is None else level.missing_ids()

    def fill(self, ids: Ids) -> int:
        """Store these samples in the levels in use; return how many were read."""
        return len(self.payloads(ids) if self.memory.store is None else self.read(ids))

    def close(self) -> None:
        """Release both stores."""
        self.memory.close()
        self.disk.close()

    def _prepare(self, ids: Ids) -> list[tuple[Sample, Record]]:
        """Return pre-processed samples and their records."""
        prepared = []
        for number, payload in zip(ids.tolist(), self.payloads(ids), strict=True):
            try:
                sample, stand_in = self._decoded(payload), list[int]()
            except BadSample as error:
                sample, stand_in = self._stand_in(number, error)
            pixels, shape = np.ascontiguousarray(sample).data, (*sample.shape, *stand_in)
            prepared.append((sample, pack(number, pixels, shape, seed=self.memory.seed)))
        return prepared

    def _decoded(self, payload: bytes) -> Sample:
        return self._preprocessing.apply(payload, self._manifest.shape or ())

    def _stand_in(self, number: int, reason: BadSample) -> tuple[Sample, list[int]]:
        """Return the next sample of the same label, in the order of ids, that can be decoded, and its id."""
        labels = self._manifest.labels
        alike = np.flatnonzero(labels == labels[number])
        others = np.roll(alike, -1 - int(np.searchsorted(alike, number)))[:-1]
        for other in others[:STAND_INS].tolist():
            try:
                sample = self._decoded(self.payloads(np.array([other]))[0])
            except BadSample:
                continue
            self._note_stand_in(number, other)
            return sample, [other]
        name = self._manifest.files[int(self._manifest.file[number])]
        raise BadSample(f"sample {number} ({name}): {reason}; nor can others of label {labels[number]}")

    def _note_stand_in(self, number: int, other: int) -> None:
        with self._counting:
            self.counts.stand_ins[number] = other

    def _count(self, **amounts: int) -> None:
        with self._counting:
            for name, amount in amounts.items():
                setattr(self.counts, name, getattr(self.counts, name) + amount)


def stand_in_lines(manifest: Manifest, stand_ins: Sequence[Mapping[int, int]]) -> list[str]:
    """Return a line for each sample that any rank could not decode, in the order of their ids."""
    merged = {number: other for each in stand_ins for number, other in each.items()}

    def named(number: int) -> str:
        return f"{escaped(manifest.files[int(manifest.file[number])])} (sample {number})"

    pairs = sorted(merged.items())
    return [f"{named(number)} cannot be decoded: {named(other)} stood in" for number, other in pairs]
