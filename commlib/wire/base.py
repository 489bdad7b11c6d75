"""The interface of codecs, and the plain ones: indices as they are, values of one floating-point type.

A message has an index codec and a value codec, or is dense if that is shorter.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from commlib.arrays import module_of
from commlib.errors import InvalidArgument
from commlib.vectors import Float32, Index, SparseVector, index_dtype

Message = npt.NDArray[np.uint8]


class IndexCodec(ABC):
    """Turns sorted unique indices below ``size`` into bytes and back, without loss; one or more of them."""

    @abstractmethod
    def message_bytes(self, entries: int, size: int) -> int:
        """Return an upper bound of the bytes of ``entries`` encoded indices, a multiple of four."""

    @abstractmethod
    def encode(self, indices: Index, size: int) -> Message:
        """Return an array of bytes, a multiple of four; it may share the memory of ``indices``."""

    @abstractmethod
    def decode(self, message: Message, size: int, value_bytes: Callable[[int], int]) -> tuple[Index, Message]:
        """Return the indices at the start of ``message``, and the rest, the bytes of the values.

        ``value_bytes(n)``: the bytes of ``n`` values. The message may be damaged: ``InvalidArgument`` is
        raised where no indices can be read; the caller checks that they are sorted, in range and as many as
        the values.
        """


class ValueCodec(ABC):
    """Turns float32 values into bytes and back.

    The error is never larger than the values, ``‖x − Q(x)‖ ≤ ‖x‖``, so that residuals do not grow. 0 stays 0
    unless the codec says otherwise. A NaN or an infinity makes some decoded value not finite.
    """

    lossless: ClassVar[bool]

    @abstractmethod
    def message_bytes(self, entries: int) -> int:
        """Return the number of bytes of ``entries`` values."""

    @abstractmethod
    def encode(self, values: Float32) -> Message:
        """Return an array of bytes; it may share the memory of ``values``."""

    @abstractmethod
    def decode(self, message: Message, entries: int) -> Float32:
        """Return the values of a message of ``message_bytes(entries)`` bytes; they may share its memory."""


class Codec:
    """Turns a sparse vector into bytes and back: the bytes of the indices, then those of the values.

    A message is dense, all values and no indices, wherever the sparse one would not be shorter: so its
    length distinguishes the two. A vector without entries is a message without bytes.

    A lossy codec's error stays in the sender's residual: a rank applies to itself what the others decode.
    """

    def __init__(self, indices: IndexCodec, values: ValueCodec) -> None:
        self.indices = indices
        self.values = values

    @property
    def lossless(self) -> bool:
        """Whether decoding returns exactly the encoded values."""
        return self.values.lossless

    def message_bytes(self, entries: int, size: int) -> int:
        """Return the bytes of a message; where the indices take a varying number of bytes, the most."""
        if entries == 0:
            return 0
        sparse = self.indices.message_bytes(entries, size) + self.values.message_bytes(entries)
        return min(sparse, self.values.message_bytes(size))

    def encode(self, vector: SparseVector, allocate: Callable[[int], Message] | None = None) -> Message:
        """Return a new array of bytes.

        With ``allocate``, the message is written to ``allocate(bytes)``, an array of the caller, or shares
        the memory of a dense vector.
        """
        if vector.indices is None:
            return self.values.encode(vector.values if allocate else vector.to_dense())
        if vector.nnz == 0:
            return module_of(vector.values).empty(0, np.uint8)
        indices = self.indices.encode(vector.indices, vector.size)
        sparse = len(indices) + self.values.message_bytes(vector.nnz)
        if sparse >= self.values.message_bytes(vector.size):
            return self.values.encode(vector.to_dense())
        out = allocate(sparse) if allocate else None
        return np.concatenate([indices, self.values.encode(vector.values)], out=out)

    def decode(self, message: Message, size: int) -> SparseVector:
        """Return the vector of ``size`` entries that ``message`` holds; it may share the message's memory.

        Any other bytes raise ``InvalidArgument``.
        """
        if len(message) == 0:
            return SparseVector.empty(size, module_of(message))
        if len(message) == self.values.message_bytes(size):
            return SparseVector(size, None, self.values.decode(message, size))
        try:
            return self._decode_sparse(message, size)
        except InvalidArgument as error:
            raise InvalidArgument(f"message: {len(message)} bytes are no vector of {size} entries") from error

    def _decode_sparse(self, message: Message, size: int) -> SparseVector:
        indices, values = self.indices.decode(message, size, self.values.message_bytes)
        expected = self.values.message_bytes(len(indices))
        if len(values) != expected:
            raise InvalidArgument(f"values: expected {expected} bytes, got {len(values)}")
        return SparseVector(size, indices, self.values.decode(values, len(indices)))


class Raw32(IndexCodec):
    """Indices of 32 bits, 64 past 2³¹ − 1."""

    def message_bytes(self, entries: int, size: int) -> int:
        return entries * index_dtype(size).itemsize

    def encode(self, indices: Index, size: int) -> Message:
        return indices.view(np.uint8)

    def decode(self, message: Message, size: int, value_bytes: Callable[[int], int]) -> tuple[Index, Message]:
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
        return entries * self.dtype.itemsize

    def encode(self, values: Float32) -> Message:
        if not self.lossless:
            # A value beyond the type is sent as its largest, the rest in later steps: as an infinity it would
            # make all ranks skip this step and every later one. An infinity or NaN stays as it is.
            values = np.where(np.isfinite(values), np.clip(values, -self.largest, self.largest), values)
        return values.astype(self.dtype, copy=False).view(np.uint8)

    def decode(self, message: Message, entries: int) -> Float32:
        return message.view(self.dtype).astype(np.float32, copy=False)


class Fp32(Plain):
    """Values as they are."""

    lossless = True
    dtype = np.dtype(np.float32)


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
