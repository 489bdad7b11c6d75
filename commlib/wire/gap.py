"""Golomb–Rice code of the gaps between indices: near their entropy, and never far above it.

A gap ``g`` (the indices passed over before the next one) is ``g = q·2ᵇ + r``. First come the ``b`` low bits
``r`` of all gaps, then all ``q`` in unary, ``q`` zeros and a one: separated, both decode word by word. For
``n`` entries of ``size`` the second part is at most ``n + (size − n)/2ᵇ`` bits, however they are distributed.
"""

import math
from collections.abc import Callable

import numpy as np

from commlib.compiled import compiled
from commlib.entries import Words
from commlib.errors import InvalidArgument
from commlib.vectors import Index, index_dtype
from commlib.wire.base import IndexCodec, Message
from commlib.wire.bits import bytes_of_bits, find_ones, words_of

LN_GOLDEN_RATIO = 0.4812118250596035


def low_bits(entries: int, size: int) -> int:
    """Return ``b``, the smallest with ``2ᵇ ≥ ln φ·size/entries`` (φ is the golden ratio).

    It is the best for indices spread at random (Kiely 2004, Selecting the Golomb Parameter in Rice Coding).

    >>> low_bits(1, 100), low_bits(1, 1000), low_bits(1, 2)
    (6, 9, 0)
    """
    return (math.ceil(LN_GOLDEN_RATIO * (size / entries)) - 1).bit_length()


class Gap(IndexCodec):
    """The number of entries (32 bits, 64 past 2³¹ − 1), the low bits of the gaps, the quotients in unary.

    Indices spread at random take 8.1 bits at density 1 % and 11.5 at 0.1 % (entropy: 8.1 and 11.4), others at
    most 8.6 and 12.
    """

    def message_bytes(self, entries: int, size: int) -> int:
        """See :meth:`IndexCodec.message_bytes`; met by gaps of multiples of ``2ᵇ`` to the end."""
        return _header_bytes(size) + bytes_of_bits(_most_bits(entries, size))

    def encode(self, indices: Index, size: int) -> Message:
        """See :meth:`IndexCodec.encode`."""
        entries = len(indices)
        words = np.zeros(_most_bits(entries, size) // 64 + 1, np.uint64)
        bits = _pack(indices, low_bits(entries, size), words)
        header = np.array([entries], index_dtype(size)).view(np.uint8)
        return np.concatenate([header, words.view(np.uint8)[: bytes_of_bits(bits)]])

    def decode(self, message: Message, size: int, value_bytes: Callable[[int], int]) -> tuple[Index, Message]:
        """See :meth:`IndexCodec.decode`."""
        header = _header_bytes(size)
        entries = int.from_bytes(message[:header].tobytes(), "little")
        values_from = len(message) - value_bytes(entries)
        if not (0 < entries <= size and values_from <= self.message_bytes(entries, size)):
            raise InvalidArgument(f"gap: expected at most {size} entries in the message, got {entries}")
        shift = low_bits(entries, size)
        if values_from < header + bytes_of_bits(entries * (shift + 1)):
            raise InvalidArgument(f"gap: expected the bits of {entries} entries, got {values_from} bytes")
        words = words_of(message[header:values_from])
        indices = np.empty(entries, index_dtype(size))
        if find_ones(words, entries * shift, indices) < entries or _unpack(words, shift, indices) >= size:
            raise InvalidArgument(f"gap: expected {entries} indices below {size}, got others")
        return indices, message[values_from:]


def _header_bytes(size: int) -> int:
    return index_dtype(size).itemsize


def _most_bits(entries: int, size: int) -> int:
    shift = low_bits(entries, size)
    return entries * (shift + 1) + ((size - entries) >> shift)


@compiled
def _pack(indices: Index, shift: int, words: Words) -> int:
    """Write the low bits and the quotients into ``words``, zeros before; return the number of bits."""
    mask = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    word, filled, number = np.uint64(0), 0, 0  # the word that takes the low bits
    position = len(indices) * shift  # the bit at which the next quotient starts
    expected = 0  # the index after a gap of 0
    for i in range(len(indices)):
        gap = int(indices[i]) - expected
        expected = int(indices[i]) + 1
        low = np.uint64(gap) & mask
        word |= low << np.uint64(filled)
        filled += shift
        if filled >= 64:
            words[number] = word
            number += 1
            filled -= 64
            word = low >> np.uint64(shift - filled)
        position += gap >> shift
        words[position >> 6] |= np.uint64(1) << np.uint64(position & 63)
        position += 1
    words[number] |= word  # it may also be the first word of the quotients
    return position


@compiled
def _unpack(words: Words, shift: int, indices: Index) -> int:
    """Turn positions of ones, ``i`` + the sum of ``i + 1`` quotients, into indices; return the last."""
    mask = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    position, index, remainders = 0, -1, -1
    for i in range(len(indices)):
        number, into = position >> 6, np.uint64(position & 63)
        # of two words; a shift by 64 is undefined, one by 1 and one by 63 are not
        low = words[number] >> into | words[number + 1] << np.uint64(1) << (np.uint64(63) - into)
        position += shift
        remainders += int(low & mask) + 1
        index = ((int(indices[i]) - i) << shift) + remainders
        indices[i] = index
    return index
