"""Synthetic data of the size of ImageNet's: any number of JPEGs of 500 × 375 pixels and about 110 KB.

They are random crops of the two photographs of scikit-learn, at random scales, mirrored or not, with random
noise. A sample depends only on the seed and its number, not on the format in which it is stored.
"""

import functools
import io
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

WIDTH, HEIGHT = 500, 375
FORMS = ("image_folder", "tfrecord")
SAMPLES_OF_A_SHARD = 1250  # as in ImageNet's 1,024 shards

# Measured: with noise of 2 to 16 grey levels, this quality gives 110 KB on average, from 45 to 145 KB.
QUALITY = 95
NOISE_LEVELS = (2.0, 16.0)

Pixels = npt.NDArray[np.uint8]


def generate(
    folder: str | os.PathLike[str],
    samples: int,
    *,
    classes: int = 10,
    form: str = "image_folder",
    seed: int = 0,
) -> int:
    """Write ``samples`` JPEGs into a folder, which must be empty or missing; return the sum of their bytes.

    Sample ``i`` has the label ``i mod classes``. ``form`` "image_folder": files ``class_L/i.jpg``, with
    leading zeros, so that sorting by name sorts by number; "tfrecord": ``tf.train.Example``s with ImageNet's
    keys, labels from 1 on, in files ``train-00000-of-0000N``.
    """
    if form not in FORMS:
        raise ValueError(f"form: expected one of {', '.join(FORMS)}, got {form!r}")
    if samples < 1 or classes < 1:
        raise ValueError(f"samples, classes: expected 1 or more of each, got {samples} and {classes}")
    root = Path(folder)
    if root.exists() and any(root.iterdir()):
        raise ValueError(f"folder: expected an empty or missing one, got {root}")
    root.mkdir(parents=True, exist_ok=True)
    if form == "tfrecord":
        return _write_shards(root, samples, classes, seed)
    return _write_folders(root, samples, classes, seed)


def sample_jpeg(sample: int, seed: int) -> bytes:
    """Return the JPEG of one sample."""
    random = np.random.default_rng([seed, sample])
    photographs = _photographs()
    picture = photographs[random.integers(len(photographs))]
    picture = picture.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC, box=_crop(picture, random))
    pixels = np.asarray(picture)[:, :: random.choice((-1, 1))]
    buffer = io.BytesIO()
    Image.fromarray(_noisy(pixels, random)).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def _crop(picture: Image.Image, random: np.random.Generator) -> tuple[float, float, float, float]:
    """Return a random box with the aspect ratio of a sample: left, upper, right, lower."""
    largest = min(picture.width / WIDTH, picture.height / HEIGHT)
    scale = largest * random.uniform(0.3, 1)
    left = random.uniform(0, picture.width - scale * WIDTH)
    upper = random.uniform(0, picture.height - scale * HEIGHT)
    return left, upper, left + scale * WIDTH, upper + scale * HEIGHT


def _noisy(pixels: Pixels, random: np.random.Generator) -> Pixels:
    """Return the pixels plus a random window of the noise, of random strength."""
    row, column = random.integers(0, (HEIGHT, WIDTH))
    noise = _noise()[row : row + HEIGHT, column : column + WIDTH]
    return np.clip(pixels + noise * np.float32(random.uniform(*NOISE_LEVELS)), 0, 255).astype(np.uint8)


@functools.cache
def _photographs() -> tuple[Image.Image, ...]:
    from sklearn.datasets import load_sample_images  # takes a second to import

    return tuple(Image.fromarray(pixels) for pixels in load_sample_images().images)


@functools.cache
def _noise() -> npt.NDArray[np.float32]:
    """Return normal noise of twice the height and width; drawing it again would cost more than the JPEG."""
    return np.random.default_rng(0).standard_normal((2 * HEIGHT, 2 * WIDTH, 3), np.float32)


def _threads() -> ThreadPoolExecutor:
    """Return one thread a core: resizing, adding and encoding all release the interpreter's lock."""
    _photographs(), _noise()  # cached before the threads use them
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)))


def _write_folders(root: Path, samples: int, classes: int, seed: int) -> int:
    class_digits, digits = len(str(classes - 1)), len(str(samples - 1))
    folders = [root / f"class_{label:0{class_digits}}" for label in range(min(classes, samples))]
    for folder in folders:
        folder.mkdir()

    def write(sample: int) -> int:
        return (folders[sample % classes] / f"{sample:0{digits}}.jpg").write_bytes(sample_jpeg(sample, seed))

    with _threads() as threads:
        return sum(threads.map(write, range(samples)))


def _write_shards(root: Path, samples: int, classes: int, seed: int) -> int:
    import tensorflow as tf  # which takes seconds to import

    shards = math.ceil(samples / SAMPLES_OF_A_SHARD)
    total = 0
    with _threads() as threads:
        for shard in range(shards):
            own = range(samples * shard // shards, samples * (shard + 1) // shards)
            with tf.io.TFRecordWriter(str(root / f"train-{shard:05}-of-{shards:05}")) as file:
                for sample, jpeg in zip(own, threads.map(sample_jpeg, own, [seed] * len(own)), strict=True):
                    file.write(_example(sample, sample % classes, jpeg))
                    total += len(jpeg)
    return total


def _example(sample: int, label: int, jpeg: bytes) -> bytes:
    """Return a serialized ``tf.train.Example`` with the features of ImageNet's that loaders use."""
    import tensorflow as tf

    given: dict[str, bytes | int] = {
        "image/class/label": label + 1,
        "image/class/text": f"class_{label}".encode(),
        "image/encoded": jpeg,
        "image/filename": f"{sample}.jpg".encode(),
        "image/format": b"JPEG",
        "image/height": HEIGHT,
        "image/width": WIDTH,
    }
    features = tf.train.Features()
    for name, value in given.items():
        kind = features.feature[name]
        (kind.bytes_list if isinstance(value, bytes) else kind.int64_list).value.append(value)
    serialized: bytes = tf.train.Example(features=features).SerializeToString(deterministic=True)
    return serialized
