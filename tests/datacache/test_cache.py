"""Batches through both levels: what they hold, in which order, and what is read for them."""

import os

import numpy as np
import pytest

from datacache import (
    Arrays,
    CacheDirs,
    CentreCrop,
    Collation,
    DataCache,
    EvaluationOrder,
    Order,
    Preprocessing,
    manifest_of,
)

SAMPLES = 23


class Counted(Arrays):
    """Image ``i`` is all ``i``, label ``100 + i``; counts what is read."""

    def __init__(self, samples=SAMPLES):
        images = np.broadcast_to(np.arange(samples, dtype=np.uint8)[:, None, None, None], (samples, 8, 8, 1))
        super().__init__(images.copy(), np.arange(samples) + 100)
        self.reads, self.scans = np.zeros(samples, int), 0

    def read(self, manifest, ids):
        np.add.at(self.reads, ids, 1)
        return super().read(manifest, ids)

    def scan(self, *words):
        self.scans += 1
        return super().scan(*words)


def order_of(global_batch=6, shards=1, samples=SAMPLES, remainder="drop"):
    return Order(samples, shards, global_batch, seed=7, remainder=remainder)


def evaluated(cache, crop, rank, world_size, *, batch_size):
    order = EvaluationOrder(len(cache), batch_size, world_size)
    return cache.batches(order, crop, rank, world_size, epoch=0)


@pytest.fixture(params=["none", "disk", "memory", "both"])
def dirs(request, tmp_path):
    return CacheDirs(
        disk=tmp_path / "disk" if request.param in ("disk", "both") else None,
        memory=tmp_path / "memory" if request.param in ("memory", "both") else None,
    )


@pytest.mark.parametrize("input_size", [1, 6, 8])
def test_batches_hold_the_images_with_their_own_labels(dirs, input_size):
    cache = DataCache(Counted(), preprocessing=Preprocessing("array", input_size), dirs=dirs)
    order = order_of()
    crop = CentreCrop(input_size, dtype="uint8")
    for _ in range(2):  # read through, then from what is kept
        batches = list(cache.batches(order, crop, rank=1, world_size=2, epoch=5))
        assert len(batches) == 3
        for step, batch in enumerate(batches):
            assert batch.ids.tolist() == order.batch(5, step, 1, 2).tolist()
            assert batch.images.shape == (3, input_size, input_size, 1)
            assert batch.images.dtype == np.uint8
            assert (batch.labels == batch.ids + 100).all()
            assert (batch.images == batch.ids[:, None, None, None]).all()


def test_each_sample_is_read_once_by_all_ranks_together_in_all_epochs(tmp_path):
    dirs = CacheDirs(tmp_path / "disk", tmp_path / "memory")
    source, order = Counted(), order_of(remainder="pad")
    ranks = [DataCache(source, dirs=dirs) for _ in range(2)]
    for epoch in range(4):
        for rank, cache in enumerate(ranks):
            list(cache.batches(order, CentreCrop(8), rank, 2, epoch))
    assert source.reads.max() <= 2  # the last batch is padded by samples that another rank may have read
    assert (source.reads == 1).sum() >= SAMPLES - 1
    before = source.reads.sum()
    again = DataCache(source, dirs=dirs)
    list(again.batches(order, CentreCrop(8), 0, 1, epoch=9))
    assert source.reads.sum() == before
    assert again.counts.memory == 24
    assert again.counts.storage == 0


def test_what_memory_has_lost_comes_from_disk(tmp_path):
    source, order = Counted(), order_of()
    disk = CacheDirs(tmp_path / "disk", tmp_path / "memory")
    DataCache(source, dirs=disk).fill()
    before = source.reads.sum()
    cache = DataCache(source, dirs=CacheDirs(tmp_path / "disk", tmp_path / "other memory"))
    list(cache.batches(order, CentreCrop(8), 0, 1, epoch=0))
    assert source.reads.sum() == before
    assert (cache.counts.disk, cache.counts.memory) == (18, 0)


def test_an_epoch_goes_on_where_it_is_told_to_and_nothing_before_is_read():
    source, order = Counted(), order_of()
    cache = DataCache(source)
    whole = [batch.ids.tolist() for batch in cache.batches(order, CentreCrop(8), 0, 2, epoch=3)]
    source.reads[:] = 0
    rest = [batch.ids.tolist() for batch in cache.batches(order, CentreCrop(8), 0, 2, epoch=3, start=2)]
    assert rest == whole[2:]
    assert np.flatnonzero(source.reads).tolist() == sorted(rest[0])


def test_a_node_keeps_its_part_and_reads_others_through(tmp_path):
    source, order = Counted(24), order_of(shards=2, samples=24)
    part = order.part([0], 2)
    cache = DataCache(source, part=part, dirs=CacheDirs(tmp_path / "disk", tmp_path / "memory"))
    cache.fill()
    assert np.flatnonzero(source.reads).tolist() == part.tolist() == list(range(12))
    for _ in range(2):
        list(cache.batches(order, CentreCrop(8), 1, 2, epoch=0))  # of the other node
    assert source.reads[12:].tolist() == [2] * 12


