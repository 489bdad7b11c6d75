"""Each sample read once from central storage, then from memory.

>>> import numpy as np
>>> source = ArraySource(np.zeros((10, 8, 8, 1), np.uint8), np.arange(10))
>>> cache = DataCache(source, input_size=6)
>>> [batch.images.shape for batch in cache.batches(rank=0, size=2, epoch=0, batch_size=2, seed=1)]
[(2, 6, 6, 1), (2, 6, 6, 1)]
"""

from datacache.cache import DataCache, resize
from datacache.source import ArraySource, Batch, Source

__all__ = ["ArraySource", "Batch", "DataCache", "Source", "resize"]
