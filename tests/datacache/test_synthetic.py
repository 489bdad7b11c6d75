"""Generated data looks like ImageNet to a loader: sizes, shapes, names, framing."""

import io

import numpy as np
from PIL import Image

from benchmarks.pictures import generate, sample_jpeg
from datacache.sources import TFRecord


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


def test_shards_hold_the_same_samples_with_labels_from_one_as_imagenet_s_do(tmp_path):
    total = generate(tmp_path, 7, classes=200, form="tfrecord", seed=3)
    source = TFRecord(str(tmp_path), label_offset=1)
    manifest = source.scan()
    payloads = source.read(manifest, np.arange(7))
    assert payloads == [sample_jpeg(sample, 3) for sample in range(7)]
    assert manifest.labels.tolist() == list(range(7))
    assert total == sum(map(len, payloads))
