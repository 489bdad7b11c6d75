"""``cloudtrain bench cache``: batches from the levels of the cache, against reading from storage."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from datacache import Augmentation, CacheDirs, DataCache, ImageFolder, Manifest, Order, Preprocessing
from datacache.batches import Batch
from training.bench.record import Record, Seconds, WrongResult, against_baseline, alternate, elapsed, report
from training.commands.printing import Table
from training.process.job import usage_error

RUNS, QUICK_RUNS = 5, 3
BATCH, SIDE, INPUT = 256, 128, 96
STORED_BATCHES, QUICK_STORED_BATCHES = 10, 2  # in a run, from storage
CACHED_BATCHES, QUICK_BATCHES = 40, 10  # and from the levels
CROP = Augmentation(INPUT, mean=(123.7, 116.3, 103.5), std=(58.4, 57.1, 57.4))
TOUCHED_BYTES = 1 << 29  # more than a first epoch writes to both levels
LEVELS, STORAGE = "levels", "storage"
FIRST, FIRST_UNCACHED = "first epoch", "first epoch without a cache"

Run = Callable[[int], int]  # of an epoch: makes batches, returns how many samples


@dataclass(frozen=True)
class Setting:
    """Pictures at a URL, and the folders of the levels."""

    url: str
    manifest: Manifest
    dirs: CacheDirs
    quick: bool

    def cache(self, dirs: CacheDirs | None = None, threads: int = 2) -> DataCache:
        """Return a cache of the pictures, with levels in these folders."""
        return DataCache(
            ImageFolder(self.url),
            manifest=self.manifest,
            preprocessing=Preprocessing(self.manifest.payload, SIDE),
            dirs=dirs or CacheDirs(),
            threads=threads,
        )

    def batches(self, cache: DataCache, count: int, epoch: int) -> Iterator[Batch]:
        """Yield so many batches, up to the end of an epoch: none is begun ahead that is not yielded."""
        steps = self.order.steps()
        start = -count % steps
        for each in range(epoch, epoch + (start + count) // steps):
            yield from cache.batches(self.order, CROP, 0, 1, each, start=start if each == epoch else 0)

    def read(self, cache: DataCache, count: int, epoch: int) -> int:
        """Read so many batches; return how many samples they have."""
        return sum(len(each.labels) for each in self.batches(cache, count, epoch))

    def uncached(self, epoch: int) -> int:
        return self.read(self.cache(), self.stored_batches, epoch)

    def first_epoch(self, folders: ExitStack, epoch: int) -> int:
        """Read batches through a cache with empty folders, which ``folders`` removes later."""
        cache = self.cache(folders.enter_context(temporary_levels()))
        taken = self.read(cache, self.stored_batches, epoch)
        cache.close()
        return taken

    @property
    def order(self) -> Order:
        return Order(len(self.manifest), shards=1, global_batch=BATCH, seed=1)

    @property
    def stored_batches(self) -> int:  # of one epoch: the first fills the levels
        return min(self.order.steps(), QUICK_STORED_BATCHES if self.quick else STORED_BATCHES)

    @property
    def cached_batches(self) -> int:
        return QUICK_BATCHES if self.quick else CACHED_BATCHES

    @property
    def runs(self) -> int:
        return QUICK_RUNS if self.quick else RUNS


@contextmanager
def temporary_levels() -> Iterator[CacheDirs]:
    """Yield empty folders for both levels, which are removed at the end."""
    with TemporaryDirectory(prefix="cloudtrain-bench-") as disk:
        memory = Path("/dev/shm") / Path(disk).name  # noqa: S108 - it is to be in memory
        try:
            yield CacheDirs(Path(disk), memory)
        finally:
            shutil.rmtree(memory, ignore_errors=True)


def bench(as_json: bool, *, source: str, quick: bool) -> int:
    """Print what was measured and return the exit status."""
    try:
        manifest = ImageFolder(source).scan()
    except (OSError, ValueError) as error:
        usage_error(f"{source}: {error}")
    with temporary_levels() as dirs:
        records = measure(Setting(source, manifest, dirs, quick))
        return report([records], as_json=as_json, show=lambda each: table(each).print())


def measure(setting: Setting, more: Mapping[str, Run] | None = None) -> Iterator[Record]:
    """Yield the records; ``more``: other ways to read cached samples, peers of the levels."""
    cached = setting.cache(setting.dirs)
    cached.fill()
    _check(setting, cached)
    reading: dict[str, Run] = {
        LEVELS: partial(setting.read, cached, setting.cached_batches),
        STORAGE: setting.uncached,
        **(more or {}),
    }
    with ExitStack() as folders:  # to remove files is no part of an epoch
        first: dict[str, Run] = {
            FIRST: partial(setting.first_epoch, folders),
            FIRST_UNCACHED: setting.uncached,
        }
        seconds = seconds_a_sample(reading, setting.runs)
        seconds |= seconds_a_sample(first, setting.runs, _elapsed_in_touched_memory)
    pairs = [(LEVELS, peer) for peer in reading if peer != LEVELS] + [(FIRST, FIRST_UNCACHED)]
    for subject, peer in pairs:
        yield record(setting, subject, seconds[subject]).beside(peer, seconds[peer])


def record(setting: Setting, subject: str, seconds: Seconds) -> Record:
    """Return the record of a subject."""
    sizes = {"samples": len(setting.manifest), "batch": BATCH, "kept_side": SIDE, "input_size": INPUT}
    case = {**sizes, "quick": setting.quick, "unit": "seconds a sample"}
    return Record("cache", case, subject, seconds, bytes=None)


def _check(setting: Setting, cached: DataCache) -> None:
    """Raise ``WrongResult`` unless a batch from the levels is bitwise that from storage."""
    ours, stored = (next(setting.batches(cache, 1, 0)) for cache in (cached, setting.cache()))
    if not np.array_equal(ours.images, stored.images) or not np.array_equal(ours.labels, stored.labels):
        raise WrongResult("a batch from the levels differs from that of storage")


def _elapsed_in_touched_memory(run: Run, epoch: int) -> float:
    """Return the seconds of a run for which the machine has memory.

    A virtual machine may return free memory to its host; the first write to each page is then three to five
    times as expensive as any later one, which is no cost of a cache.
    """
    np.ones(TOUCHED_BYTES, np.uint8)
    return elapsed(run, epoch)


def seconds_a_sample(
    candidates: Mapping[str, Run], runs: int, measure: Callable[[Run, int], float] = elapsed
) -> dict[str, Seconds]:
    """Return the seconds that a sample takes in each."""
    sizes = {name: run(0) for name, run in candidates.items()}  # the same in each run
    whole = alternate(candidates, range(1, 1000), runs, measure)
    return {name: seconds.per(sizes[name]) for name, seconds in whole.items()}


def table(records: Sequence[Record]) -> Table:
    """Return the table of the seconds of a sample."""
    case = records[0].case
    notes = [
        f"{case['samples']:,} pictures, stored with a shorter side of {case['kept_side']} pixels, "
        f"cropped to {case['input_size']}; batches of {case['batch']}"
    ]
    return against_baseline(records, "µs a sample", 1e6, "µs", notes)
