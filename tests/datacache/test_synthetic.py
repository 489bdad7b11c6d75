"""Generated data looks like ImageNet to a loader: sizes, shapes, names."""

import io

import numpy as np
from PIL import Image

from benchmarks.pictures import generate, sample_jpeg


def test_samples_are_jpegs_of_500_by_375_pixels_and_about_110_kb():
    jpegs = [sample_jpeg(sample) for sample in range(20)]
    for jpeg in jpegs:
        picture = Image.open(io.BytesIO(jpeg))
        assert (picture.format, picture.mode, picture.size) == ("JPEG", "RGB", (500, 375))
        assert 40_000 < len(jpeg) < 160_000
    assert 100_000 < np.mean([len(jpeg) for jpeg in jpegs]) < 120_000


def test_a_folder_for_each_class_holds_its_samples(tmp_path):
    generate(tmp_path / "data", 12)
    files = sorted(path for path in (tmp_path / "data").rglob("*") if path.is_file())
    names = [path.relative_to(tmp_path / "data").as_posix() for path in files]
    assert names == sorted(f"class_{sample % 10}/{sample:02}.jpg" for sample in range(12))
    for path in files:
        assert path.read_bytes() == sample_jpeg(int(path.stem))
