"""Whole caches over a real server: killed processes, failing storage, two jobs, a source that changes."""

import os
import signal
import time

import numpy as np
import pytest

from benchmarks.pictures import generate
from benchmarks.throttled import requests, serve
from datacache import CacheDirs, CentreCrop, DataCache, ImageFolder, Order, Preprocessing, manifest_of
from tests.datacache.processes import FORK
from tests.extent import ALL

SAMPLES, SIDE, RANKS = 60, 48, 2
KILLS = 30 if ALL else 6
ORDER = Order(SAMPLES, 1, 6, seed=3)
CROP = CentreCrop(32, dtype="uint8")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults") / "pictures"
    generate(folder, SAMPLES)
    return folder


def cache_of(url, folder, *, side=SIDE):
    source = ImageFolder(str(url))
    dirs = CacheDirs(folder / "disk", folder / "memory")
    manifest = manifest_of(source, dirs.disk, "pictures")
    return DataCache(source, manifest=manifest, preprocessing=Preprocessing("image", side), dirs=dirs)


def epoch(cache):
    return list(cache.batches(ORDER, CROP, 0, 1, 0))


def assert_equal(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        assert np.array_equal(batch.ids, other.ids)
        assert np.array_equal(batch.images, other.images)
        assert np.array_equal(batch.labels, other.labels)


@pytest.fixture(scope="module")
def right(pictures):
    """The batches of an epoch without any cache."""
    return epoch(DataCache(ImageFolder(str(pictures)), preprocessing=Preprocessing("image", SIDE)))


def train(url, folder, rank, asked):
    """Read three epochs; once ``asked`` requests were made, wait for a killer that comes late."""
    cache = cache_of(url, folder)
    for number in range(3):
        for _ in cache.batches(ORDER, CROP, rank, RANKS, number):
            if requests(url) >= asked:
                signal.pause()
    os._exit(0)


def test_ranks_killed_while_they_fill_the_levels_lose_nothing_that_was_kept(pictures, right, tmp_path):
    generator = np.random.default_rng(11)
    kept_before = interrupted = 0
    with serve(pictures, latency_seconds=0.01) as url:
        for _ in range(KILLS):
            asked = requests(url) + int(generator.integers(1, SAMPLES - kept_before + 2))
            processes = [
                FORK.Process(target=train, args=(url, tmp_path, rank, asked)) for rank in range(RANKS)
            ]
            for process in processes:
                process.start()
            while requests(url) < asked and any(process.is_alive() for process in processes):
                time.sleep(0.01)
            for process in processes:
                process.kill()
            for process in processes:
                process.join(20)
                assert process.exitcode in (0, -signal.SIGKILL)
            cache = cache_of(url, tmp_path)
            kept = SAMPLES - len(cache._levels.missing())
            assert kept >= kept_before
            interrupted += 0 < kept < SAMPLES
            cache.close()
            kept_before = kept
        cache = cache_of(url, tmp_path)
        before = requests(url)
        missing_on_disk = len(cache._levels.disk.store.missing_ids())
        assert_equal(epoch(cache), right)
        assert requests(url) - before == cache.counts.storage == missing_on_disk
        assert cache.counts.damaged_in_memory == cache.counts.damaged_on_disk == 0
        cache.close()
        assert_equal(epoch(cache_of(url, tmp_path)), right)
    assert interrupted > 0, "no kill came between the first sample and the last"


def test_jobs_of_one_node_share_what_is_the_same_and_keep_apart_what_is_not(pictures, right, tmp_path):
    with serve(pictures) as url:
        jobs = [cache_of(url, tmp_path), cache_of(url, tmp_path, side=40), cache_of(url, tmp_path)]
        running = [iter(job.batches(ORDER, CROP, 0, 1, 0)) for job in jobs]
        batches = [list(step) for step in zip(*running, strict=True)]  # step by step, side by side
        assert_equal([step[0] for step in batches], right)
        assert_equal([step[2] for step in batches], right)
        small = DataCache(ImageFolder(str(pictures)), preprocessing=Preprocessing("image", 40))
        assert_equal([step[1] for step in batches], epoch(small))
        before = requests(url)
        later = cache_of(url, tmp_path, side=40)
        epoch(later)
        assert requests(url) == before
        for job in [*jobs, later]:
            job.close()
    assert len(list((tmp_path / "disk").glob("gen-*"))) == 1
    assert len(list((tmp_path / "memory").glob("gen-*"))) == 2
