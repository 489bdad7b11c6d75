"""A cache of training samples: each is read once from central storage, then from its node's disk and memory.

::

    cache        DataCache, CacheDirs, Counts, Batch, Preprocessing
    orders       Order, EvaluationOrder: which sample is read when; LengthBuckets, Windows and Streams of text
                 (bucket_boundaries); BatchOrder: base class for one's own
    inputs       Augmentation and CentreCrop: random and central crops (a Crop each); Collation: base class
                 for other arrays, with BatchSpec and Pools
    sources      ImageFolder, TFRecord, LMDB, CIFAR10, Arrays, StoredArrays, TextLines, ParallelText,
                 LabelledText, Tokenized (unpack_tokens); Source, StoredSource: base classes for one's own;
                 Manifest, manifest_of, Split
    exceptions   BadSample, CacheFull, Damaged, SourceChanged, StorageFailed, Untrusted
"""

from datacache.augmentation import Augmentation, CentreCrop, Crop
from datacache.batches import Batch, BatchSpec, Collation, Pools
from datacache.cache import DataCache
from datacache.errors import BadSample, CacheFull, Damaged, SourceChanged, StorageFailed, Untrusted
from datacache.levels import CacheDirs, Counts, stand_in_lines
from datacache.manifest import Manifest, Split
from datacache.order import BatchOrder, EvaluationOrder, Order
from datacache.preprocessing import Preprocessing
from datacache.sources import (
    CIFAR10,
    LMDB,
    Arrays,
    ImageFolder,
    LabelledText,
    ParallelText,
    Source,
    StoredArrays,
    StoredSource,
    TextLines,
    TFRecord,
    Tokenized,
    manifest_of,
    unpack_tokens,
)
from datacache.storage import ProgressCallback, Storage
from datacache.text_orders import LengthBuckets, Streams, Windows, bucket_boundaries

__all__ = [
    "CIFAR10",
    "LMDB",
    "Arrays",
    "Augmentation",
    "BadSample",
    "Batch",
    "BatchOrder",
    "BatchSpec",
    "CacheDirs",
    "CacheFull",
    "CentreCrop",
    "Collation",
    "Counts",
    "Crop",
    "Damaged",
    "DataCache",
    "EvaluationOrder",
    "ImageFolder",
    "LabelledText",
    "LengthBuckets",
    "Manifest",
    "Order",
    "ParallelText",
    "Pools",
    "Preprocessing",
    "ProgressCallback",
    "Source",
    "SourceChanged",
    "Split",
    "Storage",
    "StorageFailed",
    "StoredArrays",
    "StoredSource",
    "Streams",
    "TFRecord",
    "TextLines",
    "Tokenized",
    "Untrusted",
    "Windows",
    "bucket_boundaries",
    "manifest_of",
    "stand_in_lines",
    "unpack_tokens",
]
