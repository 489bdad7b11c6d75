"""Partitions of a list of tensors: whole tensors, or equal slices of their concatenation."""

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pto.errors import InvalidArgument


@dataclass(frozen=True)
class Piece:
    """Entries ``low … high - 1`` of tensor number ``tensor``, flattened."""

    tensor: int
    low: int
    high: int


@dataclass(frozen=True)
class Partition:
    """The pieces of each part, in the order of the tensors; together they are all of ``sizes`` entries."""

    sizes: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    def loads(self) -> list[int]:
        """Return the number of entries of each part."""
        return [sum(piece.high - piece.low for piece in own) for own in self.pieces]

    def balance(self) -> float:
        """Return the largest load over the mean load: 1 is perfect, and the number of parts the worst."""
        loads, total = self.loads(), sum(self.sizes)
        return max(loads) * len(loads) / total if total else 1.0


def by_tensor(sizes: Sequence[int], parts: int, costs: Sequence[float] | None = None) -> Partition:
    """Return whole tensors, assigned longest first, each to the part with the smallest load so far.

    The largest load is at most 4/3 of the optimum (Graham 1969), and at most the mean plus the longest
    tensor. ``costs``: of the tensors, by default their sizes; ties are broken by number.

    >>> [[piece.tensor for piece in own] for own in by_tensor([5, 1, 3, 2], 2).pieces]
    [[0, 1], [2, 3]]
    """
    weights = [float(cost) for cost in (sizes if costs is None else costs)]
    for tensor, cost in enumerate(weights):
        if not (math.isfinite(cost) and cost >= 0):
            raise InvalidArgument(f"cost of tensor {tensor}: expected a finite number from 0, got {cost}")
    assigned: list[list[int]] = [[] for _ in range(_checked(parts))]
    loads = [(0.0, part) for part in range(parts)]  # a heap
    for tensor in sorted(range(len(sizes)), key=lambda tensor: -weights[tensor]):
        load, part = loads[0]
        assigned[part].append(tensor)
        heapq.heapreplace(loads, (load + weights[tensor], part))
    return _of_whole_tensors(sizes, assigned)


def by_layer(sizes: Sequence[int], parts: int) -> Partition:
    """Return runs of consecutive whole tensors, equally many a part, whatever their sizes.

    HiTopKComm's partition (its section 4.2), for comparison.

    >>> [[piece.tensor for piece in own] for own in by_layer([5, 1, 3, 2], 2).pieces]
    [[0, 1], [2, 3]]
    """
    bounds = equal_bounds(len(sizes), parts)
    return _of_whole_tensors(sizes, [list(range(low, high)) for low, high in pairwise(bounds)])


def by_slices(sizes: Sequence[int], parts: int) -> Partition:
    """Return equal slices of the concatenated tensors: no two differ by more than one entry.

    >>> by_slices([5, 2], 2).pieces
    ((Piece(tensor=0, low=0, high=3),), (Piece(tensor=0, low=3, high=5), Piece(tensor=1, low=0, high=2)))
    """
    bounds = equal_bounds(sum(sizes), parts)
    ends = list(accumulate(sizes))
    return Partition(tuple(sizes), tuple(pieces_between(ends, low, high) for low, high in pairwise(bounds)))


def equal_bounds(size: int, parts: int) -> list[int]:
    """Return the ``parts + 1`` bounds that cut ``size`` entries into contiguous, nearly equal parts.

    >>> equal_bounds(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [size * part // parts for part in range(_checked(parts) + 1)]


def pieces_between(ends: Sequence[int], low: int, high: int) -> tuple[Piece, ...]:
    """Return the pieces that make up entries ``low … high - 1`` of the concatenation of tensors.

    ``ends``: the end of each tensor in it. Empty tensors have no piece.

    >>> pieces_between([5, 5, 7], 4, 6)
    (Piece(tensor=0, low=4, high=5), Piece(tensor=2, low=0, high=1))
    """
    pieces = []
    tensor = bisect_right(ends, low)
    while low < high:
        start = ends[tensor - 1] if tensor else 0
        until = min(high, ends[tensor])
        if until > low:
            pieces.append(Piece(tensor, low - start, until - start))
        low = until
        tensor += 1
    return tuple(pieces)


def _of_whole_tensors(sizes: Sequence[int], assigned: Sequence[Sequence[int]]) -> Partition:
    pieces = tuple(tuple(Piece(tensor, 0, sizes[tensor]) for tensor in sorted(own)) for own in assigned)
    return Partition(tuple(sizes), pieces)


def _checked(parts: int) -> int:
    if parts < 1:
        raise InvalidArgument(f"parts: expected at least 1, got {parts}")
    return parts
