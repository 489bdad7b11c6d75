"""A bit for every entry of the vector, set where it is among those sent (SpCCL's format from some 3 % on)."""

from collections.abc import Callable

import numpy as np

from commlib.compiled import compiled
from commlib.entries import Words
from commlib.errors import InvalidArgument
from commlib.vectors import Index, index_dtype
from commlib.wire.base import IndexCodec, Message
from commlib.wire.bits import bytes_of_bits, count_ones, find_ones, words_of


class Bitmap(IndexCodec):
    """``size`` bits, however many are set: shorter than plain indices from one entry in 32 on."""

    def message_bytes(self, entries: int, size: int) -> int:
        """See :meth:`IndexCodec.message_bytes`; exact."""
        return bytes_of_bits(size)

    def encode(self, indices: Index, size: int) -> Message:
        """See :meth:`IndexCodec.encode`."""
        words = np.zeros((size + 63) // 64, np.uint64)
        _set_ones(words, indices)
        return words.view(np.uint8)[: bytes_of_bits(size)]

    def decode(self, message: Message, size: int, value_bytes: Callable[[int], int]) -> tuple[Index, Message]:
        """See :meth:`IndexCodec.decode`."""
        length = bytes_of_bits(size)
        if len(message) < length:
            raise InvalidArgument(f"bitmap: expected {length} bytes, got {len(message)}")
        words = words_of(message[:length])
        indices = np.empty(count_ones(words), index_dtype(size))
        find_ones(words, 0, indices)
        return indices, message[length:]


@compiled
def _set_ones(words: Words, indices: Index) -> None:
    for i in range(len(indices)):
        words[indices[i] >> 6] |= np.uint64(1) << np.uint64(indices[i] & 63)
