"""The peers of ``cloudtrain bench cache``: input pipelines of ``tf.data``, as its guides recommend."""

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from datacache import Augmentation, Manifest

CHANNELS = 3
PREFETCH = 2  # batches; with AUTOTUNE it makes many more while others are measured


def decoded_each_time(folder: Path, manifest: Manifest, crop: Augmentation, batch: int) -> Any:
    """Return batches of crops, each decoded from its file: only the part that is cropped."""

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
    assert crop.mean is not None
    assert crop.std is not None
    return (image - tf.constant(crop.mean)) / tf.constant(crop.std)


def _batches(pictures: Any, batch: int) -> Any:
    return pictures.batch(batch, drop_remainder=True).prefetch(PREFETCH)
