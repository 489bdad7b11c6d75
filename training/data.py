"""What the phases of a run read: batches from the cache that the ranks of a node share."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from commlib import Topology
from datacache import Batch, CentreCrop, DataCache, Manifest, Order, Places, evaluation_part, manifest_of
from training.config import Cache, Config, Phase
from training.datasets import Dataset

EVALUATION_BATCH = 256
Tell = Callable[[int, int], None]


def places_of(cache: Cache) -> Places:
    """Return the folders of a configuration's cache."""
    defaults = Places(
        disk=Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cloudtrain" / "samples",
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

    def _manifest(self, part: str) -> Manifest:
        source = getattr(self.dataset, part)
        return manifest_of(source, self.places.disk, f"{self.config.dataset} {part}")

    def of_phase(self, phase: Phase) -> "PhaseData":
        """Return the batches of a phase."""
        return PhaseData(self, phase)


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
