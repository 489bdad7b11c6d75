"""``cloudtrain bench cache``: batches from the levels, against central storage and against ``tf.data``."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pictures import generate
from benchmarks.throttled import serve
from datacache import (
    Augmentation,
    CacheDirs,
    DataCache,
    ImageFolder,
    Manifest,
    Order,
    Preprocessing,
    management,
)
from datacache.batches import Batch
from training.bench.checks import WrongResult
from training.bench.record import Record, against_baseline
from training.bench.reporting import report
from training.bench.timing import Seconds, alternate
from training.commands.printing import Table
from training.process.tf_logging import import_tensorflow

SAMPLES, QUICK_SAMPLES = 10_000, 600
RUNS, QUICK_RUNS = 5, 3
BATCH, SIDE, INPUT = 256, 128, 96
STORED_BATCHES, CACHED_BATCHES, QUICK_BATCHES = 2, 40, 10  # in a run, from storage and from the levels
RATE, LATENCY_SECONDS = "1gbit", 2e-3
CROP = Augmentation(INPUT, mean=(123.7, 116.3, 103.5), std=(58.4, 57.1, 57.4))
LEVELS, STORAGE, FILES, CACHED = "levels", "storage", "tf.data from files", "tf.data cached in memory"
FIRST, FIRST_UNCACHED = "first epoch", "first epoch without a cache"
ONE_CORE = "levels, one core"
PEERS = {LEVELS: (STORAGE, FILES, CACHED), FIRST: (FIRST_UNCACHED,), ONE_CORE: (None,)}

Run = Callable[[int], int]  # of an epoch: makes batches, returns how many samples


@dataclass(frozen=True)
class Setting:
    """A folder of pictures, the same behind a slow server, and the folders of the levels."""

    folder: Path
    url: str
    manifest: Manifest
    work: Path
    memory: Path
    quick: bool

    def cache(self, dirs: CacheDirs | None = None, *, threads: int = 2) -> DataCache:
        """Return a cache of the pictures in central storage."""
        source = ImageFolder(self.url)
        return DataCache(
            source,
            manifest=self.manifest,
            preprocessing=Preprocessing(self.manifest.payload, SIDE),
            dirs=dirs or CacheDirs(),
            threads=threads,
        )

    @property
    def cached_batches(self) -> int:
        """Return how many batches a run makes of cached samples: many more than are prefetched."""
        return QUICK_BATCHES if self.quick else CACHED_BATCHES

    @property
    def order(self) -> Order:
        """Return the order in which the samples are read."""
        return Order(len(self.manifest), shards=1, global_batch=BATCH, seed=1)

    def batches(self, cache: DataCache, epoch: int) -> Iterator[Batch]:
        """Yield batches, epoch after epoch, from the beginning of this one on."""
        for each in count(epoch):
            yield from cache.batches(self.order, CROP, 0, 1, each)


def bench(as_json: bool, *, samples: int | None, quick: bool) -> int:
    """Print what was measured and return the exit status."""
    import_tensorflow()
    with _setting(samples or (QUICK_SAMPLES if quick else SAMPLES), quick) as setting:
        return report(_measure(setting), as_json=as_json, show=lambda records: table(records).print())


@contextmanager
def _setting(samples: int, quick: bool) -> Iterator[Setting]:
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cloudtrain-bench-")))
        memory = Path("/dev/shm") / f"{work.name}"  # noqa: S108 - it is to be in memory
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        folder = work / "pictures"
        generate(folder, samples)
        url = stack.enter_context(serve(folder, rate=RATE, latency_seconds=LATENCY_SECONDS))
        yield Setting(folder, url, ImageFolder(url).scan(), work, memory, quick)


def _measure(setting: Setting) -> Iterator[Record]:
    cached = setting.cache(CacheDirs(setting.work / "disk", setting.memory))
    cached.fill()
    _check(setting, cached)
    from benchmarks.tfdata import decoded_each_time, decoded_once  # which imports TensorFlow

    runs = QUICK_RUNS if setting.quick else RUNS
    size = len(setting.manifest)
    seconds = _alternate(
        {
            LEVELS: lambda epoch: _take(setting.batches(cached, epoch), setting.cached_batches),
            STORAGE: lambda epoch: _take(setting.batches(setting.cache(), epoch), STORED_BATCHES),
            FILES: _of_tensorflow(decoded_each_time(setting.folder, setting.manifest, CROP, BATCH), setting),
            CACHED: _of_tensorflow(
                decoded_once(setting.folder, setting.manifest, SIDE, CROP, BATCH), setting, skip=size
            ),
        },
        runs,
    )
    seconds |= _alternate({FIRST: _first_epochs(setting), FIRST_UNCACHED: _uncached(setting)}, runs)
    with one_core():
        alone = setting.cache(CacheDirs(setting.work / "disk", setting.memory), threads=1)
        count = setting.cached_batches
        seconds |= _alternate({ONE_CORE: lambda epoch: _take(setting.batches(alone, epoch), count)}, runs)
    case: dict[str, Any] = {"samples": size, "batch": BATCH, "kept_side": SIDE, "input_size": INPUT}
    case |= {"rate": RATE, "latency_seconds": LATENCY_SECONDS, "quick": setting.quick}
    for subject, peers in PEERS.items():
        more = _memory(setting) if subject == LEVELS else {}
        for peer in peers:
            yield Record(
                bench="cache",
                case=case | {"unit": "seconds a sample"},
                subject=subject,
                seconds=seconds[subject],
                peer=peer,
                peer_seconds=seconds[peer] if peer else None,
                bytes=None,
                more=more,
            )


def _check(setting: Setting, cached: DataCache) -> None:
    """Raise ``WrongResult`` unless a batch from the levels is bitwise that from storage."""
    ours, stored = (next(setting.batches(cache, 0)) for cache in (cached, setting.cache()))
    if not np.array_equal(ours.images, stored.images) or not np.array_equal(ours.labels, stored.labels):
        raise WrongResult("a batch from the levels differs from that of storage")


def _alternate(candidates: Mapping[str, Run], runs: int) -> dict[str, Seconds]:
    """Return the seconds that a sample takes in each."""
    sizes: dict[str, int] = {}

    def counted(name: str, run: Run) -> Callable[[int], None]:
        def call(epoch: int) -> None:
            sizes[name] = run(epoch)

        return call

    calls = {name: counted(name, run) for name, run in candidates.items()}
    whole = alternate(calls, range(1, 1000), runs)
    return {name: seconds.per(sizes[name]) for name, seconds in whole.items()}


def _take(batches: Iterator[Batch], number: int) -> int:
    return sum(len(batch.labels) for batch in islice(batches, number))


def _of_tensorflow(dataset: Any, setting: Setting, skip: int = 0) -> Run:
    """Return runs over a data set that never ends, after the first samples."""
    batches = iter(dataset)
    for _ in range(-(-skip // BATCH)):
        next(batches)
    return lambda epoch: sum(int(next(batches)[1].shape[0]) for _ in range(setting.cached_batches))


def _first_epochs(setting: Setting) -> Run:
    """Return runs that begin with empty folders."""

    def run(epoch: int) -> int:
        with tempfile.TemporaryDirectory(dir=setting.work) as disk:
            memory = Path(disk.replace(str(setting.work), str(setting.memory)))
            cache = setting.cache(CacheDirs(Path(disk), memory))
            taken = _take(setting.batches(cache, epoch), STORED_BATCHES)
            cache.close()
            shutil.rmtree(memory)
            return taken

    return run


def _uncached(setting: Setting) -> Run:
    return lambda epoch: _take(setting.batches(setting.cache(), epoch), STORED_BATCHES)


def _memory(setting: Setting) -> dict[str, float]:
    """Return the bytes of level 2, for all ranks of the node, and those of its samples."""
    (folder,) = management.list_folders(setting.memory)
    cache = setting.cache(CacheDirs(setting.work / "disk", setting.memory))
    samples = sum(cache.sample_bytes(part) for part in np.array_split(np.arange(len(cache)), 50))
    return {"memory_bytes": folder.bytes, "sample_bytes": samples, "memory_ratio": folder.bytes / samples}


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this process, and the threads it makes, to one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def table(records: Sequence[Record]) -> Table:
    """Return the table of the seconds of a sample."""
    case, more = records[0].case, records[0].more
    notes = [
        f"{case['samples']:,} pictures of 500 × 375 pixels, stored at {case['kept_side']}, "
        f"cropped to {case['input_size']}; batches of {case['batch']}",
        f"storage: {case['rate']}, {case['latency_seconds'] * 1e3:g} ms a request",
        f"level 2 takes {more['memory_bytes']:,} bytes for all ranks of a node, "
        f"{more['memory_ratio']:.3f} times its samples",
    ]
    return against_baseline(records, "µs a sample", 1e6, "µs", notes)
