"""Vectors that selections and codecs are tried on."""

import os

import numpy as np

from tests.extent import more

# Fresh numbers in every run; a run that fails says which.
SEED = int.from_bytes(os.urandom(4), "little")
SIZES = [1, 33, 20_001, *more(31, 32, 1000, 65537, 300_001)]


def normal(size, seed=0):
    return np.random.default_rng([SEED, size, seed]).standard_normal(size, np.float32)


def ks(size):
    """Some of the numbers of entries to select, from 1 to all."""
    return sorted(
        {1, -(-size // 1000), -(-size // 100), -(-size // 10), size // 2 + 1, size - (size > 1), size}
    )
