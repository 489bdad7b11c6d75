"""The input data of the phases of a run: batches from the cache that the ranks of a node share."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from commlib import Topology
from commlib.folders import expanded, user_cache
from datacache import Batch, CacheDirs, Counts, DataCache, Order, stand_in_lines
from datacache.errors import Untrusted
from training.config.config import Config
from training.config.records import Cache, Phase
from training.datasets import Dataset
from training.tasks.task import Samples

ProgressCallback = Callable[[int, int], None]


def cache_dirs_of(cache: Cache) -> CacheDirs:
    """Return the folders of a cache; ``ValueError`` where another user owns one or may write to it."""
    dirs = CacheDirs(
        disk=_folder(cache.disk, lambda: user_cache() / "samples"),
        # shared by the ranks of one user
        memory=_folder(cache.memory, lambda: Path("/dev/shm") / f"cloudtrain-{os.getuid()}"),  # noqa: S108
    )
    try:
        dirs.check()
    except Untrusted as error:
        raise ValueError(f"cache: {error}") from error
    return dirs


def _folder(given: str | None, default: Callable[[], Path]) -> Path | None:
    if given is None:
        return None
    return default() if given == "auto" else expanded(given)


class Data:
    """The samples of a configuration, on one rank."""

    def __init__(self, config: Config, topology: Topology, dataset: Dataset) -> None:
        self.topology, self.dataset = topology, dataset
        self.cache_dirs = replace(cache_dirs_of(config.cache), warns_when_full=topology.local_rank == 0)
        self.training = dataset.manifest("training", self.cache_dirs.disk)
        self.test = dataset.manifest("test", self.cache_dirs.disk)
        self.task = config.task.make()
        self.samples = Samples(config, dataset, self.training, self.test, topology.world.size)
        self.caches: list[DataCache] = []
        """Those that phases have opened."""

    def fingerprints(self) -> "Fingerprints":
        """Return how many samples there are, and their fingerprint, of each part."""
        parts = {"training": self.training, "test": self.test}
        return {part: (len(each), each.samples_fingerprint()) for part, each in parts.items()}

    def of_phase(self, phase: Phase) -> "PhaseData":
        return PhaseData(self, phase)

    def read_so_far(self) -> "Reads":
        """Return the reads of all ranks; collective."""
        world, counts = self.topology.world, [cache.counts for cache in self.caches]
        names = [field.name for field in fields(Counts) if field.name != "stand_ins"]
        own = [sum(getattr(each, name) for each in counts) for name in names]
        totals = world.allgather_ints(own).sum(axis=0).tolist()
        lines = {
            line for cache in self.caches for line in stand_in_lines(cache.manifest, [cache.counts.stand_ins])
        }
        of_ranks = world.allgather_objects(lines)
        return Reads(dict(zip(names, totals, strict=True)), sorted(set().union(*of_ranks)))


def load_data(config: Config, topology: Topology) -> Data:
    """Return the samples; ``ValueError`` if they are invalid, or not the same on all ranks; collective."""
    data: Data | Exception
    try:
        data = Data(config, topology, config.make_dataset())
    except Exception as error:  # the others wait for the fingerprints of this rank
        data = error
    found = data.fingerprints() if isinstance(data, Data) else None
    of_ranks = topology.world.allgather_objects((topology.world.host, found))
    if not isinstance(data, Data):
        raise data
    _check_equal([host for host, _ in of_ranks], [each for _, each in of_ranks])
    data.task.check_samples(data.samples)
    return data


Fingerprints = dict[str, tuple[int, str]]


def _check_equal(hosts: Sequence[str], of_ranks: Sequence[Fingerprints | None]) -> None:
    """Raise a ``ValueError`` that names the nodes, unless all ranks that have data have the same."""
    for part in ("training", "test"):
        ranks_of: dict[tuple[int, str], list[int]] = {}
        for rank, found in enumerate(of_ranks):
            if found is not None:  # else that rank reports its own error
                ranks_of.setdefault(found[part], []).append(rank)
        if len(ranks_of) > 1:
            groups = "; ".join(
                f"{_hosts_of(ranks, hosts)}: {samples} samples, fingerprint {digest[:12]}"
                for (samples, digest), ranks in ranks_of.items()
            )
            raise ValueError(f"dataset: {part} samples: expected the same on all nodes, got {groups}")


def _hosts_of(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the hosts of ranks; also the ranks where a host has other ranks."""
    names = dict.fromkeys(hosts[rank] for rank in ranks)
    if all(rank in ranks for rank, host in enumerate(hosts) if host in names):
        return ", ".join(names)
    return f"{', '.join(names)} (ranks {', '.join(map(str, ranks))})"


@dataclass(frozen=True)
class Reads:
    """Samples read by all ranks, by level or storage; a line for each sample that was substituted."""

    counts: dict[str, int]
    stand_ins: list[str]

    def lines(self) -> list[str]:
        """Return lines about damaged records, and about samples that could not be decoded."""
        damaged = self.counts["damaged_in_memory"] + self.counts["damaged_on_disk"]
        mended = [f"{damaged} damaged records of the cache were read again"] if damaged else []
        return [*mended, *self.stand_ins]


class PhaseData:
    """The batches of one phase, on one rank. Folders are opened at the first read."""

    def __init__(self, data: Data, phase: Phase) -> None:
        self._data, self._topology = data, data.topology
        self._opening = threading.Lock()
        self._caches: list[DataCache] = []
        self._inputs = data.task.inputs(phase, data.samples)
        self.order = self._inputs.training.order

    @property
    def caches(self) -> list[DataCache]:
        """The caches of the training and of the test samples."""
        with self._opening:
            if not self._caches:
                self._caches = self._open()
                self._data.caches += self._caches
        return self._caches

    def _open(self) -> list[DataCache]:
        data, world = self._data, self._topology.world
        ranks = next(node for node in self._topology.nodes if world.rank in node)
        return [
            DataCache(
                source,
                manifest=manifest,
                preprocessing=reading.preprocessing,
                part=reading.order.part(ranks, world.size),
                dirs=data.cache_dirs,
            )
            for source, manifest, reading in (
                (data.dataset.training, data.training, self._inputs.training),
                (data.dataset.test, data.test, self._inputs.test),
            )
        ]

    def training_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return this rank's batches of an epoch from step ``start`` on, the first prefetched; collective."""
        order, world, (training, _) = self.order, self._topology.world, self.caches
        if isinstance(order, Order) and order.exchange:
            training.exchange(order, world, epoch, start=start)
        collation = self._inputs.training.collation
        return training.batches(order, collation, world.rank, world.size, epoch, start=start)

    def test_batches(self) -> Iterator[Batch]:
        """Return this rank's part of the test samples: over all ranks each counts once."""
        world, reading = self._topology.world, self._inputs.test
        return self.caches[1].batches(reading.order, reading.collation, world.rank, world.size, epoch=0)

    def fill(self, report: ProgressCallback) -> None:
        """Read the samples that the node has not cached yet; each of its ranks reads a part."""
        for cache in self.caches:
            cache.fill(report, part=self._topology.local_rank, of=self._topology.node.size)

    def repair(self) -> int:
        """Verify all cached samples, at every level, and repair the damaged ones; return their number."""
        return sum(cache.repair() for cache in self.caches)

    def close(self) -> None:
        """Release the node's folders."""
        with self._opening:
            for cache in self._caches:
                cache.close()
            self._caches = []
