"""Index codecs that are shorter than plain indices: the gaps between them, or a bit for each entry.

The Golomb–Rice code of the gaps is near their entropy, and never far above it. A gap ``g`` (the indices
passed over before the next one) is ``g = q·2ᵇ + r``. First come the ``b`` low bits ``r`` of all gaps, then
all ``q`` in unary, ``q`` zeros and a one: separated, both decode word by word. For ``n`` entries of ``size``
the second part is at most ``n + (size − n)/2ᵇ`` bits, however they are distributed.
"""

import math
from collections.abc import Callable

import numpy as np

from commlib.arrays import compiled
from commlib.entries import Words, ones_in
from commlib.errors import InvalidArgument
from commlib.vectors import Index, index_dtype
from commlib.wire.base import IndexCodec, Message


def bytes_of_bits(bits: int) -> int:
    """Return the bytes of the 32-bit words that hold ``bits`` bits.

    >>> bytes_of_bits(32), bytes_of_bits(33)
    (4, 8)
    """
    return (bits + 31) // 32 * 4


def words_of(message: Message) -> Words:
    """Return a copy of the bytes as 64-bit words; padded with one or more words of zeros."""
    words = np.zeros(len(message) // 8 + 2, np.uint64)
    words.view(np.uint8)[: len(message)] = message
    return words


@compiled
def count_ones(words: Words) -> int:
    """Return how many bits are set in all words."""
    count = 0
    for word in words:
        count += ones_in(word)
    return count


@compiled
def find_ones(words: Words, first: int, positions: Index) -> int:
    """Write the positions of the ones from bit ``first`` on, relative to it, until ``positions`` is full.

    Return how many were found.
    """
    number, found = first >> 6, 0
    left = words[number] >> np.uint64(first & 63) << np.uint64(first & 63)
    while True:
        while left:
            if found == len(positions):
                return found
            below_lowest_one = left - np.uint64(1) & ~left
            positions[found] = number * 64 - first + ones_in(below_lowest_one)
            left &= left - np.uint64(1)
            found += 1
        number += 1
        if number == len(words):
            return found
        left = words[number]


class Bitmap(IndexCodec):
    """A bit for every entry (SpCCL): shorter than plain indices if more than one entry in 32 is sent."""

    def message_bytes(self, entries: int, size: int) -> int:
        return bytes_of_bits(size)

    def encode(self, indices: Index, size: int) -> Message:
        words = np.zeros((size + 63) // 64, np.uint64)
        _set_ones(words, indices)
        return words.view(np.uint8)[: bytes_of_bits(size)]

    def decode(self, message: Message, size: int, value_bytes: Callable[[int], int]) -> tuple[Index, Message]:
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
        return index_dtype(size).itemsize + bytes_of_bits(_most_bits(entries, size))

    def encode(self, indices: Index, size: int) -> Message:
        entries = len(indices)
        words = np.zeros(_most_bits(entries, size) // 64 + 1, np.uint64)
        bits = _pack(indices, low_bits(entries, size), words)
        header = np.array([entries], index_dtype(size)).view(np.uint8)
        return np.concatenate([header, words.view(np.uint8)[: bytes_of_bits(bits)]])

    def decode(self, message: Message, size: int, value_bytes: Callable[[int], int]) -> tuple[Index, Message]:
        header = index_dtype(size).itemsize
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
