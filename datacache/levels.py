"""Samples through the levels: from memory, else from disk, else from central storage, and kept on the way."""

import random
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from datacache.capacity import existing
from datacache.errors import BadSample, CacheFull
from datacache.escaping import escaped
from datacache.manifest import Manifest
from datacache.order import Ids
from datacache.preprocessing import Preprocessing
from datacache.sources import Source
from datacache.store.folders import note_reads
from datacache.store.private import check_folder
from datacache.store.record_store import Misses, RecordStore, Use
from datacache.store.records import pack, seed_of, unpack

Sample = npt.NDArray[np.uint8]
STAND_INS = 32  # samples of a label that are tried in the place of one that cannot be decoded


@dataclass(frozen=True)
class CacheDirs:
    """Folders in which the ranks of a node keep samples together; ``None``: they do not.

    ``disk``: level 1, samples as central storage has them. ``memory``: level 2, pre-processed ones, in a
    tmpfs such as ``/dev/shm``. ``says_when_full``: whether this process warns where there is no room, once a
    filesystem for all caches that are given the same object; of the ranks of a node one should.
    """

    disk: Path | None = None
    memory: Path | None = None
    says_when_full: bool = True
    _full: set[int] = field(default_factory=set, init=False, repr=False, compare=False)

    def check(self) -> None:
        """Raise :class:`datacache.errors.Untrusted` if another user made a folder, or may change it."""
        for folder in (self.disk, self.memory):
            if folder is not None:
                check_folder(folder)

    def warn_full(self, folder: Path, message: str) -> None:
        """Warn that there is no room in a folder, unless that has been said of its filesystem."""
        device = existing(folder).stat().st_dev
        if self.says_when_full and device not in self._full:
            warnings.warn(message, stacklevel=5)
        self._full.add(device)


@dataclass
class Counts:
    """Samples that this rank has read so far, by where they were, and what was wrong with some."""

    memory: int = 0
    disk: int = 0
    storage: int = 0
    storage_bytes: int = 0
    remote: int = 0
    """By other nodes, for an epoch."""
    damaged_in_memory: int = 0
    damaged_on_disk: int = 0
    stand_ins: dict[int, int] = field(default_factory=dict)
    """For each sample that cannot be decoded, the one of the same label that is read in its place."""


class Level:
    """A record store of the ids of ``part``, or nothing where there is no folder or no room for it.

    Nothing that goes wrong with it stops anybody: it is done without, with one warning.
    """

    def __init__(
        self,
        places: CacheDirs,
        folder: Path | None,
        fingerprint: str,
        part: Ids,
        sizes: npt.NDArray[np.int64],
        note: Mapping[str, Any],
    ) -> None:
        self._places = places
        self.generation: RecordStore | None = None
        self.seed = seed_of(fingerprint)
        """Of the checksums of its records."""
        self._asked = self._found = 0
        self._counting = threading.Lock()
        if folder is None or len(part) == 0:
            return
        try:
            self.generation = RecordStore(folder, fingerprint, part, sizes, note=note)
            self.generation.seal()  # what a killed process has filled, but not sealed
            if self.generation.no_room is not None:
                message = f"what is there is read, and nothing more kept: {self.generation.no_room}"
                places.warn_full(folder, message)
        except CacheFull as error:
            places.warn_full(folder, f"level {note['level']} of the cache is done without: {error}")
        except (OSError, RuntimeError) as error:
            warnings.warn(f"level {note['level']} of the cache is done without: {error}", stacklevel=3)

    def read(self, ids: Ids, use: Use) -> Misses:
        """See :meth:`RecordStore.read_many`."""
        if self.generation is None:
            return Misses(list(range(len(ids))), [])
        misses = self.generation.read_many(ids, use)
        with self._counting:
            self._asked += len(ids)
            self._found += len(ids) - len(misses.missing) - len(misses.damaged)
        return misses

    def keep(self, ids: Ids, misses: Misses, records: Mapping[int, bytes]) -> None:
        """Keep the records of what was missed, by position in ``ids``."""
        if self.generation is None:
            return
        damaged, missing = (np.array(each, np.int64) for each in (misses.damaged, misses.missing))
        missing = missing[self.generation.holds(ids[missing])]
        if len(damaged):
            self.generation.replace(ids[damaged], [records[position] for position in damaged.tolist()])
        if len(missing):
            try:
                self.generation.put_many(ids[missing], [records[position] for position in missing.tolist()])
                self.generation.seal()
            except CacheFull as error:
                self._places.warn_full(self.generation.folder, str(error))

    def close(self) -> None:
        """Give the generation back, and note for those who list it how much of what was asked it had."""
        if self.generation is not None:
            with self._counting:
                note_reads(self.generation.folder, self._asked, self._found)
                self._asked = self._found = 0
            self.generation.close()


