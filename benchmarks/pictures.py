"""Synthetic data of the size of ImageNet's: any number of JPEGs of 500 × 375 pixels and about 110 KB.

They are random crops of the two photographs of scikit-learn, at random scales, mirrored or not, with random
noise. A sample depends only on its number.
"""

import functools
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

WIDTH, HEIGHT = 500, 375
CLASSES = 10

# Measured: with noise of 2 to 16 grey levels, this quality gives 110 KB on average, from 45 to 145 KB.
QUALITY = 95
NOISE_LEVELS = (2.0, 16.0)


def generate(folder: str | os.PathLike[str], samples: int) -> None:
    """Write ``samples`` JPEGs into a folder, which must be empty or missing, in a folder for each class.

    Sample ``i`` is ``class_L/i.jpg`` of the class ``i mod 10``, with leading zeros: names sort as numbers do.
    """
    root = Path(folder)
    if root.exists() and any(root.iterdir()):
        raise ValueError(f"folder: expected an empty or missing one, got {root}")
    folders = [root / f"class_{label}" for label in range(min(CLASSES, samples))]
    for each in folders:
        each.mkdir(parents=True)
    digits = len(str(samples - 1))

    def write(sample: int) -> None:
        (folders[sample % CLASSES] / f"{sample:0{digits}}.jpg").write_bytes(sample_jpeg(sample))

    _photographs(), _noise()  # cached before the threads use them
    # One thread a core: resizing, adding and encoding all release the interpreter's lock.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(write, range(samples)))


def sample_jpeg(sample: int) -> bytes:
    random = np.random.default_rng([0, sample])
    photographs = _photographs()
    picture = photographs[random.integers(len(photographs))]
    picture = picture.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC, box=_crop(picture, random))
    pixels = np.asarray(picture)[:, :: random.choice((-1, 1))]
    row, column = random.integers(0, (HEIGHT, WIDTH))
    noise = _noise()[row : row + HEIGHT, column : column + WIDTH]
    noisy = np.clip(pixels + noise * np.float32(random.uniform(*NOISE_LEVELS)), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noisy).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def _crop(picture: Image.Image, random: np.random.Generator) -> tuple[float, float, float, float]:
    """Return a random box with the aspect ratio of a sample: left, upper, right, lower."""
    largest = min(picture.width / WIDTH, picture.height / HEIGHT)
    scale = largest * random.uniform(0.3, 1)
    left = random.uniform(0, picture.width - scale * WIDTH)
    upper = random.uniform(0, picture.height - scale * HEIGHT)
    return left, upper, left + scale * WIDTH, upper + scale * HEIGHT


@functools.cache
def _photographs() -> tuple[Image.Image, ...]:
    from sklearn.datasets import load_sample_images  # takes a second to import

    return tuple(Image.fromarray(pixels) for pixels in load_sample_images().images)


@functools.cache
def _noise() -> npt.NDArray[np.float32]:
    """Return normal noise of twice the height and width; drawing it again would cost more than the JPEG."""
    return np.random.default_rng(0).standard_normal((2 * HEIGHT, 2 * WIDTH, 3), np.float32)
