"""What ``commlib.gpu`` has, computed on the host by the kernels of the CPU, in the order of the streams.

Plain values and indices need no kernels: they are those of the CPU, whose functions of NumPy are CuPy's here.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib import selection, vectors, wire
from commlib.selection.base import Selector
from commlib.vectors import SparseVector
from commlib.wire.base import Codec
from tests.gpu.fake_cupy import ndarray

PLAIN = {"fp32", "raw32", "fp16"}


def make_selector(name: str) -> Selector:
    """Return a selector that computes on the host."""
    return SelectorOnHost(selection.make_selector(name))


def make_codec(name: str) -> Codec:
    """Return a codec for arrays of the GPU."""
    made = wire.make_codec(name)
    return made if set(name.split("+")) <= PLAIN else CodecOnHost(made)


def sum_sparse(given: Sequence[SparseVector], **memory: Any) -> SparseVector:
    """Return the sum of sparse vectors in new arrays; of dense ones as CuPy makes it."""
    if any(vector.is_dense for vector in given):
        return vectors.sum_sparse(given, **memory)
    return wrapped(vectors.sum_sparse([unwrapped(vector) for vector in given]), given[0].values.cupy)


def sum_rows(others: ndarray, own: ndarray, place: int) -> ndarray:
    """Return the sum of rows."""
    return own.cupy.asarray(vectors.sum_rows(fetched(others), fetched(own), place))


def fetched(array: ndarray) -> np.ndarray:
    """Return the values of an array, as a kernel on the current stream reads them."""
    array.cupy.stream.launch([array.memory], [])
    return array.host


def wrapped(vector: SparseVector, cupy: Any) -> SparseVector:
    indices = None if vector.indices is None else cupy.asarray(vector.indices)
    return SparseVector(vector.size, indices, cupy.asarray(vector.values))


def unwrapped(vector: SparseVector) -> SparseVector:
    indices = None if vector.indices is None else fetched(vector.indices)
    return SparseVector(vector.size, indices, fetched(vector.values))


class SelectorOnHost(Selector):
    def __init__(self, selector: Selector) -> None:
        self._selector = selector

    def select(self, vector: Any, k: int) -> SparseVector:
        return wrapped(self._selector.select(fetched(vector), k), vector.cupy)

    def select_sum(self, gradient: Any, residual: Any, k: int, out: Any) -> SparseVector:
        out.cupy.stream.launch([gradient.memory, residual.memory], [out.memory])
        selected = self._selector.select_sum(gradient.host, residual.host, k, out.host)
        assert not isinstance(selected.values, ndarray)
        return wrapped(SparseVector(selected.size, selected.indices, selected.values.copy()), out.cupy)

    def state_dict(self) -> Any:
        return self._selector.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._selector.load_state_dict(state)


class CodecOnHost(Codec):
    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    @property
    def lossless(self) -> bool:
        return self._codec.lossless

    def message_bytes(self, entries: int, size: int) -> int:
        return self._codec.message_bytes(entries, size)

    def encode(self, vector: SparseVector) -> Any:
        return vector.values.cupy.asarray(self._codec.encode(unwrapped(vector)))

    def decode(self, message: Any, size: int) -> SparseVector:
        return wrapped(self._codec.decode(fetched(message), size), message.cupy)
