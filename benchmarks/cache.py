"""Batches from the levels of the cache, beside throttled storage, ``tf.data``, and one thread.

python -m benchmarks.cache [--samples 600] [--json]
"""

import argparse
import functools
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.pictures import generate
from benchmarks.throttled import serve
from datacache import Augmentation, ImageFolder, Manifest
from training.bench import cache
from training.bench.cache import BATCH, CROP, SIDE, Run, Setting, temporary_levels
from training.bench.record import Record, report

SAMPLES = 10_000
GBIT, LATENCY_SECONDS = 1, 2e-3
FILES, CACHED, ONE_THREAD = "tf.data from files", "tf.data cached in memory", "levels, one thread"
CHANNELS = 3
PREFETCH = 2  # batches; with AUTOTUNE it makes many more while others are measured


def records(folder: Path, setting: Setting) -> Iterator[Record]:
    """Yield the records of the levels beside storage, ``tf.data`` and one thread."""
    cached = decoded_once(folder, setting.manifest, SIDE, CROP, BATCH)
    one_thread = functools.cache(lambda: setting.cache(setting.dirs, threads=1))  # when the levels are full
    more = {
        FILES: _of_tensorflow(decoded_each_time(folder, setting.manifest, CROP, BATCH), setting),
        CACHED: _of_tensorflow(cached, setting, skip=len(setting.manifest)),
        ONE_THREAD: lambda epoch: setting.read(one_thread(), setting.cached_batches, epoch),
    }
    throttled = {"rate": f"{GBIT}gbit", "latency_seconds": LATENCY_SECONDS}
    for each in cache.measure(setting, more):
        yield replace(each, case=each.case | throttled)


def _of_tensorflow(dataset: Any, setting: Setting, skip: int = 0) -> Run:
    """Return runs over a data set that never ends, after the first samples."""
    batches = iter(dataset)
    for _ in range(-(-skip // BATCH)):
        next(batches)
    return lambda epoch: sum(int(next(batches)[1].shape[0]) for _ in range(setting.cached_batches))


def decoded_each_time(folder: Path, manifest: Manifest, crop: Augmentation, batch: int) -> Any:
    """Return batches of crops, each decoded from its file, only the part that is cropped.

    This input pipeline of tf.data and the next are as its guides recommend.
    """

    def picture(path: Any, label: Any) -> Any:
        encoded = tf.io.read_file(path)
        box = _box(tf.image.extract_jpeg_shape(encoded), crop)
        return _finished(tf.image.decode_and_crop_jpeg(encoded, box, channels=CHANNELS), crop), label

    return _batches(_files(folder, manifest).repeat().map(picture, tf.data.AUTOTUNE), batch)


def decoded_once(folder: Path, manifest: Manifest, side: int, crop: Augmentation, batch: int) -> Any:
    """Return batches of crops of pictures that are shrunk once and stored by ``cache()``."""

    def small(path: Any, label: Any) -> Any:
        pixels = tf.image.decode_jpeg(tf.io.read_file(path), channels=CHANNELS)
        height, width = tf.shape(pixels)[0], tf.shape(pixels)[1]
        scale = side / tf.minimum(height, width)
        sides = [tf.cast(tf.round(tf.cast(each, tf.float64) * scale), tf.int32) for each in (height, width)]
        return tf.cast(tf.image.resize(pixels, sides, antialias=True), tf.uint8), label

    def cut(pixels: Any, label: Any) -> Any:
        top, left, height, width = tf.unstack(_box(tf.shape(pixels), crop))
        return _finished(pixels[top : top + height, left : left + width], crop), label

    small_pictures = _files(folder, manifest).map(small, tf.data.AUTOTUNE).cache()
    return _batches(small_pictures.shuffle(2048).repeat().map(cut, tf.data.AUTOTUNE), batch)


def _files(folder: Path, manifest: Manifest) -> Any:
    paths = [str(folder / manifest.files[file]) for file in manifest.file.tolist()]
    order = np.random.default_rng(1).permutation(len(paths))
    return tf.data.Dataset.from_tensor_slices((np.array(paths)[order], manifest.labels[order]))


def _box(shape: Any, crop: Augmentation) -> Any:
    """Return top, left, height and width of a random crop."""
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        shape,
        tf.zeros((1, 0, 4)),
        min_object_covered=0.0,
        aspect_ratio_range=crop.aspect,
        area_range=crop.area,
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    return tf.stack([begin[0], begin[1], size[0], size[1]])


def _finished(pixels: Any, crop: Augmentation) -> Any:
    image = tf.image.resize(pixels, (crop.input_size, crop.input_size))
    image = tf.image.random_flip_left_right(image)
    return (image - tf.constant(crop.mean)) / tf.constant(crop.std)


def _batches(pictures: Any, batch: int) -> Any:
    return pictures.batch(batch, drop_remainder=True).prefetch(PREFETCH)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cloudtrain-pictures-") as name, temporary_levels() as dirs:
        folder = Path(name) / "pictures"
        generate(folder, given.samples)
        with serve(folder, gbit=GBIT, latency_seconds=LATENCY_SECONDS) as url:
            setting = Setting(url, ImageFolder(url).scan(), dirs, quick=False)
            measured = records(folder, setting)
            return report([measured], as_json=given.json, show=lambda each: cache.table(each).print())


if __name__ == "__main__":
    sys.exit(main())
