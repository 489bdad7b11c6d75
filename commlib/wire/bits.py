"""Bits in 64-bit words: count and find the ones."""

import numpy as np

from commlib.compiled import compiled
from commlib.entries import Words, ones_in
from commlib.vectors import Index
from commlib.wire.base import Message


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
