"""Sums of squares of many tensors, for LARS and LAMB: on one rank, or in parts on all ranks.

Every sum is in float64, whatever the tensors are. A NaN in a tensor makes its sum a NaN.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
from numba import njit

from pto.comm import Array, Choice, Comm, Seconds, agree_on, choose, rounds, slowest
from pto.errors import InvalidArgument
from pto.partition import Partition, Piece, by_slices, by_tensor

Float64: TypeAlias = npt.NDArray[np.float64]
Function = TypeVar("Function", bound=Callable[..., Any])
Way: TypeAlias = Literal["auto", "layers", "slices", "local"]

LANES = 64  # parallel sums, enough for the widest vector units; the order is the same on all of them
BLOCK = 1 << 15  # entries of a narrow type that are widened at a time, a multiple of LANES
NARROW = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
WIDE = (np.dtype(np.float32), np.dtype(np.float64))
SAMPLE_ENTRIES = 1 << 23  # of the tensor that is measured, 32 MiB: more than a rank's share of most caches
SAMPLE_CALLS = 256
WAYS: tuple[Way, ...] = ("auto", "layers", "slices", "local")
PARTITIONS: dict[str, Callable[[Sequence[int], int], Partition]] = {"layers": by_tensor, "slices": by_slices}


def compiled(function: Function) -> Function:
    """Compile a kernel that runs without the GIL, cached on disk where a cache folder can be written.

    Additions keep the order of the source, so the bits are the same on every processor.
    """
    try:
        kernel: Any = njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # neither the package nor a cache folder of the user can be written
        kernel = njit(nogil=True, error_model="numpy")(function)
    return kernel


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
    """Return the sum of the lanes, added pairwise; ``lanes`` is overwritten."""
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

    Accumulated in float64, in an order that depends only on the number of entries: equal entries give equal
    bits on every processor, and a narrow tensor gives those of its float32 copy. Apart from the rounding of
    squared float64 entries, the relative error is at most ``(n/64 + 7)·2⁻⁵³`` for ``n`` entries.

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


def _kernel_seconds(comm: Comm, entries: int) -> Callable[[Sequence[Piece]], float]:
    """Measure the kernel on all ranks at the same time; return the seconds of pieces on the slowest rank."""
    long, short = np.ones(entries, np.float32), [np.ones(1, np.float32)] * SAMPLE_CALLS
    of_call = slowest(rounds(comm, lambda: [sum_of_squares(each) for each in short])) / SAMPLE_CALLS
    of_entry = slowest(rounds(comm, lambda: sum_of_squares(long))) / entries
    return lambda own: of_entry * sum(piece.high - piece.low for piece in own) + of_call * len(own)


class Norms:
    """Sums of squares of several lists of tensors that are equal on all ranks, such as weights and gradients.

    ``sizes``: entries of each tensor, the same in every list. ``partition``: "layers" gives every rank whole
    tensors, longest first, and the results are bitwise those of one rank; "slices" gives every rank an equal
    slice of their concatenation, which is always balanced, and adds the sums of a tensor's pieces in the
    order of the ranks; "local" computes everything on every rank; "auto" measures kernel and exchange and
    takes the fastest. ``choice`` is the result, with its reason.

    All ranks construct it together and call it together; :mod:`pto` begins with an example.
    """

    def __init__(
        self, sizes: Sequence[int], comm: Comm | None, *, lists: int = 2, partition: Way = "auto"
    ) -> None:
        if partition not in WAYS:
            raise InvalidArgument(f'partition: expected one of {", ".join(WAYS)}, got "{partition}"')
        self.sizes, self.lists = tuple(sizes), lists
        self._exchange: SumsExchange | None = None
        self.choice = self._choose(comm, partition)
        self._own = self._exchange.own if self._exchange else by_tensor(self.sizes, 1).pieces[0]

    def squares(self, *lists: Sequence[Array]) -> Float64:
        """Return the sums of squares, float64 of shape ``(lists, tensors)``, bitwise equal on all ranks.

        In parts: one all-gather of eight bytes for each piece of each list, as many from each rank.
        """
        self._check(lists)
        sums = np.empty((self.lists, len(self._own)))
        for tensors, own in zip(lists, sums, strict=True):
            for i, piece in enumerate(self._own):
                own[i] = sum_of_squares(tensors[piece.tensor].reshape(-1)[piece.low : piece.high])
        return sums if self._exchange is None else self._exchange.gather(sums)

    @property
    def partition(self) -> Partition | None:
        """The pieces of each rank; ``None`` where every rank computes everything."""
        return None if self._exchange is None else self._exchange.partition

    def _check(self, lists: Sequence[Sequence[Array]]) -> None:
        if len(lists) != self.lists:
            raise InvalidArgument(f"lists: expected {self.lists}, got {len(lists)}")
        for number, tensors in enumerate(lists):
            if len(tensors) != len(self.sizes):
                raise InvalidArgument(
                    f"list {number}: expected {len(self.sizes)} tensors, got {len(tensors)}"
                )
            for i, (tensor, size) in enumerate(zip(tensors, self.sizes, strict=True)):
                if tensor.size != size:
                    raise InvalidArgument(
                        f"list {number}, tensor {i}: expected {size} entries, got {tensor.size}"
                    )

    def _choose(self, comm: Comm | None, way: Way) -> Choice:
        if comm is None or comm.size == 1:
            return Choice(False, "norms locally: there is one rank")
        agree_on(comm, "settings", {"lists": str(self.lists), "partition": way})
        agree_on(comm, "tensors", {f"tensor {i}": f"of {size} entries" for i, size in enumerate(self.sizes)})
        if not sum(self.sizes):
            return Choice(False, "norms locally: there is nothing to compute")
        if way == "auto":
            return self._measure(comm)
        if way == "local":
            return Choice(False, "norms locally: as asked for")
        self._exchange = SumsExchange(PARTITIONS[way](self.sizes, comm.size), comm, self.lists)
        return Choice(True, f"norms in parts by {way}: as asked for")

    def _measure(self, comm: Comm) -> Choice:
        kernel_seconds = _kernel_seconds(comm, min(sum(self.sizes), SAMPLE_ENTRIES))
        whole = self.lists * kernel_seconds(by_tensor(self.sizes, 1).pieces[0])
        candidates: list[tuple[str, Seconds, SumsExchange]] = []
        for way, cut in PARTITIONS.items():
            exchange = SumsExchange(cut(self.sizes, comm.size), comm, self.lists)
            part = self.lists * max(map(kernel_seconds, exchange.partition.pieces))
            candidates.append((way, Seconds(whole, part, exchange.seconds()), exchange))
        way, seconds, exchange = min(candidates, key=lambda each: each[1].part + each[1].exchange)
        choice = choose("norms", seconds, f"in parts by {way}")
        self._exchange = exchange if choice.in_parts else None
        return choice


class SumsExchange:
    """A planned all-gather of the sums of all ranks' pieces. ``own``: this rank's pieces.

    The sums are sent as the bits of integers, padded to the same number on every rank:
    ``Comm.allgather_ints`` takes ``log₂ P`` latencies, the ring of ``Comm.allgather`` ``P − 1``.
    """

    def __init__(self, partition: Partition, comm: Comm, lists: int) -> None:
        self.partition, self.own = partition, partition.pieces[comm.rank]
        self._comm, self._lists = comm, lists
        self._tensors = [np.array([piece.tensor for piece in pieces], np.intp) for pieces in partition.pieces]
        self._padded = np.zeros((lists, max(map(len, partition.pieces))))

    def gather(self, own: Float64) -> Float64:
        """Return the sums of whole tensors, ``(lists, tensors)``; ``own``: those of this rank's pieces.

        A tensor's pieces are added in the order of the ranks, so the bits are the same on all of them.
        """
        self._padded[:, : len(self.own)] = own
        rows = self._comm.allgather_ints(self._padded.view(np.int64).reshape(-1).tolist())
        sums = rows.view(np.float64).reshape(len(rows), *self._padded.shape)
        totals = np.zeros((self._lists, len(self.partition.sizes)))
        for tensors, part in zip(self._tensors, sums, strict=True):
            totals[:, tensors] += part[:, : len(tensors)]
        return totals

    def seconds(self) -> float:
        """Measure :meth:`gather`; all ranks call this together."""
        own = np.zeros((self._lists, len(self.own)))
        return slowest(rounds(self._comm, lambda: self.gather(own)))
