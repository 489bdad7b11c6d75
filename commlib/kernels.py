"""The kernels of reducers for each kind of array: NumPy and Numba, or CuPy and ``commlib.gpu``.

A run gives the same bits on both: the same entries are selected (except by ``gaussian``, whose moments are
added in another order), and messages are the same bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType

import numpy as np

from commlib.arrays import Allocate, module_of, new_array
from commlib.errors import InvalidArgument, NonFiniteInput, shown
from commlib.gpu.codecs import DeviceCodec, check_has_kernels
from commlib.gpu.scatter import RankSum, add_rows
from commlib.gpu.selection import DEVICE_SELECTORS
from commlib.selection import SELECTORS, GivenSelector, Selector, make_selector, selector_class
from commlib.selection.reused import Reused
from commlib.vectors import Float32, SparseVector, delta, index_dtype, sum_rows, sum_sparse
from commlib.wire import Codec, Message, make_codec


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


# Of a codec: each holds buffers for the longest message of its size, and oktopk has a region for each rank,
# whose size changes now and then. CuPy's pool gives the buffers of a plan that is dropped to the next one.
MOST_PLANS = 64


class GPUSelector(Selector):
    """A selector of ``commlib.gpu`` for vectors of any size and any ``k``.

    Each call waits for the GPU once: whether all is finite, and how many were selected.
    """

    def __init__(self, name: str) -> None:
        self.at_most = SELECTORS[name].at_most  # type: ignore[misc]  # of the instance: the class knows no name
        self._plan = lru_cache(maxsize=1)(DEVICE_SELECTORS[name])  # a reducer's calls all fit one

    def select(self, vector: Float32, k: int) -> SparseVector:
        return self._plan(len(vector), k).select(vector).copy()

    def select_sum(self, gradient: Float32, residual: Float32, k: int, out: Float32) -> SparseVector:
        return self._plan(len(out), k).select_sum(gradient, residual, out).copy()


class ReusedOnGPU(Reused):
    """The selector ``reused``: CuPy's functions find the entries that reach an earlier step's threshold."""

    def __init__(self) -> None:
        super().__init__()
        self._exact = GPUSelector("exact")

    def select(self, vector: Float32, k: int) -> SparseVector:
        selected = None
        if self._calls % self._every:
            selected = self._reaching(vector, self.at_most * k)
        if selected is None or 2 * selected.nnz < k:
            selected = self._exact.select(vector, k)
            if selected.nnz:
                self._threshold = np.float32(float(np.abs(selected.values).min())).view(np.uint32)
        self._calls += 1
        return selected

    def _reaching(self, vector: Float32, at_most: int) -> SparseVector | None:
        """Return the entries that reach the threshold, or ``None`` where they are more than ``at_most``."""
        if not np.isfinite(vector).all():
            raise NonFiniteInput("cannot select from a vector that holds a NaN or an infinity")
        indices = np.flatnonzero(np.abs(vector) >= self._threshold.view(np.float32))
        if len(indices) > at_most:
            return None
        return SparseVector(len(vector), indices.astype(index_dtype(len(vector))), vector[indices])

    select_sum = Selector.select_sum


class GPUCodec(Codec):
    """A codec of ``commlib.gpu`` for vectors of any size; the caller owns what it returns."""

    def __init__(self, name: str) -> None:
        host = make_codec(name)
        super().__init__(host.indices, host.values)
        self._plan = lru_cache(MOST_PLANS)(partial(DeviceCodec, name))

    def encode(self, vector: SparseVector, allocate: Callable[[int], Message] | None = None) -> Message:
        """See :meth:`Codec.encode`; always a new array."""
        return self._plan(vector.size).encode(vector.indices_or_range, vector.values).copy()

    def decode(self, message: Message, size: int) -> SparseVector:
        """See :meth:`Codec.decode`; does not check that the bits are those of indices."""
        if size == 0:
            return SparseVector.empty(0, module_of(message))
        decoded = self._plan(size).decode(message)
        indices = None if decoded.indices is None else decoded.indices.copy()
        return SparseVector(size, indices, decoded.values.copy())


def make_gpu_selector(name: GivenSelector) -> Selector:
    """Return a new selector for CuPy's arrays; ``InvalidArgument``: options, or one without a GPU kernel."""
    selector_class(name)  # which refuses unknown names, as on the CPU
    if not isinstance(name, str):
        raise InvalidArgument(f"selector: expected a name, on GPUs they have no options, got {shown(name)}")
    if name == "reused":
        return ReusedOnGPU()
    if name not in DEVICE_SELECTORS:
        known = ", ".join([*DEVICE_SELECTORS, "reused"])
        raise InvalidArgument(f"selector: expected one with a GPU kernel ({known}), got {shown(name)}")
    return GPUSelector(name)


def make_gpu_codec(name: str) -> Codec:
    """Return a new codec for CuPy's arrays; ``fp32`` is the CPU's, which only copies bytes.

    A codec without GPU kernels raises ``InvalidArgument``.
    """
    codec = make_codec(name)
    check_has_kernels(name)
    return codec if name in ("fp32", "raw32", "raw32+fp32", "fp32+raw32") else GPUCodec(name)


def gpu_sum_sparse(
    vectors: Sequence[SparseVector],
    *,
    dense: Callable[[int], Float32] | None = None,
    allocate: Allocate = new_array,
) -> SparseVector:
    """Return the sum of :func:`commlib.vectors.sum_sparse`; sums of sparse vectors are always new arrays.

    Where the sum is sparse, the host waits for the GPU to learn how many entries it has.
    """
    if not vectors or any(vector.is_dense for vector in vectors):
        return sum_sparse(vectors, dense=dense)  # dense sums take no kernel
    size = vectors[0].size
    if size == 0:  # as of a rank that owns no shard
        return vectors[0]
    ranks = RankSum(vectors)
    return ranks.dense() if ranks.named >= delta(size) else ranks.sparse()


HOST = Kernels(make_selector, make_codec, sum_sparse, sum_rows)
GPU = Kernels(make_gpu_selector, make_gpu_codec, gpu_sum_sparse, add_rows)


def kernels_of(arrays: ModuleType) -> Kernels:
    """Return the kernels for the arrays of a module, NumPy or CuPy."""
    return HOST if arrays is np else GPU
