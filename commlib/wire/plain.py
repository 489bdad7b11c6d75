"""Plain indices and values of one floating-point type, or all the values where that is shorter."""

from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from commlib.errors import InvalidArgument
from commlib.vectors import SparseVector, delta, index_dtype
from commlib.wire.base import Codec, Message


class Plain(Codec):
    """Indices (32 bits, 64 past 2³¹ − 1), then values; dense past δ, told apart by its length."""

    value_dtype: ClassVar["np.dtype[Any]"]
    largest: ClassVar[float]

    def encode(self, vector: SparseVector) -> Message:
        """See :meth:`Codec.encode`."""
        if vector.indices is None or vector.entries >= delta(vector.size, self.value_dtype.itemsize):
            return self._rounded(vector.to_dense())
        return np.concatenate([vector.indices.view(np.uint8), self._rounded(vector.values)])

    def decode(self, message: Message, size: int) -> SparseVector:
        """See :meth:`Codec.decode`."""
        value_bytes = self.value_dtype.itemsize
        if len(message) == size * value_bytes:
            return SparseVector(size, None, self._values(message))
        dtype = index_dtype(size)
        if len(message) % (dtype.itemsize + value_bytes):
            raise InvalidArgument(f"message: {len(message)} bytes are no vector of {size} entries")
        values_from = len(message) // (dtype.itemsize + value_bytes) * dtype.itemsize
        return SparseVector(size, message[:values_from].view(dtype), self._values(message[values_from:]))

    def _rounded(self, values: "np.ndarray[Any, np.dtype[np.float32]]") -> Message:
        if not self.lossless:
            # A value beyond the type goes as its largest, the rest later: as an infinity it would void the
            # step, and every step after it. What is infinite or NaN by itself stays so.
            values = np.where(np.isfinite(values), np.clip(values, -self.largest, self.largest), values)
        return values.astype(self.value_dtype).view(np.uint8)

    def _values(self, message: Message) -> "np.ndarray[Any, np.dtype[np.float32]]":
        return message.view(self.value_dtype).astype(np.float32, copy=False)


class Fp32(Plain):
    """Values as they are."""

    lossless = True
    value_dtype = np.dtype(np.float32)
    largest = float(np.finfo(np.float32).max)


class Fp16(Plain):
    """Values as IEEE half precision: 11 bits of mantissa, up to 65,504."""

    lossless = False
    value_dtype = np.dtype(np.float16)
    largest = float(np.finfo(np.float16).max)


class Bf16(Plain):
    """Values as bfloat16: 8 bits of mantissa, the range of float32."""

    lossless = False
    value_dtype = np.dtype(ml_dtypes.bfloat16)
    largest = float(np.array(0x7F7F, np.uint16).view(ml_dtypes.bfloat16))
