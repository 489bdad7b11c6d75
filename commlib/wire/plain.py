"""Plain indices, and plain values of one floating-point type."""

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from commlib.vectors import Float32, Index, index_dtype
from commlib.wire.base import IndexCodec, Message, ValueCodec


class Raw32(IndexCodec):
    """Indices of 32 bits, 64 past 2³¹ − 1."""

    def message_bytes(self, entries: int, size: int) -> int:
        """See :meth:`IndexCodec.message_bytes`; exact."""
        return entries * index_dtype(size).itemsize

    def encode(self, indices: Index, size: int) -> Message:
        """See :meth:`IndexCodec.encode`."""
        return indices.view(np.uint8)

    def decode(self, message: Message, size: int, value_bytes: Callable[[int], int]) -> tuple[Index, Message]:
        """See :meth:`IndexCodec.decode`."""
        dtype = index_dtype(size)
        # No header: the number of entries follows from the length, which grows with each entry.
        most = len(message) // dtype.itemsize

        def bytes_of(count: int) -> int:
            return count * dtype.itemsize + value_bytes(count)

        entries = len(message) * most // max(1, bytes_of(most))  # where each value takes as many bytes
        if not bytes_of(entries) <= len(message) < bytes_of(entries + 1):
            entries = bisect_right(range(most + 1), len(message), key=bytes_of) - 1
        values_from = entries * dtype.itemsize
        return message[:values_from].view(dtype), message[values_from:]


class Plain(ValueCodec):
    """One value after the other, each rounded to the nearest of its type."""

    dtype: ClassVar["np.dtype[Any]"]
    largest: ClassVar[float]

    def message_bytes(self, entries: int) -> int:
        """See :meth:`ValueCodec.message_bytes`."""
        return entries * self.dtype.itemsize

    def encode(self, values: Float32) -> Message:
        """See :meth:`ValueCodec.encode`."""
        if not self.lossless:
            # A value beyond the type is sent as its largest, the rest in later steps: as an infinity it would
            # make all ranks skip this step and every later one. An infinity or NaN stays as it is.
            values = np.where(np.isfinite(values), np.clip(values, -self.largest, self.largest), values)
        return values.astype(self.dtype, copy=False).view(np.uint8)

    def decode(self, message: Message, entries: int) -> Float32:
        """See :meth:`ValueCodec.decode`."""
        return message.view(self.dtype).astype(np.float32, copy=False)


class Fp32(Plain):
    """Values as they are."""

    lossless = True
    dtype = np.dtype(np.float32)
    largest = float(np.finfo(np.float32).max)


class Fp16(Plain):
    """Values as IEEE half precision: 11 bits of mantissa, up to 65,504."""

    lossless = False
    dtype = np.dtype(np.float16)
    largest = float(np.finfo(np.float16).max)


class Bf16(Plain):
    """Values as bfloat16: 8 bits of mantissa, the range of float32."""

    lossless = False
    dtype = np.dtype(ml_dtypes.bfloat16)
    largest = float(np.array(0x7F7F, np.uint16).view(ml_dtypes.bfloat16))
