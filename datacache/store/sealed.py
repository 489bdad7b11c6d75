"""A generation that holds all its samples: read by position in the file, without locks.

Where each record is, is kept in an index with a checksum, and ``COMPLETE`` is written last. From then on
nothing that happens to the file of records does more than damage the records it happens to.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from datacache.errors import Damaged
from datacache.store.filling import RECORDS, RecordFile, Store
from datacache.store.folders import COMPLETE, FORMAT, read_facts, write_facts, write_whole
from datacache.store.private import read_file

INDEX = "index"


@dataclass(frozen=True)
class Complete:
    """What is written last. ``end``: bytes of all records; ``index``: xxh3_128 of the index."""

    samples: int
    end: int
    index: str
    format: int = FORMAT


class SealedStore:
    """The records of a complete generation, by their place among the sorted ids; any number of threads."""

    def __init__(self, folder: Path, seed: int) -> None:
        complete = _read_complete(folder, seed)
        self._starts, self._sizes = _read_index(folder, complete)
        self._records = RecordFile(folder / RECORDS)
        if self._records.length() != complete.end:
            raise Damaged(f"{folder / RECORDS}: expected {complete.end} bytes, got {self._records.length()}")

    def __len__(self) -> int:
        return len(self._starts)

    def record(self, place: int) -> memoryview:
        """Return the record of the ``place``-th id; raises :class:`Damaged` if it cannot be read."""
        return self._records.read(self._starts.item(place), self._sizes.item(place))


def seal(folder: Path, store: Store, seed: int) -> None:
    """Sync a store that nobody changes any more, write its index, and last of all that it is complete."""
    extents = store.seal()
    index = extents.astype("<i8").tobytes()
    write_whole(folder / INDEX, index)
    samples, end = extents.shape[1], int(extents.sum(axis=0).max(initial=0))
    write_facts(folder / COMPLETE, asdict(Complete(samples, end, xxh3_128_hexdigest(index))), seed)


def _read_complete(folder: Path, seed: int) -> Complete:
    facts = read_facts(folder / COMPLETE, seed)
    if facts.get("format") != FORMAT:
        raise Damaged(f"{folder / COMPLETE}: expected format {FORMAT}, got {facts.get('format')}")
    return Complete(**facts)


def _read_index(folder: Path, complete: Complete) -> npt.NDArray[np.int64]:
    """Return where the records start and how long they are, in bytes, shape ``(2, samples)``."""
    path = folder / INDEX
    try:
        content = read_file(path)
    except FileNotFoundError:
        content = b""
    if xxh3_128_hexdigest(content) != complete.index or len(content) != 16 * complete.samples:
        raise Damaged(f"{path}: not what was written")
    return np.frombuffer(content, "<i8").reshape(2, complete.samples)
