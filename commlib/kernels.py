"""What reducers compute with, by the module of their arrays: NumPy and Numba, or CuPy and ``commlib.gpu``.

A run gives the same bits on both: the same entries are selected (except by ``gaussian``, whose moments are
added in another order), and messages are the same bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from commlib import vectors
from commlib.gpu import adapters
from commlib.selection import GivenSelector, Selector, make_selector
from commlib.vectors import Float32, SparseVector
from commlib.wire import Codec, make_codec


@dataclass(frozen=True)
class Kernels:
    """Constructors of selectors and codecs by name, and sums.

    An unknown name raises ``UnknownName``. ``sum_sparse`` and ``sum_rows`` have the arguments and the bits of
    those in :mod:`commlib.vectors`; ``sum_rows`` may overwrite its first argument.
    """

    make_selector: Callable[[GivenSelector], Selector]
    make_codec: Callable[[str], Codec]
    sum_sparse: Callable[..., SparseVector]
    sum_rows: Callable[[Float32, Float32, int], Float32]


HOST = Kernels(make_selector, make_codec, vectors.sum_sparse, vectors.sum_rows)
GPU = Kernels(adapters.make_gpu_selector, adapters.make_gpu_codec, adapters.sum_sparse, adapters.sum_rows)


def kernels_of(arrays: ModuleType) -> Kernels:
    """Return the kernels for the arrays of a module, NumPy or CuPy."""
    return HOST if arrays is np else GPU
