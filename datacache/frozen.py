"""A generation that holds all its samples: read by position in the file, without locks and without LMDB.

The data file stays an LMDB environment that any LMDB tool can read. But LMDB trusts the pages that lead to a
record: one flipped bit there can end the process. So these pages are walked once, at freezing, and what they
say is kept in a file of its own with a checksum; from then on nothing that happens to the data file does more
than damage the record it happens to.
"""

import json
import mmap
import os
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from datacache.capacity import in_memory
from datacache.environments import DATA
from datacache.errors import Damaged
from datacache.folders import COMPLETE, FORMAT, write_whole
from datacache.order import Ids

INDEX = "index"

# LMDB's file, format 1. Page: 16 bytes (its number, padding, flags, end of the table), then a table of where
# its nodes are. Node: 8 bytes (low and high half of a size or page number, flags, bytes of key), key, value.
_MAGIC = 0xBEEFC0DE
_META = np.dtype(
    [("magic", "u4"), ("version", "u4"), ("address_and_size", "u8", 2), ("free", "u8", 6)]
    + [("flags", "u8"), ("pages", "u8", 3), ("entries", "u8"), ("root", "u8")]
    + [("last", "u8"), ("transaction", "u8")]
)
_HEADER_BYTES = 16
_BRANCH, _LEAF = 1, 2
_NODE = np.dtype([("low", "u2"), ("high", "u2"), ("flags", "u2"), ("key_bytes", "u2")])
_RECORD = np.dtype([*_NODE.descr, ("key", ">u8"), ("page", "u8")])
_APART = 1  # the value lies in pages of its own, and the number of the first stands in its place


@dataclass(frozen=True)
class Complete:
    """What is written last. ``data_bytes``: length of the data file; ``index``: xxh3_128 of the index."""

    samples: int
    data_bytes: int
    index: str
    format: int = FORMAT


class Frozen:
    """The records of a complete generation, by their place among the sorted ids; any number of threads.

    From tmpfs they are views of the memory that all processes share. From a disk they are read into new
    memory, as an error of the disk under a view would end the process.
    """

    def __init__(self, folder: Path) -> None:
        complete = _read_complete(folder)
        self._starts, self._sizes = _read_index(folder, complete)
        try:
            self._descriptor = os.open(folder / DATA, os.O_RDONLY)
        except FileNotFoundError as error:
            raise Damaged(f"{folder / DATA}: not there") from error
        weakref.finalize(self, os.close, self._descriptor)  # when the last thread has left
        found = os.fstat(self._descriptor).st_size
        if found != complete.data_bytes:
            raise Damaged(f"{folder / DATA}: expected {complete.data_bytes} bytes, got {found}")
        self._view = None
        if in_memory(folder):
            self._view = memoryview(mmap.mmap(self._descriptor, found, prot=mmap.PROT_READ))

    def __len__(self) -> int:
        return len(self._starts)

    def record(self, place: int) -> memoryview:
        """Return the record of the ``place``-th id; raises :class:`Damaged` if the disk cannot read it."""
        start, size = self._starts.item(place), self._sizes.item(place)
        if self._view is not None:
            return self._view[start : start + size]
        try:
            return memoryview(os.pread(self._descriptor, size, start))
        except OSError as error:
            raise Damaged(f"the disk cannot read {size} bytes at {start} of a cache: {error}") from error


def freeze(folder: Path, ids: Ids, page_bytes: int) -> None:
    """Write the index of synced data that nobody changes any more, and last of all that it is complete.

    Raises :class:`Damaged` unless exactly the sorted ``ids`` are found.
    """
    with (folder / DATA).open("rb") as file:
        keys, starts, sizes = _find_records(file.fileno(), page_bytes, folder)
    if not np.array_equal(keys, ids):
        raise Damaged(f"{folder / DATA}: expected the {len(ids)} ids that were put, found {len(keys)}")
    index = np.stack([starts, sizes]).astype("<i8").tobytes()
    write_whole(folder / INDEX, index)
    complete = Complete(len(ids), (folder / DATA).stat().st_size, xxh3_128_hexdigest(index))
    write_whole(folder / COMPLETE, json.dumps(asdict(complete)).encode())


def _read_complete(folder: Path) -> Complete:
    path = folder / COMPLETE
    try:
        complete = Complete(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise Damaged(f"{path}: cannot be read ({error})") from error
    if complete.format != FORMAT:
        raise Damaged(f"{path}: expected format {FORMAT}, got {complete.format}")
    return complete


def _read_index(folder: Path, complete: Complete) -> npt.NDArray[np.int64]:
    """Return where the records start and how long they are, in bytes, shape ``(2, samples)``."""
    path = folder / INDEX
    content = path.read_bytes() if path.exists() else b""
    if xxh3_128_hexdigest(content) != complete.index or len(content) != 16 * complete.samples:
        raise Damaged(f"{path}: not what was written")
    return np.frombuffer(content, "<i8").reshape(2, complete.samples)


Found = tuple[Ids, npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _find_records(file: int, page_bytes: int, folder: Path) -> Found:
    """Return keys, starts and sizes of all values, in the order of their keys."""
    parts = list(_leaves(file, page_bytes, _root(file, page_bytes, folder)))
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    keys, starts, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
    return keys, starts, sizes


def _root(file: int, page_bytes: int, folder: Path) -> int:
    """Return the first page of the newest of the two states that the file keeps."""
    metas = [
        np.frombuffer(os.pread(file, _META.itemsize, page * page_bytes + _HEADER_BYTES), _META)[0]
        for page in (0, 1)
    ]
    newest = max(metas, key=lambda meta: int(meta["transaction"]))
    if newest["magic"] != _MAGIC or newest["version"] != 1:
        raise Damaged(f"{folder / DATA}: expected LMDB's format 1, got {newest['version']}")
    return int(newest["root"])


def _leaves(file: int, page_bytes: int, number: int) -> Iterator[Found]:
    """Yield keys, starts and sizes of the values of each leaf below a page, from left to right."""
    if number == 2**64 - 1:  # an empty tree
        return
    page = np.frombuffer(os.pread(file, page_bytes, number * page_bytes), np.uint8)
    flags, end = int(page[10:12].view("u2")[0]), int(page[12:14].view("u2")[0])
    nodes = page[_HEADER_BYTES:end].view("u2").astype(np.int64)
    if flags & _LEAF:
        yield _leaf(page, nodes, number * page_bytes, page_bytes)
        return
    if not flags & _BRANCH:
        raise Damaged(f"page {number}: expected a branch or a leaf, got flags {flags}")
    heads = _at(page, nodes, _NODE).astype(np.dtype([(name, "i8") for name in _NODE.names or ()]))
    for child in heads["low"] | heads["high"] << 16 | heads["flags"] << 32:
        yield from _leaves(file, page_bytes, int(child))


def _leaf(page: npt.NDArray[np.uint8], nodes: Ids, page_start: int, page_bytes: int) -> Found:
    records = _at(page, nodes, _RECORD)
    sizes = records["low"].astype(np.int64) | records["high"].astype(np.int64) << 16
    inside = page_start + nodes + _NODE.itemsize + records["key_bytes"]
    apart = records["page"].astype(np.int64) * page_bytes + _HEADER_BYTES
    starts = np.where(records["flags"] & _APART, apart, inside)
    return records["key"].astype(np.int64), starts, sizes


def _at(page: npt.NDArray[np.uint8], places: Ids, kind: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """Return what begins at each of these bytes of a page."""
    rows = page[places[:, np.newaxis] + np.arange(kind.itemsize)]
    return rows.view(kind)[:, 0]
