"""Batches of a source's samples, each read once from central storage, then from the node's disk and memory.

>>> import numpy as np
>>> from datacache import Arrays, CentreCrop, DataCache, Order
>>> source = Arrays(np.zeros((10, 8, 8, 1), np.uint8), np.arange(10))
>>> cache = DataCache(source)
>>> order = Order(samples=10, shards=1, global_batch=4, seed=1)
>>> crop = CentreCrop(6, dtype="uint8")
>>> [batch.images.shape for batch in cache.batches(order, crop, rank=0, world_size=2, epoch=0)]
[(2, 6, 6, 1), (2, 6, 6, 1)]
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from datacache.augmentation import Crop
from datacache.batches import Batch, BatchSpec, Collation, Pools, Result, Sample, prefetch
from datacache.levels import CacheDirs, Counts, Levels
from datacache.manifest import Manifest
from datacache.order import BatchOrder, Ids, Order, check_at_least
from datacache.preprocessing import Preprocessing
from datacache.sources import Source
from datacache.storage import ProgressCallback, no_report
from datacache.store.records import pack, unpack

if TYPE_CHECKING:
    import tensorflow as tf

ReadSamples = Callable[[Ids], list[Sample]]
PICTURE_CHANNELS = 3
FILL_SAMPLES = 128  # of one read
ROUND_SAMPLES = 256  # that a rank requests at once, which bounds the memory of messages


class Comm(Protocol):
    """The part of a communicator that is used here; :class:`commlib.Communicator` has it."""

    rank: int
    size: int

    def allgather_ints(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return every rank's ``values``, shape ``(size, len(values))``."""

    def alltoall_ints(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """Send ``values[r]`` to each rank ``r``; return the value of every rank, shape ``(size,)``."""

    def exchange(self, outgoing: Sequence[npt.NDArray[Any]], incoming: Sequence[npt.NDArray[Any]]) -> None:
        """Send ``outgoing[r]`` to every rank ``r`` and fill ``incoming[r]`` with the array of rank ``r``."""


class DataCache:
    """The samples of one source, pre-processed in one way, on one node.

    ``manifest``: of the source, scanned if not given. ``preprocessing``: what is done to samples before they
    are stored, such as shrinking images to the largest size that any phase needs; nothing by default.
    ``part``: the ids, ascending, that this node stores (see :meth:`BatchOrder.part`); all by default.
    ``dirs``: the folders of the levels; none by default. ``threads`` build up to ``prefetch`` batches ahead.
    """

    def __init__(
        self,
        source: Source,
        *,
        manifest: Manifest | None = None,
        preprocessing: Preprocessing | None = None,
        part: Ids | None = None,
        dirs: CacheDirs = CacheDirs(),  # noqa: B008 - it is immutable
        threads: int = 2,
        prefetch: int = 4,
    ) -> None:
        check_at_least(1, threads=threads, prefetch=prefetch)
        self.manifest = source.scan() if manifest is None else manifest
        self._threads, self._prefetch = threads, prefetch
        self._collation: Collation | None = None
        self._pools = Pools()
        preprocessing = preprocessing or Preprocessing(self.manifest.payload)
        self._part = np.arange(len(self.manifest)) if part is None else part
        self._levels = Levels(source, self.manifest, preprocessing, self._part, dirs)

    def __len__(self) -> int:
        return len(self.manifest)

    @property
    def channels(self) -> int:
        """The number of channels of a sample."""
        shape = self.manifest.shape
        return PICTURE_CHANNELS if shape is None else shape[2]

    @property
    def counts(self) -> Counts:
        """The samples that this rank has read so far, by where they were found."""
        return self._levels.counts

    def batches(
        self,
        order: BatchOrder,
        collation: Collation,
        rank: int,
        world_size: int,
        epoch: int,
        *,
        start: int = 0,
    ) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch, from step ``start`` on; every rank has equally many.

        What is random in a batch depends on the order's seed, the epoch and the sample.
        """
        if order.samples != len(self):
            raise ValueError(f"order: expected one of {len(self)} samples, got one of {order.samples}")
        if collation != self._collation:  # others have arrays of other shapes
            self._collation, self._pools = collation, Pools()
        pools = self._pools

        def spec_of(step: int) -> BatchSpec:
            where = epoch, step, rank, world_size
            return BatchSpec(order.batch(*where), order.counts(*where), *where, order.seed)

        def build(spec: BatchSpec) -> Batch:
            samples, labels = self._levels.read(spec.ids), self.manifest.labels[spec.ids]
            return Batch(collation.arrays(samples, labels, spec, pools), spec.ids, spec.counts)

        specs = map(spec_of, range(start, order.steps()))
        return prefetch(build, specs, threads=self._threads, depth=self._prefetch)

    def exchange(self, order: Order, comm: Comm, epoch: int, *, start: int = 0) -> int:
        """Fetch the remote samples of an epoch, from step ``start`` on, from the nodes that store them.

        Remote samples are those that this rank reads in the epoch and its node does not store. All ranks of
        ``comm`` call this together, before :meth:`batches`, which otherwise reads them from central storage.
        Samples of an earlier call are dropped. Returns how many were fetched.
        """
        steps = range(start, order.steps())
        ids = _concatenate(order.batch(epoch, step, comm.rank, comm.size) for step in steps)
        holders = _concatenate(order.holders(epoch, step, comm.rank, comm.size) for step in steps)
        wanted, first = np.unique(ids, return_index=True)
        is_remote = np.isin(wanted, self._part, assume_unique=True, invert=True)
        self._levels.remote = {}
        remote = fetch_remote_samples(comm, wanted[is_remote], holders[first][is_remote], self._levels.read)
        self._levels.remote = remote
        return len(remote)

    def dataset(self, batches: Callable[[], Iterable[Batch]], crop: Crop) -> "tf.data.Dataset":
        """Return a data set of ``(images, labels, counts)``: the batches, made with ``crop``."""
        from datacache.tensorflow import as_dataset

        return as_dataset(batches, crop, self.channels)

    def fill(self, report: ProgressCallback = no_report, *, part: int = 0, of: int = 1) -> None:
        """Read and store the samples of the node's part that are not stored yet.

        Ranks that fill the cache together each pass another ``part`` of the same number ``of`` parts.
        ``report(done, total)`` counts samples; an exception that it raises ends the filling.
        """
        missing, done = self._levels.missing(), 0
        # The node's part is divided, not the missing ids: a faster rank may have stored some of them by now.
        missing = missing[np.isin(missing, np.array_split(self._part, of)[part], assume_unique=True)]
        for count in self._in_parts(self._levels.fill, missing):
            done += count
            report(done, len(missing))

    def repair(self) -> int:
        """Read all samples of the node's part at every level, replace damaged ones, return their number."""
        before = self.counts.damaged_in_memory + self.counts.damaged_on_disk
        for read in (self._levels.read, self._levels.payloads):
            for _ in self._in_parts(read, self._part):
                pass
        return self.counts.damaged_in_memory + self.counts.damaged_on_disk - before

    def close(self) -> None:
        """Release the folders; batches that were yielded stay valid."""
        self._levels.close()
        self._levels.remote = {}
        self._collation, self._pools = None, Pools()

    def _in_parts(self, function: Callable[[Ids], Result], ids: Ids) -> Iterator[Result]:
        parts = np.array_split(ids, -(-len(ids) // FILL_SAMPLES) or 1)
        return prefetch(function, parts, threads=self._threads, depth=self._prefetch)


def _concatenate(parts: Iterable[Ids]) -> Ids:
    return np.concatenate([np.empty(0, np.int64), *parts])


def fetch_remote_samples(comm: Comm, wanted: Ids, holders: Ids, read: ReadSamples) -> dict[int, Sample]:
    """Return the samples ``wanted``, by id; ``holders``: for each the rank it is requested from.

    ``read(ids)`` returns the samples that other ranks request from this one. All ranks call it together.
    """
    rounds = int(comm.allgather_ints([-(-len(wanted) // ROUND_SAMPLES)]).max())
    samples: dict[int, Sample] = {}
    for each in range(rounds):
        part = slice(each * ROUND_SAMPLES, (each + 1) * ROUND_SAMPLES)
        samples |= _one_round(comm, wanted[part], holders[part], read)
    return samples


def _one_round(comm: Comm, wanted: Ids, holders: Ids, read: ReadSamples) -> dict[int, Sample]:
    requests = [wanted[holders == rank] for rank in range(comm.size)]
    counts = comm.alltoall_ints([len(ids) for ids in requests])
    asked = [np.empty(count, np.int64) for count in counts.tolist()]
    comm.exchange(requests, asked)
    answers = [_records(ids, read(ids)) for ids in asked]
    sizes = [np.empty(len(ids), np.int64) for ids in requests]
    comm.exchange([np.array([len(each) for each in records], np.int64) for records in answers], sizes)
    received = [np.empty(int(lengths.sum()), np.uint8) for lengths in sizes]
    comm.exchange([np.frombuffer(b"".join(records), np.uint8) for records in answers], received)
    samples = {}
    for ids, lengths, content in zip(requests, sizes, received, strict=True):
        for number, stop, length in zip(ids.tolist(), np.cumsum(lengths), lengths, strict=True):
            payload, shape = unpack(number, content[stop - length : stop])
            samples[number] = payload.reshape(shape)
    return samples


def _records(ids: Ids, samples: list[Sample]) -> list[bytes]:
    numbered = zip(ids.tolist(), samples, strict=True)
    packed = (pack(number, np.ascontiguousarray(sample).data, sample.shape) for number, sample in numbered)
    return [b"".join(record) for record in packed]
