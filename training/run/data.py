"""The input data of the phases of a run: batches from the cache that the ranks of a node share."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from commlib import Topology
from commlib.folders import expanded, user_cache
from datacache import (
    Augmentation,
    Batch,
    CacheDirs,
    CentreCrop,
    Counts,
    DataCache,
    Order,
    evaluation_part,
    stand_in_lines,
)
from datacache.augmentation import Crop
from datacache.errors import Untrusted
from training.config.config import Config
from training.config.records import Cache, Phase
from training.datasets import Dataset

EVALUATION_BATCH = 256
ProgressCallback = Callable[[int, int], None]


def cache_dirs_of(cache: Cache) -> CacheDirs:
    """Return the folders of a configuration's cache.

    Raises a ``ValueError`` of one line where another user owns one of them or may write to it.
    """
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
        self.config, self.topology, self.dataset = config, topology, dataset
        self.cache_dirs = replace(cache_dirs_of(config.cache), warns_when_full=topology.local_rank == 0)
        self.training = dataset.manifest("training", self.cache_dirs.disk)
        self.test = dataset.manifest("test", self.cache_dirs.disk)
        self._caches: list[DataCache] = []

    def check(self) -> None:
        """Raise a ``ValueError`` of one line unless every phase can be trained on these samples."""
        size, shards = self.topology.world.size, self.config.cache.shards
        for number, phase in enumerate(self.config.phases):
            if phase.batch_size * size > len(self.training):
                raise ValueError(
                    f"phases[{number}].batch_size: expected at most the {len(self.training)} training "
                    f"samples for all {size} ranks together, got {phase.batch_size} on each"
                )
            if phase.batch_size * size % shards:
                raise ValueError(
                    f"cache.shards: expected a divisor of the {phase.batch_size * size} samples that all "
                    f"{size} ranks take together in a step of phases[{number}], got {shards}"
                )
        if (normalise := self.config.normalise) is None:
            return
        if len(normalise.mean) not in (1, channels := self.dataset.channels):
            raise ValueError(
                f"normalise.mean: expected 1 or {channels} numbers, one a channel, got {len(normalise.mean)}"
            )

    def fingerprints(self) -> "Fingerprints":
        """Return how many samples there are, and their fingerprint, of each part."""
        parts = {"training": self.training, "test": self.test}
        return {part: (len(each), each.samples_fingerprint()) for part, each in parts.items()}

    def of_phase(self, phase: Phase) -> "PhaseData":
        """Return the batches of a phase."""
        return PhaseData(self, phase)

    def opened(self, caches: list[DataCache]) -> list[DataCache]:
        """Count what these read, too."""
        self._caches += caches
        return caches

    def read_so_far(self) -> "Reads":
        """Return the reads of all ranks; collective."""
        world, counts = self.topology.world, [cache.counts for cache in self._caches]
        names = [field.name for field in fields(Counts) if field.name != "stand_ins"]
        own = [sum(getattr(each, name) for each in counts) for name in names]
        totals = world.allgather_ints(own).sum(axis=0).tolist()
        stand_ins = [(cache.manifest, cache.counts.stand_ins) for cache in self._caches]
        lines = sorted({line for manifest, found in stand_ins for line in stand_in_lines(manifest, [found])})
        reported = sorted({line for of_rank in world.allgather_objects(lines) for line in of_rank})
        return Reads(dict(zip(names, totals, strict=True)), reported)


def load_data(config: Config, topology: Topology) -> Data:
    """Return the samples of a configuration; raise a ``ValueError`` of one line if they are invalid.

    Collective: it is an error on all ranks if they do not have the same samples.
    """
    data, problem = None, None
    try:
        data = Data(config, topology, config.dataset.make())
    except Exception as error:  # the others wait for the fingerprints of this rank
        problem = error
    found = None if problem or data is None else data.fingerprints()
    of_ranks = topology.world.allgather_objects((topology.world.host, found))
    if problem is not None:
        raise problem
    assert data is not None
    _check_equal([host for host, _ in of_ranks], [each for _, each in of_ranks])
    data.check()
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
        topology, config = data.topology, data.config
        self._data, self._phase = data, phase
        self._opening = threading.Lock()
        self._caches: list[DataCache] = []
        self._world, self._rank, self._size = topology.world, topology.world.rank, topology.world.size
        self._part, self._of = topology.local_rank, topology.node.size
        shards = config.cache.shards
        self.order = Order(
            len(data.training),
            shards,
            phase.batch_size * self._size,
            config.seed,
            # A manifest is sorted by class: parts of consecutive samples would have a few classes each.
            placement="manifest" if shards == 1 else "hash",
            exchange=config.cache.exchange,
        )
        self._crops = training_crop(config, phase), test_crop(config, phase)

    @property
    def caches(self) -> list[DataCache]:
        """Return the manifests of the training and of the test samples."""
        with self._opening:
            if not self._caches:
                self._caches = self._data.opened(self._open())
        return self._caches

    def _open(self) -> list[DataCache]:
        data, topology = self._data, self._data.topology
        ranks = next(node for node in topology.nodes if self._rank in node)
        parts = self.order.part(ranks, self._size), evaluation_part(len(data.test), ranks, self._size)
        sources = (data.dataset.training, data.dataset.test)
        side = self._phase.kept_side
        return [
            DataCache(source, manifest=manifest, shorter_side=side, part=part, dirs=data.cache_dirs)
            for source, manifest, part in zip(sources, (data.training, data.test), parts, strict=True)
        ]

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return self.order.steps("drop")

    def training_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return this rank's batches of an epoch, from step ``start`` on; the first are prefetched at once.

        Collective: nodes exchange the samples that this epoch needs.
        """
        training, _ = self.caches
        if self.order.exchange:
            training.exchange(self.order, self._world, epoch, start=start)
        return training.batches(self.order, self._crops[0], self._rank, self._size, epoch, start=start)

    def test_batches(self) -> Iterator[Batch]:
        """Return this rank's part of the test samples: over all ranks each counts once."""
        _, test = self.caches
        return test.evaluation_batches(self._crops[1], self._rank, self._size, batch_size=EVALUATION_BATCH)

    def fill(self, report: ProgressCallback) -> None:
        """Read the samples that the node has not cached yet; each of its ranks reads a part."""
        for cache in self.caches:
            cache.fill(report, part=self._part, of=self._of)

    def repair(self) -> int:
        """Verify all cached samples, at every level, and repair the damaged ones; return their number."""
        return sum(cache.repair() for cache in self.caches)

    def close(self) -> None:
        """Release the node's folders."""
        with self._opening:
            for cache in self._caches:
                cache.close()
            self._caches = []


def training_crop(config: Config, phase: Phase) -> Crop:
    """Return the crop of an image to train on."""
    settings = _inputs(config, phase)
    if phase.augmentation is None:
        return CentreCrop(ratio=1.0, **settings)
    return Augmentation(**settings, **phase.augmentation.model_dump())


def test_crop(config: Config, phase: Phase) -> Crop:
    """Return the crop of an image to test on."""
    return CentreCrop(ratio=phase.validation_crop, **_inputs(config, phase))


def _inputs(config: Config, phase: Phase) -> dict[str, Any]:
    settings: dict[str, Any] = {"input_size": phase.input_size, "dtype": input_dtype(config)}
    if config.normalise is not None:
        settings |= {"mean": tuple(config.normalise.mean), "std": tuple(config.normalise.std)}
    return settings


def input_dtype(config: Config) -> Literal["uint8", "float16", "float32"]:
    """Return the dtype of a model's inputs: levels, or normalised values in the precision of the model."""
    if config.normalise is None:
        return "uint8"
    return "float16" if config.precision == "float16" else "float32"
