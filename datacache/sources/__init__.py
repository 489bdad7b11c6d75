r"""Where samples come from, by name.

>>> import numpy as np
>>> source = make_source("arrays", (np.full((3, 2, 2), 7, np.uint8), np.arange(3)))
>>> manifest = source.scan()
>>> len(manifest), manifest.shape, source.read(manifest, np.array([2]))
(3, (2, 2, 1), [b'\x07\x07\x07\x07'])
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from datacache.sources.arrays import Arrays, StoredArrays
from datacache.sources.base import Source, StoredSource
from datacache.sources.cifar import CIFAR10
from datacache.sources.image_folder import ImageFolder
from datacache.sources.lmdb import LMDB
from datacache.sources.parallel_text import ParallelText, pack_pair, unpack_pair
from datacache.sources.tfrecord import TFRecord

SOURCES: Mapping[str, type[Source]] = {
    "image_folder": ImageFolder,
    "tfrecord": TFRecord,
    "lmdb": LMDB,
    "arrays": StoredArrays,
    "cifar10": CIFAR10,
    "parallel_text": ParallelText,
}

__all__ = [
    "CIFAR10",
    "LMDB",
    "SOURCES",
    "Arrays",
    "ImageFolder",
    "ParallelText",
    "Source",
    "StoredArrays",
    "StoredSource",
    "TFRecord",
    "make_source",
    "pack_pair",
    "unpack_pair",
]


def make_source(name: str, place: str | tuple[Any, Any], **options: Any) -> Source:
    """Return the named source of the samples at a URL, or of ``(images, labels)`` where it is ``arrays``.

    ``options`` are those of its class; ``storage`` among them holds the arguments of :class:`Storage`.
    """
    if name not in SOURCES:
        raise ValueError(f"source: expected one of {', '.join(SOURCES)}, got {name!r}")
    if isinstance(place, str):
        return _made(name, SOURCES[name], (place,), options)
    if name != "arrays":
        raise ValueError(f"source {name}: expected a URL, got {type(place).__name__}")
    return _made(name, Arrays, place, options)


def _made(name: str, make: Callable[..., Source], places: tuple[Any, ...], options: dict[str, Any]) -> Source:
    signature = inspect.signature(make)
    try:
        signature.bind(*places, **options)
    except TypeError as error:
        known = [key for key, value in signature.parameters.items() if value.kind is value.KEYWORD_ONLY]
        raise ValueError(f"source {name}: {error}; its options: {', '.join(known) or 'none'}") from error
    return make(*places, **options)
