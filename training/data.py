"""What the phases of a run read: batches from the cache that the ranks of a node share."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from commlib import Topology
from datacache import (
    Batch,
    CentreCrop,
    Counts,
    DataCache,
    Manifest,
    Order,
    Places,
    evaluation_part,
    manifest_of,
    stand_in_lines,
)
from training.config import Cache, Config, Phase
from training.datasets import Dataset
from training.folders import user_cache

EVALUATION_BATCH = 256
Tell = Callable[[int, int], None]


def places_of(cache: Cache) -> Places:
    """Return the folders of a configuration's cache."""
    defaults = Places(
        disk=user_cache() / "samples",
        memory=Path("/dev/shm") / f"cloudtrain-{os.getuid()}",  # noqa: S108 - shared by the ranks of one user
    )
    return Places(*map(_folder, (cache.disk, cache.memory), (defaults.disk, defaults.memory)))


def _folder(given: str | None, default: Path | None) -> Path | None:
    if given is None:
        return None
    return default if given == "auto" else Path(given).expanduser()


class Data:
    """The samples of a configuration, on one rank."""

    def __init__(self, config: Config, topology: Topology, dataset: Dataset) -> None:
        self.config, self.topology, self.dataset = config, topology, dataset
        self.places = places_of(config.cache)
        self.training = self._manifest("training")
        self.test = self._manifest("test")
        self._caches: list[DataCache] = []

    def _manifest(self, part: str) -> Manifest:
        source = getattr(self.dataset, part)
        return manifest_of(source, self.places.disk, f"{self.config.dataset} {part}")

    def of_phase(self, phase: Phase) -> "PhaseData":
        """Return the batches of a phase."""
        opened = PhaseData(self, phase)
        self._caches += opened.caches
        return opened

    def read_so_far(self) -> "Reads":
        """Return what all ranks have read; all of them call it together."""
        world, counts = self.topology.world, [cache.counts for cache in self._caches]
        names = [field.name for field in fields(Counts) if field.name != "stand_ins"]
        own = [sum(getattr(each, name) for each in counts) for name in names]
        totals = world.agree(own).sum(axis=0).tolist()
        stand_ins = [(cache.manifest, cache.counts.stand_ins) for cache in self._caches]
        lines = sorted({line for manifest, found in stand_ins for line in stand_in_lines(manifest, [found])})
        told = sorted({line for of_rank in world.allgather_objects(lines) for line in of_rank})
        return Reads(dict(zip(names, totals, strict=True)), told)


@dataclass(frozen=True)
class Reads:
    """Samples read by all ranks, by where they were; a line for each that another one stood in for."""

    counts: dict[str, int]
    stand_ins: list[str]

    def lines(self) -> list[str]:
        """Return what a user has to know: what was damaged, and what could not be decoded."""
        damaged = self.counts["damaged_in_memory"] + self.counts["damaged_on_disk"]
        mended = [f"{damaged} damaged records of the cache were read anew"] if damaged else []
        return [*mended, *self.stand_ins]


class PhaseData:
    """The batches of one phase, on one rank."""

    def __init__(self, data: Data, phase: Phase) -> None:
        world, config = data.topology.world, data.config
        self._rank, self._size = world.rank, world.size
        self._crop = CentreCrop(phase.input_size, ratio=1.0, dtype="uint8")
        self._order = Order(
            len(data.training), config.cache.shards, phase.batch_size * self._size, config.seed
        )
        ranks = next(node for node in data.topology.nodes if self._rank in node)
        side, places = phase.input_size, data.places
        self._training = DataCache(
            data.dataset.training,
            manifest=data.training,
            shorter_side=side,
            part=self._order.part(ranks, self._size),
            places=places,
        )
        self._test = DataCache(
            data.dataset.test,
            manifest=data.test,
            shorter_side=side,
            part=evaluation_part(len(data.test), ranks, self._size),
            places=places,
        )

    @property
    def caches(self) -> list[DataCache]:
        """Return those of the training and of the test samples."""
        return [self._training, self._test]

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return self._order.steps("drop")

    def training_batches(self, epoch: int) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch."""
        return self._training.batches(self._order, self._crop, self._rank, self._size, epoch)

    def test_batches(self) -> Iterator[Batch]:
        """Yield this rank's part of the test samples: over all ranks each counts once."""
        return self._test.evaluation_batches(self._crop, self._rank, self._size, batch_size=EVALUATION_BATCH)

    def fill(self, tell: Tell) -> None:
        """Read what the node does not keep yet; ``tell(done, total)`` counts samples of either part."""
        self._training.fill(tell)
        self._test.fill(tell)

    def repair(self) -> int:
        """Read all that the node keeps, at every level, and mend what is damaged; return how many were."""
        return self._training.repair() + self._test.repair()

    def close(self) -> None:
        """Give the node's folders back."""
        self._training.close()
        self._test.close()
