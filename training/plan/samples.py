"""The steps of an epoch and the bytes of a node's cache, from the list of samples alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.registry import options_of
from datacache import CacheDirs, Manifest
from datacache.capacity import store_bytes
from datacache.manifest import Texts
from datacache.storage import check_whole
from training.config.config import Config, Loaded, load_with_warnings
from training.config.reading import read_given
from training.datasets import DATASETS
from training.datasets.dataset import in_one_line
from training.datasets.synthetic import KNOWN, synthetic
from training.run.data import cache_dirs_of
from training.run.dry_run import generated
from training.tasks.image_classification import facts_of
from training.tasks.task import EpochSize, Samples


@dataclass(frozen=True)
class Epoch(EpochSize):
    """An epoch of a phase, whose global batch is counted in ``unit``."""

    unit: str


@dataclass(frozen=True)
class Listing:
    """The samples of a run, listed.

    ``dataset``: what its model is made for. ``epochs``: of each phase. ``disk``, ``memory``: bytes that the
    two levels of a node's cache take when all phases are over, ``None`` where that is not known.
    """

    dataset: Any
    epochs: Sequence[Epoch]
    disk: int | None
    memory: int
    dirs: CacheDirs


def load_countable(path: str, overrides: Sequence[str]) -> tuple[Loaded, str | None]:
    """Return a configuration, and a line that says so if its data set is counted by its published size."""
    given = read_given(path, overrides)
    dataset = given.keys.get("dataset")
    keys = dataset if isinstance(dataset, Mapping) else {"name": dataset}
    name = str(keys.get("name"))
    if name not in KNOWN or "path" in keys or "path" not in options_of(DATASETS[name]):
        return load_with_warnings(given), None
    counted = f"counted with the {KNOWN[name].samples:,} training samples of {name}"
    return load_with_warnings(given, change=generated), f"dataset.path is not given: {counted}"


def listing_of(config: Config, nodes: Sequence[Sequence[int]], *, is_counted: bool) -> Listing:
    """Return the listing of a configuration's samples on the ranks of ``nodes``; no sample is read.

    ``is_counted``: only the number of its images is known. Raises a ``ValueError`` of one line where a phase
    cannot be trained on the samples.
    """
    dirs, task = cache_dirs_of(config.cache), config.task.make()
    if config.dataset.name == "synthetic":  # whose pictures are not generated for this
        training, test = _stand_ins(config, is_counted=is_counted)
        dataset: Any = facts_of(config)
    else:
        dataset = config.make_dataset()
        training, test = (dataset.manifest(part, dirs.disk) for part in ("training", "test"))
    samples = Samples(config, dataset, training, test, sum(map(len, nodes)))
    task.check_samples(samples)
    epochs: list[Epoch] = []
    disk: dict[Any, int] = {}
    memory: dict[Any, int] = {}
    for phase in config.phases:
        inputs = task.inputs(phase, samples)
        order = inputs.training.order
        epochs.append(Epoch(order.steps(), order.global_batch, order.unit))
        for reading, manifest in ((inputs.training, training), (inputs.test, test)):
            part = reading.order.part(nodes[0], samples.ranks)
            key, sizes = (manifest.fingerprint, part.tobytes()), manifest.sizes[part]
            disk[key] = store_bytes(sizes)
            if dirs.memory is not None:
                planned = reading.preprocessing.planned_bytes(sizes, manifest.shape)
                memory[key, reading.preprocessing.fingerprint] = store_bytes(planned)
    kept = sum(disk.values()) if dirs.disk is not None else 0
    unknown = is_counted and dirs.disk is not None
    return Listing(dataset, epochs, None if unknown else kept, sum(memory.values()), dirs)


def _stand_ins(config: Config, *, is_counted: bool) -> list[Manifest]:
    """Return training and test manifests of a synthetic data set; ``is_counted``: sizes are not known."""
    options = options_of(synthetic) | config.dataset.options
    with in_one_line("synthetic"):
        check_whole(least=1, **options)
    shape = None if is_counted else (options["side"], options["side"], options["channels"])
    tests = 1 if is_counted else options["test_samples"]  # how many images there are is not known
    return [_manifest(count, shape) for count in (options["samples"], tests)]


def _manifest(samples: int, shape: tuple[int, ...] | None) -> Manifest:
    """Return a list of pictures of one shape, or of unknown shapes and sizes."""
    zeros = np.zeros(samples, np.int64)
    return Manifest(
        payload="image" if shape is None else "array",
        files=Texts.of(["none"]),
        stamps=np.zeros(1, np.uint64),
        file=zeros.astype(np.int32),
        start=zeros,
        sizes=zeros if shape is None else np.full(samples, int(np.prod(shape))),
        labels=zeros,
        shape=shape,
    )
