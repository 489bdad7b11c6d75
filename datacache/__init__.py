"""Each sample read once from central storage, then from the disk and the memory of its node."""

from datacache.augmentation import Augmentation, CentreCrop, Crop
from datacache.batches import Batch
from datacache.cache import DataCache
from datacache.catalogue import manifest_of
from datacache.errors import BadSample, CacheFull, Damaged, SourceChanged, StorageFailed
from datacache.levels import CacheDirs, Counts, stand_in_lines
from datacache.manifest import Manifest
from datacache.order import Order, evaluation_part
from datacache.sources import SOURCES, Arrays, ImageFolder, Source, TFRecord, make_source

__all__ = [
    "SOURCES",
    "Arrays",
    "Augmentation",
    "BadSample",
    "Batch",
    "CacheFull",
    "CentreCrop",
    "Counts",
    "Crop",
    "Damaged",
    "DataCache",
    "ImageFolder",
    "Manifest",
    "Order",
    "CacheDirs",
    "Source",
    "SourceChanged",
    "StorageFailed",
    "TFRecord",
    "evaluation_part",
    "make_source",
    "manifest_of",
    "stand_in_lines",
]
