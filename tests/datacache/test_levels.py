"""Right samples from damaged levels, stand-ins for what cannot be decoded, levels that are done without."""

import io
import shutil
import warnings

import numpy as np
import pytest
from PIL import Image

from datacache import BadSample, CacheDirs, StorageFailed, capacity, stand_in_lines
from datacache.levels import Levels
from datacache.manifest import Manifest, Texts
from datacache.preprocessing import Preprocessing
from datacache.sources import Source

SAMPLES, SHAPE = 50, (20, 16, 3)
EVERYTHING = np.arange(SAMPLES)


class Pictures(Source):
    """PNG files of which some are damaged at the source; label ``i`` mod 3."""

    payload = "image"

    def __init__(self, bad=()):
        generator = np.random.default_rng(8)
        self.images = generator.integers(0, 256, (SAMPLES, *SHAPE)).astype(np.uint8)
        self.payloads = [png(image) for image in self.images]
        for number in bad:
            self.payloads[number] = b"no picture at all"
        self.reads = 0
        self.fails = False

    def scan(self, report=None):
        return Manifest(
            payload="image",
            files=Texts.of(f"class{i % 3}/{i}.png" for i in range(SAMPLES)),
            stamps=np.zeros(SAMPLES, np.uint64),
            file=np.arange(SAMPLES, dtype=np.int32),
            start=np.zeros(SAMPLES, np.int64),
            sizes=np.array([len(payload) for payload in self.payloads]),
            labels=np.arange(SAMPLES) % 3,
        )

    def read(self, manifest, ids):
        if self.fails:
            raise StorageFailed("storage is gone")
        self.reads += len(ids)
        return [self.payloads[number] for number in ids.tolist()]

    def check(self, manifest):
        pass


def png(image):
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def levels_of(source, dirs=CacheDirs()):  # noqa: B008 - it is immutable
    return Levels(source, source.scan(), Preprocessing("image", 16), EVERYTHING, dirs)


def both(tmp_path):
    return CacheDirs(tmp_path / "disk", tmp_path / "memory")


def expected_of(source, ids=EVERYTHING):
    return [Preprocessing("image", 16).apply(source.payloads[number]) for number in ids.tolist()]


def same(samples, expected):
    return all(np.array_equal(one, other) for one, other in zip(samples, expected, strict=True))


def flip_bits(folder, payloads, flips):
    """Flip one bit in as many payloads, or fewer, in the file of records below a folder; return which."""
    (path,) = folder.glob("gen-*/records")
    data, generator = bytearray(path.read_bytes()), np.random.default_rng(1)
    hit = set(generator.integers(len(payloads), size=flips).tolist())
    for number in hit:
        place = data.index(payloads[number]) + generator.integers(len(payloads[number]))
        data[place] ^= 1 << generator.integers(8)
    path.write_bytes(data)
    return hit


@pytest.mark.parametrize("where", ["memory", "disk", "both"])
def test_damaged_records_are_read_from_the_next_level_and_repaired(tmp_path, where):
    source = Pictures()
    expected = expected_of(source)
    levels_of(source, both(tmp_path)).read(EVERYTHING)
    stored = {"memory": [each.tobytes() for each in expected], "disk": source.payloads}
    in_memory, on_disk = (
        flip_bits(tmp_path / level, payloads, 60) if where in (level, "both") else set()
        for level, payloads in stored.items()
    )
    before = source.reads
    levels = levels_of(source, both(tmp_path))
    assert same(levels.read(EVERYTHING), expected)
    assert levels.counts.damaged_in_memory == len(in_memory)
    assert source.reads - before == len(in_memory & on_disk) == levels.counts.damaged_on_disk
    assert levels.payloads(EVERYTHING) == source.payloads
    assert source.reads - before == len(on_disk)

    after = levels_of(source, both(tmp_path))
    assert same(after.read(EVERYTHING), expected)
    assert after.payloads(EVERYTHING) == source.payloads
    assert source.reads - before == len(on_disk)
    assert after.counts.damaged_in_memory == after.counts.damaged_on_disk == 0


