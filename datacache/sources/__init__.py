r"""Sources of samples: a class for each format of central storage.

>>> import numpy as np
>>> source = Arrays(np.full((3, 2, 2), 7, np.uint8), np.arange(3))
>>> manifest = source.scan()
>>> len(manifest), manifest.shape, source.read(manifest, np.array([2]))
(3, (2, 2, 1), [b'\x07\x07\x07\x07'])
"""

from datacache.sources.arrays import CIFAR10, Arrays, StoredArrays
from datacache.sources.base import Source, StoredSource, manifest_of
from datacache.sources.image_folder import ImageFolder
from datacache.sources.lmdb import LMDB
from datacache.sources.text import (
    Encoder,
    LabelledText,
    ParallelText,
    TextLines,
    Tokenized,
    unpack_tokens,
)
from datacache.sources.tfrecord import TFRecord

__all__ = [
    "CIFAR10",
    "LMDB",
    "Arrays",
    "Encoder",
    "ImageFolder",
    "LabelledText",
    "ParallelText",
    "Source",
    "StoredArrays",
    "StoredSource",
    "TFRecord",
    "TextLines",
    "Tokenized",
    "manifest_of",
    "unpack_tokens",
]
