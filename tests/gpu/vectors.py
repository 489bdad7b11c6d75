"""Vectors that selections and codecs are tried on."""

import os

import numpy as np

from tests.extent import more

# Fresh numbers in every run; a run that fails says which.
SEED = int.from_bytes(os.urandom(4), "little")
SIZES = [1, 33, 20_001, *more(31, 32, 1000, 65537, 300_001)]


def normal(size, seed=0):
    return np.random.default_rng([SEED, size, seed]).standard_normal(size, np.float32)


def _outlier(size):
    vector = normal(size)
    vector[size // 2] = 1e9
    return vector


def _ties_across_blocks(size):
    return np.random.default_rng([SEED, size]).integers(-3, 4, size).astype(np.float32)


def _denormal(size):
    return (
        np.random.default_rng([SEED, size]).integers(-(2**23) + 1, 2**23, size).astype(np.float32) * 2**-149
    )


def _crowded(size):
    """All large entries in few blocks: many more than k reach the k-th largest of the blocks' maxima."""
    vector = normal(size) / 1000
    vector[size // 3 : size // 3 + size // 20 + 1] += 10
    return vector


VECTORS = {
    "normal": normal,
    "student": lambda size: np.random.default_rng([SEED, size]).standard_t(2, size).astype(np.float32),
    "equal": lambda size: np.full(size, -0.7, np.float32),
    "zeros": lambda size: np.zeros(size, np.float32),
    "ties": _ties_across_blocks,
    "denormal": _denormal,
    "outlier": _outlier,
    "crowded": _crowded,
    "mostly zeros": lambda size: np.where(normal(size, 1) > 2.5, normal(size), 0).astype(np.float32),
}


def ks(size):
    """Some of the numbers of entries to select, from 1 to all."""
    return sorted(
        {1, -(-size // 1000), -(-size // 100), -(-size // 10), size // 2 + 1, size - (size > 1), size}
    )