def test_both_levels_serve_without_central_storage(tmp_path):
    source = Pictures()
    levels_of(source, both(tmp_path)).read(EVERYTHING)
    source.fails = True
    levels = levels_of(source, both(tmp_path))
    for ids in (EVERYTHING[::-1], np.array([3, 3, 1, 3])):
        assert same(levels.read(ids), expected_of(source, ids))
    with pytest.raises(StorageFailed, match="storage is gone"):
        levels_of(source, CacheDirs(tmp_path / "elsewhere")).read(EVERYTHING)


def test_what_cannot_be_decoded_is_replaced_by_the_next_of_its_label_on_every_rank(tmp_path):
    source = Pictures(bad=[4, 7, 49])
    for dirs in (CacheDirs(), both(tmp_path), both(tmp_path)):  # the last from what the one before kept
        levels = levels_of(source, dirs)
        samples = levels.read(EVERYTHING)
        # of label 1, 4 and 7 are followed by 10; after 49, the last, the first is 1
        assert levels.counts.stand_ins == {4: 10, 7: 10, 49: 1}
        for bad, other in levels.counts.stand_ins.items():
            assert np.array_equal(samples[bad], samples[other])
    assert stand_in_lines(source.scan(), [{7: 10}, {4: 10, 7: 10}]) == [
        "class1/4.png (sample 4) cannot be decoded: class1/10.png (sample 10) stood in",
        "class1/7.png (sample 7) cannot be decoded: class1/10.png (sample 10) stood in",
    ]


def test_a_label_without_any_picture_is_named():
    source = Pictures(bad=range(2, SAMPLES, 3))
    with pytest.raises(BadSample, match=r"^sample 5 \(class2/5\.png\): .*; nor can others of label 2$"):
        levels_of(source).read(np.array([5]))


def test_a_folder_that_cannot_be_written_is_done_without_and_said_once(tmp_path):
    (tmp_path / "file").touch()
    source = Pictures()
    with pytest.warns(UserWarning, match="level 2 of the cache is not used: .*file") as warned:
        levels = levels_of(source, CacheDirs(tmp_path / "disk", tmp_path / "file"))
        for _ in range(2):
            assert same(levels.read(EVERYTHING), expected_of(source))
    assert len(warned) == 1
    assert source.reads == SAMPLES  # the disk is there


def test_a_cache_without_room_is_done_without_and_said_once_for_all_phases_and_levels(tmp_path, monkeypatch):
    full = capacity.Limit("a small disk", 1000, "buy a larger one")
    monkeypatch.setattr(capacity, "_filesystem_limit", lambda path: full)
    source = Pictures()
    dirs = both(tmp_path)
    with pytest.warns(UserWarning, match="level 1 of the cache is not used: .*a small disk") as warned:
        for _phase in range(3):  # of two levels each, on one filesystem
            levels = levels_of(source, dirs)
            assert same(levels.read(EVERYTHING), expected_of(source))
    assert len(warned) == 1
    assert list(tmp_path.rglob("records")) == []
    with warnings.catch_warnings():  # of the ranks of a node one warns
        warnings.simplefilter("error")
        levels_of(source, CacheDirs(tmp_path / "disk", tmp_path / "memory", warns_when_full=False))


def test_folders_removed_while_they_are_filled_are_said_once_and_training_goes_on(tmp_path):
    source = Pictures()
    levels = levels_of(source, both(tmp_path))
    levels.read(EVERYTHING[:10])
    shutil.rmtree(tmp_path / "disk")
    shutil.rmtree(tmp_path / "memory")
    with pytest.warns(UserWarning, match="nothing more is stored here .it was removed.") as warned:
        for start in range(0, SAMPLES, 5):
            ids = EVERYTHING[start : start + 5]
            assert same(levels.read(ids), expected_of(source, ids))
    assert len(warned) == 1
    levels.close()
    assert list(tmp_path.rglob("*")) == []
    assert same(levels_of(source, both(tmp_path)).read(EVERYTHING), expected_of(source))
