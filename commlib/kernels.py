"""What reducers compute with, by where their arrays lie: the kernels of :mod:`commlib.gpu`, or the CPU's.

A run gives the same bits on both: the same entries are selected, but for ``gaussian``, whose moments are
added in another order, and messages are the same bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from commlib.arrays import module_of
from commlib.errors import NonFiniteInput, look_up
from commlib.gpu import (
    DEVICE_SELECTORS,
    DeviceCodec,
    DeviceSelector,
    RankSum,
    Selection,
    add_rows,
    current_engine,
)
from commlib.selection import SELECTORS, Selector, make_selector
from commlib.selection.reused import Reused
from commlib.vectors import Float32, SparseVector, delta, index_dtype, sum_rows, sum_sparse
from commlib.wire import Codec, Message, make_codec

MOST_PLANS = 512  # of a codec, which hold buffers: the regions of oktopk change their sizes now and then


@dataclass(frozen=True)
class Kernels:
    """Makers of a selector and of a codec, by name, and sums.

    A name that there is not raises ``UnknownName``. ``sum_sparse`` and ``sum_rows``: those of
    ``commlib.vectors``, bit by bit; ``sum_sparse`` of sparse vectors only, and ``sum_rows`` may overwrite its
    first argument.
    """

    make_selector: Callable[[str], Selector]
    make_codec: Callable[[str], Codec]
    total: Callable[[Sequence[SparseVector]], SparseVector]
    sum_rows: Callable[[Float32, Float32, int], Float32]


class GPUSelector(Selector):
    """A selector of ``commlib.gpu``, for whatever size and count it is asked.

    Each call waits for the GPU once: whether all is finite, and how many were selected.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.at_most = SELECTORS[name].at_most  # type: ignore[misc]  # of the instance: the class knows no name
        self._plan: DeviceSelector | None = None

    def select(self, vector: Float32, k: int) -> SparseVector:
        """See :meth:`Selector.select`."""
        return _entries_of(self._plan_for(len(vector), k).select(vector))

    def select_sum(self, gradient: Float32, residual: Float32, k: int, out: Float32) -> SparseVector:
        """See :meth:`Selector.select_sum`."""
        return _entries_of(self._plan_for(len(out), k).select_sum(gradient, residual, out))

    def _plan_for(self, size: int, k: int) -> DeviceSelector:
        """Return the plan of the call before, where it was for as many: a reducer's always is."""
        plan = self._plan
        if plan is None or (plan.size, plan.k) != (size, min(k, size)):
            plan = self._plan = DEVICE_SELECTORS[self._name](size, k, engine=current_engine())
        return plan


def _entries_of(selection: Selection) -> SparseVector:
    """Return a copy: the next selection of the plan overwrites its own."""
    entries = selection.entries()
    return SparseVector(selection.size, selection.indices[:entries].copy(), selection.values[:entries].copy())


class ReusedOnGPU(Selector):
    """The selector ``reused``: what reaches the threshold of a step before is found by CuPy's functions."""

    at_most = Reused.at_most

    def __init__(self, every: int = 32) -> None:
        self._every, self._calls, self._threshold = every, 0, np.uint32(0)
        self._exact = GPUSelector("mstopk")

    def select(self, vector: Float32, k: int) -> SparseVector:
        """See :meth:`Selector.select`."""
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
        places = np.flatnonzero(np.abs(vector) >= self._threshold.view(np.float32))
        if len(places) > at_most:
            return None
        return SparseVector(len(vector), places.astype(index_dtype(len(vector))), vector[places])

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Selector.state_dict`."""
        return {"calls": self._calls, "threshold": int(self._threshold)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Selector.load_state_dict`."""
        self._calls, self._threshold = state["calls"], np.uint32(state["threshold"])


class GPUCodec(Codec):
    """A codec of ``commlib.gpu``, for vectors of whatever size; what it returns is the caller's."""

    def __init__(self, name: str) -> None:
        self._name, self._host = name, make_codec(name)
        self._plans: dict[int, DeviceCodec] = {}

    @property
    def lossless(self) -> bool:
        """See :attr:`Codec.lossless`."""
        return self._host.lossless

    def message_bytes(self, entries: int, size: int) -> int:
        """See :meth:`Codec.message_bytes`."""
        return self._host.message_bytes(entries, size)

    def encode(self, vector: SparseVector, room: Callable[[int], Message] | None = None) -> Message:
        """See :meth:`Codec.encode`; always a new array."""
        return self._plan_for(vector.size).encode(vector.indices_or_range, vector.values).copy()  # type: ignore[no-any-return]

    def decode(self, message: Message, size: int) -> SparseVector:
        """See :meth:`Codec.decode`; that bits are those of indices is not looked at, as a damaged one's."""
        if size == 0:
            return SparseVector.empty(0, module_of(message))
        decoded = self._plan_for(size).decode(message)
        indices = None if decoded.indices is None else decoded.indices.copy()
        return SparseVector(size, indices, decoded.values.copy())

    def _plan_for(self, size: int) -> DeviceCodec:
        plan = self._plans.get(size)
        if plan is None:
            if len(self._plans) == MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[size] = DeviceCodec(self._name, size, engine=current_engine())
        return plan


def make_gpu_selector(name: str) -> Selector:
    """Return a new selector for CuPy's arrays, of the table ``SELECTORS``."""
    look_up(SELECTORS, "selector", name)
    return ReusedOnGPU() if name == "reused" else GPUSelector(name)


def make_gpu_codec(name: str) -> Codec:
    """Return a new codec for CuPy's arrays; ``fp32`` is that of the CPU, which copies bytes and no more."""
    codec = make_codec(name)
    return codec if name in ("fp32", "raw32", "raw32+fp32", "fp32+raw32") else GPUCodec(name)


def total_on_gpu(vectors: Sequence[SparseVector]) -> SparseVector:
    """Return what ``commlib.vectors.total`` does, of sparse vectors of one size, at least 1.

    Where the sum is sparse, this waits for the GPU: how many entries it has.
    """
    size = vectors[0].size
    ranks = RankSum(size, engine=current_engine())
    is_dense = sum(vector.nnz for vector in vectors) >= delta(size)
    return ranks.dense(vectors) if is_dense else ranks.sparse(vectors)


def sum_rows_on_gpu(others: Float32, own: Float32, place: int) -> Float32:
    """Return what ``commlib.vectors.sum_rows`` does."""
    return add_rows(others, own, place, engine=current_engine())  # type: ignore[no-any-return]


HOST = Kernels(make_selector, make_codec, sum_sparse, sum_rows)
GPU = Kernels(make_gpu_selector, make_gpu_codec, total_on_gpu, sum_rows_on_gpu)


def kernels_of(arrays: ModuleType) -> Kernels:
    """Return the kernels for the arrays of a module, NumPy or CuPy."""
    return HOST if arrays is np else GPU
