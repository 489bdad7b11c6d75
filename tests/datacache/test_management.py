"""What lies in a cache's folders: listed, verified, removed when nobody uses it."""

import shutil

import numpy as np
import pytest

from datacache import Arrays, CacheDirs, DataCache, Preprocessing, management, manifest_of
from datacache.sources.base import superseded

IMAGES = np.random.default_rng(1).integers(0, 256, (40, 50, 40, 3)).astype(np.uint8)


def cache_in(folder, **options):
    source = Arrays(IMAGES, np.zeros(len(IMAGES), int))
    return DataCache(source, dirs=CacheDirs(folder / "disk", folder / "memory"), **options)


def kept(folder):
    return [each for place in ("disk", "memory") for each in management.list_folders(folder / place)]


def test_what_is_kept_is_listed(tmp_path):
    assert kept(tmp_path) == []
    cache = cache_in(tmp_path)
    assert [each.state for each in kept(tmp_path)] == ["unfinished", "unfinished"]
    cache.fill()
    first, second = kept(tmp_path)
    assert (first.level, second.level) == (1, 2)
    for each in (first, second):
        assert (each.state, each.samples, each.in_use) == ("complete", 40, True)
        assert each.bytes >= IMAGES.nbytes
        assert each.note["manifest"] == cache.manifest.fingerprint
    cache.close()
    assert [each.in_use for each in kept(tmp_path)] == [False, False]


def test_a_folder_that_another_process_removes_meanwhile_is_not_listed(tmp_path):
    for side in (8, 9):
        cache_in(tmp_path, preprocessing=Preprocessing("array", side)).close()
    listing = management.list_folders(tmp_path / "memory")
    first = next(listing)
    for other in set((tmp_path / "memory").glob("gen-*")) - {first.path}:
        shutil.rmtree(other)
    assert list(listing) == []


def test_damaged_records_are_counted_and_a_folder_that_cannot_be_read_is_told(tmp_path):
    cache_in(tmp_path).fill()
    assert [management.verify(each).damaged for each in kept(tmp_path)] == [0, 0]
    (path,) = (tmp_path / "memory").glob("gen-*/records")
    data = bytearray(path.read_bytes())
    for number in (3, 17):
        data[data.find(IMAGES[number].tobytes()) + 5] ^= 1
    path.write_bytes(data)
    assert [management.verify(each).damaged for each in kept(tmp_path)] == [0, 2]
    next((tmp_path / "disk").glob("gen-*/COMPLETE")).write_text("nonsense")
    assert "COMPLETE" in management.verify(kept(tmp_path)[0]).unreadable


def test_garbage_is_what_nobody_uses_but_complete_samples_of_level_1(tmp_path):
    cache = cache_in(tmp_path)
    cache.fill()
    assert [management.collect_garbage(each) for each in kept(tmp_path)] == [False, False]
    cache.close()
    assert [management.collect_garbage(each) for each in kept(tmp_path)] == [False, True]
    (left,) = kept(tmp_path)
    assert left.level == 1
    assert management.collect_garbage(left, everything=True)
    assert kept(tmp_path) == []


def test_it_is_told_how_much_of_what_was_asked_was_there(tmp_path):
    for _ in range(2):
        cache = cache_in(tmp_path)
        cache._levels.read(np.arange(30))
        cache._levels.read(np.arange(20, 40))
        cache.close()
    disk, memory = kept(tmp_path)
    assert (memory.requested, memory.found) == (100, 10 + 50)
    assert (disk.requested, disk.found) == (40, 0)


def test_what_is_of_a_source_that_has_changed_is_stale_and_garbage(tmp_path):
    dirs = CacheDirs(tmp_path / "disk", tmp_path / "memory")

    def use(images):
        source = Arrays(images, np.zeros(len(images), int))
        cache = DataCache(source, manifest=manifest_of(source, dirs.disk, "pictures"), dirs=dirs)
        cache.fill()
        cache.close()

    def listed():
        before = superseded(dirs.disk)
        return [each for place in (dirs.disk, dirs.memory) for each in management.list_folders(place, before)]

    use(IMAGES)
    assert [each.state for each in listed()] == ["complete", "complete"]
    old = {each.path for each in listed()}
    use(IMAGES[1:])
    assert {each.path for each in listed() if each.state == "stale"} == old
    gone = {each.path for each in listed() if management.collect_garbage(each)}
    assert old <= gone
    assert [each.level for each in listed()] == [1]
    use(IMAGES)  # as it was before
    assert all(each.state != "stale" for each in listed() if each.path in old)


@pytest.mark.parametrize("state", ["unfinished", "unusable"])
def test_what_is_of_no_use_on_disk_is_garbage(tmp_path, state):
    cache = cache_in(tmp_path)
    if state == "unusable":
        cache.fill()
        next((tmp_path / "disk").glob("gen-*/generation.json")).write_text("{}")
    cache.close()
    first = kept(tmp_path)[0]
    assert first.state == state
    assert management.collect_garbage(first)
