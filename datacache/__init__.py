"""A cache of training samples: each is read once from central storage, then from its node's disk and memory.

::

    cache        DataCache, CacheDirs, Counts, Batch; Order: which sample is read when
    inputs       Augmentation and CentreCrop: random and central crops (a Crop each)
    sources      ImageFolder, TFRecord, LMDB, CIFAR10, Arrays, StoredArrays, ParallelText; Source,
                 StoredSource: base classes for one's own; Manifest, manifest_of, Split
    exceptions   BadSample, CacheFull, Damaged, SourceChanged, StorageFailed, Untrusted
"""

from datacache.augmentation import Augmentation, CentreCrop, Crop
from datacache.batches import Batch
from datacache.cache import DataCache
from datacache.catalogue import manifest_of
from datacache.errors import BadSample, CacheFull, Damaged, SourceChanged, StorageFailed, Untrusted
from datacache.levels import CacheDirs, Counts, stand_in_lines
from datacache.manifest import Manifest
from datacache.order import Order, evaluation_part
from datacache.sources import (
    CIFAR10,
    LMDB,
    Arrays,
    ImageFolder,
    ParallelText,
    Source,
    StoredArrays,
    StoredSource,
    TFRecord,
)
from datacache.split import Split
from datacache.storage import ProgressCallback, Storage

__all__ = [
    "CIFAR10",
    "LMDB",
    "Arrays",
    "Augmentation",
    "BadSample",
    "Batch",
    "CacheDirs",
    "CacheFull",
    "CentreCrop",
    "Counts",
    "Crop",
    "Damaged",
    "DataCache",
    "ImageFolder",
    "Manifest",
    "Order",
    "ParallelText",
    "ProgressCallback",
    "Source",
    "SourceChanged",
    "Split",
    "Storage",
    "StorageFailed",
    "StoredArrays",
    "StoredSource",
    "TFRecord",
    "Untrusted",
    "evaluation_part",
    "manifest_of",
    "stand_in_lines",
]
