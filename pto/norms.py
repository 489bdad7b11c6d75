"""Sums of squares of many tensors, on one rank or in parts on all of them: what LARS and LAMB need.

Every sum is in float64, whatever the tensors are. A NaN in a tensor makes its sum a NaN.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pto.choice import Choice, Seconds, choose, rounds, slowest
from pto.comm import Array, Comm, agree_on
from pto.compiled import compiled
from pto.errors import InvalidArgument
from pto.partition import Partition, Piece, by_slices, by_tensor

Float64: TypeAlias = npt.NDArray[np.float64]
Intp: TypeAlias = npt.NDArray[np.intp]
Way: TypeAlias = Literal["auto", "layers", "slices", "local"]

LANES = 64  # sums side by side, enough for the widest vector units; the order is the same on all of them
BLOCK = 1 << 15  # entries of a narrow type that are widened at once, a multiple of LANES
NARROW = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
WIDE = (np.dtype(np.float32), np.dtype(np.float64))
SAMPLE_ENTRIES = 1 << 23  # of a tensor made up to measure with, 32 MiB: more than most caches leave to a rank
SAMPLE_CALLS = 256
WAYS: tuple[Way, ...] = ("auto", "layers", "slices", "local")
PARTITIONS: dict[str, Callable[[Sequence[int], int], Partition]] = {"layers": by_tensor, "slices": by_slices}


@compiled
def _add_squares(vector: Array, lanes: Float64) -> None:
    """Add the squares of a vector to ``lanes``, entry ``i`` to lane ``i % LANES``."""
    rows = len(vector) // LANES * LANES
    for start in range(0, rows, LANES):
        for lane in range(LANES):
            entry = np.float64(vector[start + lane])
            lanes[lane] += entry * entry
    for lane in range(len(vector) - rows):
        entry = np.float64(vector[rows + lane])
        lanes[lane] += entry * entry


@compiled
def _total(lanes: Float64) -> float:
    """Return the sum of the lanes, halves added to each other; ``lanes`` is overwritten."""
    half = LANES // 2
    while half:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    return float(lanes[0])


@compiled
def _sum_of_squares(vector: Array) -> float:
    lanes = np.zeros(LANES)
    _add_squares(vector, lanes)
    return _total(lanes)


def sum_of_squares(tensor: Array) -> float:
    """Return the sum of the squares of all entries of a float16, bfloat16, float32 or float64 array.

    Accumulated in float64, in an order that depends on the number of entries alone: equal entries give equal
    bits on every processor, and a narrow tensor those of its float32 copy. But for what float64 entries lose
    when they are squared, the relative error is at most ``(n/64 + 7)·2⁻⁵³`` for ``n`` entries.

    >>> sum_of_squares(np.array([[3.0, 4.0]], np.float32))
    25.0
    """
    vector = tensor.reshape(-1)
    if vector.dtype in WIDE:
        return _sum_of_squares(vector)
    if vector.dtype not in NARROW:
        raise InvalidArgument(f"tensor: expected float16, bfloat16, float32 or float64, got {tensor.dtype}")
    lanes = np.zeros(LANES)
    for start in range(0, len(vector), BLOCK):
        _add_squares(vector[start : start + BLOCK].astype(np.float32), lanes)
    return _total(lanes)


@dataclass(frozen=True)
class _Kernel:
    """Seconds of the kernel on the slowest rank, when all compute at the same time."""

    entry: float
    call: float

    @classmethod
    def measured(cls, comm: Comm, entries: int) -> "_Kernel":
        long, short = np.ones(entries, np.float32), [np.ones(1, np.float32)] * SAMPLE_CALLS
        call = slowest(rounds(comm, lambda: [sum_of_squares(each) for each in short])) / SAMPLE_CALLS
        return cls(slowest(rounds(comm, lambda: sum_of_squares(long))) / entries, call)

    def seconds(self, pieces: Sequence[Piece]) -> float:
        return self.entry * sum(piece.high - piece.low for piece in pieces) + self.call * len(pieces)


class Norms:
    """Sums of squares of several lists of tensors that all ranks hold alike: weights and gradients, say.

    ``sizes``: entries of each tensor, the same in every list. ``partition``: "layers" gives every rank whole
    tensors, longest first, and the results are bitwise those of one rank; "slices" gives every rank an equal
    slice of their concatenation, balanced whatever the tensors, and the sums of a tensor's pieces are added
    in the order of the ranks; "local" computes everything everywhere, and "auto" what is fastest by what the
    kernel and the exchange take here. ``choice`` says which, and why.

    All ranks construct it together and call it together.

    >>> from commlib.transport import simulated
    >>> def squares(comm):
    ...     layers = [np.ones((2, 3), np.float32), np.ones(4, np.float32)]
    ...     return Norms([6, 4], comm, lists=1, partition="slices").squares(layers)
    >>> simulated.run(squares, world_size=3)[2]
    array([[6., 4.]])
    """

    def __init__(
        self,
        sizes: Sequence[int],
        comm: Comm | None,
        *,
        lists: int = 2,
        partition: Way = "auto",
        name: str = "norms",
    ) -> None:
        if partition not in WAYS:
            raise InvalidArgument(f'partition: expected one of {", ".join(WAYS)}, got "{partition}"')
        if lists < 1:
            raise InvalidArgument(f"lists: expected at least 1, got {lists}")
        self.sizes, self.lists, self.name = tuple(sizes), lists, name
        self._exchange: _Exchange | None = None
        self.choice = self._choose(comm, partition)
        self._own = self._exchange.own if self._exchange else by_tensor(self.sizes, 1).pieces[0]

    def squares(self, *lists: Sequence[Array]) -> Float64:
        """Return the sums of squares, float64 of shape ``(lists, tensors)``, bitwise equal on all ranks.

        In parts: one all-gather of eight bytes for each piece of each list, as many from each rank.
        """
        expect_sizes(lists, self.lists, self.sizes)
        sums = np.empty((self.lists, len(self._own)))
        for tensors, own in zip(lists, sums, strict=True):
            fill(own, tensors, self._own)
        return sums if self._exchange is None else self._exchange.gather(sums)

    @property
    def partition(self) -> Partition | None:
        """Who computes what; ``None`` where every rank computes everything."""
        return None if self._exchange is None else self._exchange.partition

    def _choose(self, comm: Comm | None, way: Way) -> Choice:
        if comm is None or comm.size == 1:
            return Choice(False, f"{self.name} locally: there is one rank")
        agree_on(comm, "settings", {"lists": str(self.lists), "partition": way})
        agree_on(comm, "tensors", {f"tensor {i}": f"of {size} entries" for i, size in enumerate(self.sizes)})
        if not sum(self.sizes):
            return Choice(False, f"{self.name} locally: there is nothing to compute")
        if way == "auto":
            return self._measure(comm)
        if way == "local":
            return Choice(False, f"{self.name} locally: as asked for")
        self._exchange = _Exchange(PARTITIONS[way](self.sizes, comm.size), comm, self.lists)
        return Choice(True, f"{self.name} in parts by {way}: as asked for")

    def _measure(self, comm: Comm) -> Choice:
        kernel = _Kernel.measured(comm, min(sum(self.sizes), SAMPLE_ENTRIES))
        whole = self.lists * kernel.seconds(by_tensor(self.sizes, 1).pieces[0])
        candidates: dict[str, tuple[Seconds, _Exchange]] = {}
        for way, cut in PARTITIONS.items():
            exchange = _Exchange(cut(self.sizes, comm.size), comm, self.lists)
            part = self.lists * max(map(kernel.seconds, exchange.partition.pieces))
            candidates[way] = Seconds(whole, part, exchange.seconds()), exchange
        way = min(candidates, key=lambda way: candidates[way][0].part + candidates[way][0].exchange)
        seconds, exchange = candidates[way]
        choice = choose(self.name, seconds, f"in parts by {way}")
        self._exchange = exchange if choice.in_parts else None
        return choice


class _Exchange:
    """The all-gather of the sums of every rank's pieces, planned. ``own``: this rank's pieces.

    The sums travel as the bits of integers, as many from every rank: in ``log₂ P`` latencies, where arrays go
    round a ring of ``P``.
    """

    def __init__(self, partition: Partition, comm: Comm, lists: int) -> None:
        self.partition, self.own = partition, partition.pieces[comm.rank]
        self._comm, self._lists = comm, lists
        self._tensors = [tensors_of(pieces) for pieces in partition.pieces]
        self._padded = np.zeros((lists, max(map(len, partition.pieces))))

    def gather(self, own: Float64) -> Float64:
        """Return the sums of all tensors, ``(lists, tensors)``; ``own``: those of the own pieces."""
        self._padded[:, : len(self.own)] = own
        rows = self._comm.allgather_ints(self._padded.view(np.int64).reshape(-1).tolist())
        sums = rows.view(np.float64).reshape(len(rows), *self._padded.shape)
        parts = [part[:, : len(tensors)] for tensors, part in zip(self._tensors, sums, strict=True)]
        return added(zip(self._tensors, parts, strict=True), self._lists, len(self.partition.sizes))

    def seconds(self) -> float:
        """Measure it; all ranks call this together."""
        own = np.zeros((self._lists, len(self.own)))
        return slowest(rounds(self._comm, lambda: self.gather(own)))


def tensors_of(pieces: Sequence[Piece]) -> Intp:
    """Return the number of the tensor that each piece is of."""
    return np.array([piece.tensor for piece in pieces], np.intp)


def fill(sums: Float64, tensors: Sequence[Array], pieces: Sequence[Piece]) -> None:
    """Put the sum of squares of ``pieces[i]`` into ``sums[i]``."""
    for i, piece in enumerate(pieces):
        sums[i] = sum_of_squares(tensors[piece.tensor].reshape(-1)[piece.low : piece.high])


def added(parts: Iterable[tuple[Intp, Float64]], lists: int, tensors: int) -> Float64:
    """Return the sums of whole tensors: those of pieces, added in the order of ``parts``.

    A part holds the numbers of its tensors and the sums of one piece of each, ``(lists, pieces)``.
    """
    totals = np.zeros((lists, tensors))
    for numbers, sums in parts:
        totals[:, numbers] += sums
    return totals


def expect_sizes(lists: Sequence[Sequence[Array]], count: int, sizes: Sequence[int]) -> None:
    """Raise ``InvalidArgument`` unless there are ``count`` lists of tensors of ``sizes`` entries."""
    if len(lists) != count:
        raise InvalidArgument(f"lists: expected {count}, got {len(lists)}")
    for number, tensors in enumerate(lists):
        if len(tensors) != len(sizes):
            raise InvalidArgument(f"list {number}: expected {len(sizes)} tensors, got {len(tensors)}")
        for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
            if tensor.size != size:
                raise InvalidArgument(
                    f"list {number}, tensor {i}: expected {size} entries, got {tensor.size}"
                )
