"""Generated data looks like ImageNet to a loader: sizes, shapes, names, framing."""

import io

import numpy as np
import pytest
from PIL import Image

from benchmarks import pictures as synthetic
from benchmarks.pictures import generate, sample_jpeg


def test_samples_are_jpegs_of_500_by_375_pixels_and_about_110_kb():
    jpegs = [sample_jpeg(sample, seed=0) for sample in range(20)]
    for jpeg in jpegs:
        picture = Image.open(io.BytesIO(jpeg))
        assert (picture.format, picture.mode, picture.size) == ("JPEG", "RGB", (500, 375))
        assert 40_000 < len(jpeg) < 160_000
    assert 100_000 < np.mean([len(jpeg) for jpeg in jpegs]) < 120_000


def test_a_folder_for_each_class_holds_its_samples(tmp_path):
    total = generate(tmp_path / "data", 12, classes=5, seed=3)
    files = sorted(path for path in (tmp_path / "data").rglob("*") if path.is_file())
    names = [path.relative_to(tmp_path / "data").as_posix() for path in files]
    assert names == sorted(f"class_{sample % 5}/{sample:02}.jpg" for sample in range(12))
    for path in files:
        assert path.read_bytes() == sample_jpeg(int(path.stem), 3)
    assert total == sum(path.stat().st_size for path in files)


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(synthetic, "SAMPLES_OF_A_SHARD", 3)


@pytest.mark.usefixtures("small_shards")
def test_tensorflow_reads_the_shards_as_imagenet_s(tmp_path):
    import tensorflow as tf

    total = generate(tmp_path, 7, classes=200, form="tfrecord", seed=3)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == [f"train-{shard:05}-of-00003" for shard in range(3)]
    keys = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
        "image/class/text": tf.io.FixedLenFeature([], tf.string),
        "image/filename": tf.io.FixedLenFeature([], tf.string),
        "image/format": tf.io.FixedLenFeature([], tf.string),
        "image/height": tf.io.FixedLenFeature([], tf.int64),
        "image/width": tf.io.FixedLenFeature([], tf.int64),
    }
    records = tf.data.TFRecordDataset([str(path) for path in files])  # verifies both checksums
    samples = [tf.io.parse_single_example(record, keys) for record in records]
    assert [sample["image/encoded"].numpy() for sample in samples] == [sample_jpeg(i, 3) for i in range(7)]
    assert [int(sample["image/class/label"]) for sample in samples] == list(range(1, 8))
    assert [sample["image/class/text"].numpy() for sample in samples] == [
        f"class_{i}".encode() for i in range(7)
    ]
    assert {sample["image/format"].numpy() for sample in samples} == {b"JPEG"}
    assert {(int(sample["image/height"]), int(sample["image/width"])) for sample in samples} == {(375, 500)}
    assert total == sum(len(sample["image/encoded"].numpy()) for sample in samples)