class Levels:
    """The pre-processed samples of a source on one node. Threads may read at the same time.

    ``part``: the ids, ascending, that the node keeps; others can be read, but are not kept. ``verified``: the
    share of reads from memory that look at every checksum (the headers' are looked at always).
    """

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        preprocessing: Preprocessing,
        part: Ids,
        places: CacheDirs,
        *,
        verified: float = 1.0,
    ) -> None:
        if not 0 <= verified <= 1:
            raise ValueError(f"verified: expected a share from 0 to 1, got {verified}")
        self.counts = Counts()
        self._remote: dict[int, Sample] = {}
        self._counting = threading.Lock()
        self._source, self._manifest, self._preprocessing = source, manifest, preprocessing
        self._verified = verified
        encoded = xxh3_128_hexdigest(manifest.fingerprint.encode() + part.astype("<i8").tobytes())
        prepared = xxh3_128_hexdigest(f"{encoded} {preprocessing.fingerprint}".encode())
        note = {"manifest": manifest.fingerprint, "samples of the source": len(manifest)}
        places.check()
        self.disk = Level(places, places.disk, encoded, part, manifest.sizes[part], {"level": 1, **note})
        planned = manifest.sizes[part]
        if places.memory is not None:
            planned = preprocessing.planned_bytes(planned, manifest.shape)
        note |= {"preprocessing": preprocessing.fingerprint}
        self.memory = Level(places, places.memory, prepared, part, planned, {"level": 2, **note})

    def read(self, ids: Ids) -> list[Sample]:
        """Return pre-processed samples, in the order of ``ids``.

        What was not in memory is kept there from now on. Raises what the source raises where it cannot be
        read, and :class:`BadSample` where neither a sample nor others of its label can be decoded.
        """
        remote = [self._remote.get(number) for number in ids.tolist()] if self._remote else []
        if not any(sample is not None for sample in remote):
            return self._read_here(ids)
        here = iter(self._read_here(ids[[sample is None for sample in remote]]))
        self._count(remote=sum(sample is not None for sample in remote))
        return [next(here) if sample is None else sample for sample in remote]

    def set_remote_samples(self, samples: Mapping[int, Sample]) -> None:
        """Hold samples of other nodes, by id, in place of those that were lent before."""
        self._remote = dict(samples)

    def _read_here(self, ids: Ids) -> list[Sample]:
        samples: dict[int, Sample] = {}
        verify = self._verified == 1 or random.random() < self._verified

        def use(position: int, record: memoryview) -> None:
            payload, shape = unpack(int(ids[position]), record, verify=verify, seed=self.memory.seed)
            if len(shape) == 4:  # the last tells which sample stands in
                self._note_stand_in(int(ids[position]), shape[3])
            samples[position] = np.frombuffer(payload, np.uint8).reshape(shape[:3])

        misses = self.memory.read(ids, use)
        positions = np.array(sorted([*misses.missing, *misses.damaged]), np.int64)
        self._count(memory=len(ids) - len(positions), damaged_in_memory=len(misses.damaged))
        if len(positions):
            prepared = self._prepare(ids[positions])
            samples |= dict(zip(positions.tolist(), (sample for sample, _ in prepared), strict=True))
            records = dict(zip(positions.tolist(), (record for _, record in prepared), strict=True))
            self.memory.keep(ids, misses, records)
        return [samples[position] for position in range(len(ids))]

    def payloads(self, ids: Ids) -> list[bytes]:
        """Return samples as central storage has them; what was not on disk is kept there from now on."""
        found: dict[int, bytes] = {}

        def use(position: int, record: memoryview) -> None:
            found[position] = bytes(unpack(int(ids[position]), record, verify=True, seed=self.disk.seed)[0])

        misses = self.disk.read(ids, use)
        positions = np.array(sorted([*misses.missing, *misses.damaged]), np.int64)
        self._count(disk=len(ids) - len(positions), damaged_on_disk=len(misses.damaged))
        if len(positions):
            fetched = self._source.read(self._manifest, ids[positions])
            self._count(storage=len(fetched), storage_bytes=sum(map(len, fetched)))
            found |= dict(zip(positions.tolist(), fetched, strict=True))
            seed = self.disk.seed
            records = {each: pack(int(ids[each]), found[each], seed=seed) for each in positions.tolist()}
            self.disk.keep(ids, misses, records)
        return [found[position] for position in range(len(ids))]

    def missing(self) -> Ids:
        """Return the ids that the highest level there is does not keep yet; none without levels."""
        level = self.memory.generation or self.disk.generation
        return np.empty(0, np.int64) if level is None else level.missing_ids()

    def fill(self, ids: Ids) -> int:
        """Keep these samples in the levels that there are; return how many were read."""
        if self.memory.generation is None:
            return len(self.payloads(ids))
        return len(self.read(ids))

    def close(self) -> None:
        """Give both generations back."""
        self.memory.close()
        self.disk.close()

    def _prepare(self, ids: Ids) -> list[tuple[Sample, bytes]]:
        """Return pre-processed samples and their records."""
        prepared = []
        for number, payload in zip(ids.tolist(), self.payloads(ids), strict=True):
            try:
                sample, stand_in = self._decoded(payload), []
            except BadSample as error:
                sample, other = self._stand_in(number, error)
                stand_in = [other]
            pixels, shape = np.ascontiguousarray(sample).data.cast("B"), (*sample.shape, *stand_in)
            record = pack(number, pixels, shape, seed=self.memory.seed)
            prepared.append((sample, record))
        return prepared

    def _decoded(self, payload: bytes) -> Sample:
        return self._preprocessing.apply(payload, self._manifest.shape or ())

    def _stand_in(self, number: int, reason: BadSample) -> tuple[Sample, int]:
        """Return the next sample of the same label, in the order of ids, that can be decoded."""
        labels = self._manifest.labels
        alike = np.flatnonzero(labels == labels[number])
        for other in np.roll(alike, -1 - int(np.searchsorted(alike, number)))[:STAND_INS].tolist():
            if other == number:
                continue
            try:
                sample = self._decoded(self.payloads(np.array([other]))[0])
            except BadSample:
                continue
            self._note_stand_in(number, other)
            return sample, other
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
    """Return a line for each sample that some rank could not decode, in the order of their ids."""
    together = {number: other for each in stand_ins for number, other in each.items()}
    ids = {each for pair in together.items() for each in pair}
    name = {each: escaped(manifest.files[int(manifest.file[each])]) for each in ids}
    return [
        f"{name[number]} (sample {number}) cannot be decoded: {name[other]} (sample {other}) stood in"
        for number, other in sorted(together.items())
    ]