def test_filling_tells_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("datacache.cache.FILL_SAMPLES", 5)
    cache, told = DataCache(Counted(), dirs=CacheDirs(memory=tmp_path)), []
    cache.fill(lambda done, total: told.append((done, total)))
    assert told[-1] == (SAMPLES, SAMPLES)
    assert len(told) == 5
    told.clear()
    cache.fill(lambda done, total: told.append((done, total)))
    assert told == [(0, 0)]


def test_ranks_that_fill_one_after_the_other_leave_no_sample_out(tmp_path):
    for part, left in enumerate([15, 7, 0]):
        cache = DataCache(Counted(), dirs=CacheDirs(memory=tmp_path))
        cache.fill(part=part, of=3)
        assert len(cache._levels.missing()) == left
        cache.close()


def test_what_a_caller_does_to_a_batch_does_not_reach_the_cache(tmp_path):
    cache = DataCache(Counted(), dirs=CacheDirs(memory=tmp_path))
    for _ in range(2):
        for batch in evaluated(cache, CentreCrop(8, dtype="uint8"), 0, 1, batch_size=SAMPLES):
            assert (batch.images == batch.ids[:, None, None, None]).all()
            batch.images[...] = 255


def test_a_closed_cache_has_no_open_files_and_reads_from_the_source(tmp_path):
    def open_files():
        files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return [path for path in files if path.startswith(str(tmp_path))]

    source = Counted()
    cache = DataCache(source, dirs=CacheDirs(tmp_path / "disk", tmp_path / "memory"))
    cache.fill()
    assert len(open_files()) >= 4  # of each level the records and the lock
    cache.close()
    assert open_files() == []
    for batch in evaluated(cache, CentreCrop(8, dtype="uint8"), 0, 1, batch_size=SAMPLES):
        assert (batch.images == batch.ids[:, None, None, None]).all()
    assert (source.reads == 2).all()


def test_a_data_set_of_tensorflow_has_the_same_batches():
    cache, order, crop = DataCache(Counted()), order_of(remainder="pad"), CentreCrop(8, dtype="uint8")

    def batches():
        return cache.batches(order, crop, 0, 1, epoch=2)

    elements = list(cache.dataset(batches, crop).as_numpy_iterator())
    expected = list(batches())
    assert len(elements) == len(expected) == 4
    for (images, labels, counts), batch in zip(elements, expected, strict=True):
        assert np.array_equal(images, batch.images)
        assert np.array_equal(labels, batch.labels)
        assert np.array_equal(counts, batch.counts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads: expected at least 1, got 0"),
        ({"prefetch": 0}, "prefetch: expected at least 1, got 0"),
        ({}, "order: expected one of 23 samples, got one of 24"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataCache(Counted(), **options).batches(order_of(samples=24), CentreCrop(8), 0, 1, 0)


# ------------------------------------------------------------------------- collations of one's own


class Sums(Collation):
    """The sum of each sample's bytes, and where the batch is."""

    def arrays(self, samples, labels, spec, pools):
        sums = pools.take((len(samples),), "int64")
        sums[:] = [sample.astype(np.int64).sum() for sample in samples]
        place = [spec.epoch, spec.step, spec.rank, spec.world_size, spec.seed]
        return sums, labels, np.array([place] * len(samples))


def test_epochs_use_the_same_memory_while_the_collation_is_the_same():
    cache, order, sums = DataCache(Counted(), prefetch=1), order_of(), Sums()

    def places(collation):
        return {
            batch.arrays[0].ctypes.data
            for epoch in range(3)
            for batch in cache.batches(order, collation, rank=0, world_size=2, epoch=epoch)
        }

    first = places(sums)
    assert len(first) <= 3  # of the batch that is used, the next one, and one that is being built
    assert places(sums) <= first
    kept = cache._pools
    places(Sums())
    assert cache._pools is not kept


def test_a_collation_gets_the_samples_and_the_place_of_its_batch(dirs):
    cache, order = DataCache(Counted(), dirs=dirs), order_of()
    for _ in range(2):  # read through, then from what is kept
        for step, batch in enumerate(cache.batches(order, Sums(), rank=1, world_size=2, epoch=4, start=1), 1):
            sums, labels, places = batch.arrays
            assert sums.tolist() == (batch.ids * 64).tolist()
            assert (labels == batch.ids + 100).all()
            assert places.tolist() == [[4, step, 1, 2, 7]] * 3
    cache.close()


# --------------------------------------------------------------------------- manifests that are kept


def test_a_source_is_scanned_once_until_it_changes(tmp_path):
    source = Counted()
    first = manifest_of(source, tmp_path, "digits training")
    assert manifest_of(source, tmp_path, "digits training").fingerprint == first.fingerprint
    assert source.scans == 1
    assert manifest_of(source, tmp_path, "others") is not None
    assert source.scans == 2
    changed = Counted(SAMPLES + 1)
    assert len(manifest_of(changed, tmp_path, "digits training")) == SAMPLES + 1
    assert changed.scans == 1
    for path in tmp_path.glob("manifest-*.npz"):
        path.write_bytes(path.read_bytes()[:100])  # damaged: made anew
    assert len(manifest_of(source, tmp_path, "others")) == SAMPLES
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file"):  # none is given, and none can be made there
        manifest_of(source, folder, "others")
    assert source.scans == 5
