"""Plain indices and float32 values, or all the values where that is shorter."""

from typing import ClassVar

import numpy as np

from commlib.errors import InvalidArgument
from commlib.vectors import VALUE_BYTES, SparseVector, delta, index_dtype
from commlib.wire.base import Codec, Message


class Fp32(Codec):
    """Indices (32 bits, 64 past 2³¹ − 1), then values; dense past δ, told apart by its length."""

    lossless: ClassVar[bool] = True

    def encode(self, vector: SparseVector) -> Message:
        """See :meth:`Codec.encode`."""
        if vector.indices is None or vector.entries >= delta(vector.size):
            return vector.to_dense().view(np.uint8)
        return np.concatenate([vector.indices.view(np.uint8), vector.values.view(np.uint8)])

    def decode(self, message: Message, size: int) -> SparseVector:
        """See :meth:`Codec.decode`."""
        if len(message) == size * VALUE_BYTES:
            return SparseVector(size, None, message.view(np.float32))
        dtype = index_dtype(size)
        if len(message) % (dtype.itemsize + VALUE_BYTES):
            raise InvalidArgument(f"message: {len(message)} bytes are no vector of {size} entries")
        values_from = len(message) * dtype.itemsize // (dtype.itemsize + VALUE_BYTES)
        return SparseVector(size, message[:values_from].view(dtype), message[values_from:].view(np.float32))
