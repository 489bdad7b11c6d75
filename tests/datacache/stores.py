"""Record stores of random payloads, for tests."""

import random
from pathlib import Path

import numpy as np

from datacache.order import Ids
from datacache.store.record_store import Misses, RecordStore
from datacache.store.records import Bytes, Record, pack, seed_of, unpack

SHM = Path("/dev/shm")


class Samples:
    """Payloads by id, no two alike: some share a page with others, some have pages of their own."""

    def __init__(self, fingerprint: str, ids: Ids, longest: int) -> None:
        self.fingerprint, self.ids, self.seed = fingerprint, ids, seed_of(fingerprint)
        self.payloads = {key: random.Random(key).randbytes(20 + key * 37 % longest) for key in ids.tolist()}
        self.sizes = np.array([len(each) for each in self.payloads.values()])

    def make(self, root: Path, ids: Ids | None = None, sizes: Ids | None = None) -> RecordStore:
        """Open a store of these ids, all unless given; ``sizes`` that are planned are theirs unless given."""
        ids = self.ids if ids is None else ids
        sizes = self.sizes[np.isin(self.ids, ids)] if sizes is None else sizes
        return RecordStore(root, self.fingerprint, ids, sizes, note={"of": "tests"})

    def records(self, ids: Ids) -> list[Record]:
        """Return the records of ids."""
        return [pack(key, self.payloads[key], (key,), seed=self.seed) for key in ids.tolist()]

    def put(self, store: RecordStore, ids: Ids | None = None) -> None:
        """Put the records of ids, all unless given."""
        ids = self.ids if ids is None else ids
        store.put_many(ids, self.records(ids))

    def sealed(self, root: Path) -> Path:
        """Make a complete store and return its folder."""
        with self.make(root) as store:
            self.put(store)
            assert store.seal()
            return store.folder

    def read_right(self, store: RecordStore, ids: Ids | None = None) -> Misses:
        """Read the ids, all unless given; every record that is delivered must be right."""
        wanted = self.ids if ids is None else ids

        def use(position: int, record: Bytes) -> None:
            key = int(wanted[position])
            found, shape = unpack(key, record, seed=self.seed)
            assert (found.tobytes(), shape) == (self.payloads[key], (key,))

        return store.read_many(wanted, use)
