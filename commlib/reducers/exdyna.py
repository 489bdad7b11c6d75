"""ExDyna: each rank selects in a partition of its own, and all add up their values at all that was selected.

Yoon and Oh 2024 (arXiv 2402.13781), after its authors' code; without ``balance`` it is their MiCRO
(arXiv 2310.00967).
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib.cost import Cost, LinkSeconds, Step, allreduce_traffic, by_link
from commlib.entries import INFINITY, take_out
from commlib.errors import InvalidArgument
from commlib.reducers.base import check_is_bool
from commlib.reducers.messages import gather_messages
from commlib.reducers.residual import ResidualOptions, ResidualReducer, State
from commlib.registry import resolve
from commlib.selection.base import BLOCK, accumulate, block_maxima, reaching
from commlib.topology import LinkBytes, Topology
from commlib.transport.base import Integers
from commlib.vectors import VALUE_BYTES, Float32, Index, SparseVector, index_dtype, non_finite, partition
from commlib.wire import CODECS, IndexCodec
from commlib.work import Work

BLOCKS = 1024  # of the gradient; a partition is a run of whole blocks
UNEVEN = 1.05  # a partition with so many times the mean of what was found gives a block to its neighbour
LEAST_SHARE = 4  # no partition gets smaller than the mean divided by this
SCALE = 1.005  # of the threshold, where more or fewer entries than ``TOLERANCE`` times k were found
TOLERANCE = 1.1
DRIFT = 1.5  # beyond so many times k, the threshold is found anew
MOST = 2  # times k entries are sent
USUAL = 1.3  # times k entries are: the threshold stays while there are up to ``DRIFT`` times k
SAMPLES = 64  # of the magnitudes in each partition, from which a threshold is found
HEADER_BYTES = 16  # of a message of indices, at most
SMALLEST = np.finfo(np.float32).tiny  # zeros are never selected


def _most(step: Step) -> int:
    return min(step.size, MOST * step.k)


def _traffic(step: Step, rank: int) -> LinkBytes:
    """At most: the indices of ``2k`` entries round a ring, and the all-reduce of their values."""
    most = _most(step)
    right = (rank + 1) % step.ranks
    entries = max(VALUE_BYTES * most, _codec(step.options["indices"]).message_bytes(most, step.size))
    gathered = by_link(step.nodes, rank, {right: entries + HEADER_BYTES * step.ranks})
    return gathered + allreduce_traffic(step.nodes, rank, most)


def _seconds(step: Step) -> LinkSeconds:
    """``3·k·(P − 1)/P`` words, for as many entries as usual, in an all-gather and an all-reduce.

    The fullest partition is that of the first steps: its indices take longest on their way round the ring.
    """
    usual, ranks = min(step.size, USUAL * step.k), step.world.size
    bytes_of = partial(_codec(step.options["indices"]).message_bytes, size=round(step.size / ranks))
    mean, most = bytes_of(round(usual / ranks)), bytes_of(round(step.fullest(usual)))
    seconds = step.world.allgather_ints(2) + step.world.ring_of_messages(mean, most) + step.allreduce(usual)
    return step.after_comparison(seconds)


def _work(step: Step) -> Work:
    """Accumulate; select from one partition; take and add up ``k`` values."""
    selected = Work(add=step.size / step.world.size, entry=step.k, coded=step.k, messages=3)
    return Work(add=step.size * (1 + step.decays)) + selected + step.placing(step.k)


def _codec(name: str) -> IndexCodec:
    made: object = resolve(CODECS, "codec", name)()
    if not isinstance(made, IndexCodec):
        names = ", ".join(each for each, kind in CODECS.items() if issubclass(kind, IndexCodec))
        raise InvalidArgument(f"indices: expected one of {names}, whose values can be added up, got {name!r}")
    return made


@dataclass(frozen=True)
class ExDynaOptions(ResidualOptions):
    """The codec of the indices, and whether partitions are balanced: see :class:`ExDyna`."""

    indices: str
    balance: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        check_is_bool("balance", self.balance)


@dataclass(frozen=True)
class ExDynaState(State):
    """``counted``: steps that were not skipped. ``threshold``: of the latest one, 0 if it has to be found.

    ``bounds``: the ``P + 1`` bounds of the partitions, in blocks; ``found``: entries that were found in each.
    """

    counted: int
    threshold: float
    bounds: npt.NDArray[np.int64]
    found: npt.NDArray[np.int64]


class ExDyna(ResidualReducer):
    """Disjoint selections by one threshold; the values of all ranks at their union are added up.

    In step ``t`` rank ``r`` selects from its own accumulated gradient in partition ``(r + t) mod P``, so that
    no two ranks select the same entry. Indices are all-gathered, the values of all ranks at all of them are
    all-reduced, and all ranks clear those in their residuals: ``3·k·(P − 1)/P`` words.

    The threshold is scaled by a half percent a step towards ``k`` entries; where the count is off by a factor
    above 1.5, the ranks find it from samples of their partitions' magnitudes (the published code starts
    from a constant, and takes hundreds of steps). Where more than ``2k`` entries reach it, each partition
    keeps its share of them. With ``balance``, partitions move blocks to their neighbours until all hold as
    many entries (MiCRO does not). ``indices``: the index codec; values are added up on their way, and travel
    as float32.
    """

    cost = Cost(_traffic, _seconds, _work, is_exact=False, applied=lambda step: step.k, most=_most)
    needs_entries = True
    options: ExDynaOptions
    state: ExDynaState

    def __init__(
        self, topology: Topology, size: int, *, indices: str = "raw32", balance: bool = True, **options: Any
    ) -> None:
        super().__init__(topology, size, **options)
        self.options = ExDynaOptions(**asdict(self.options), indices=indices, balance=balance)
        self._index_codec, ranks = _codec(indices), self.comm.size
        self._selector = self.kernels.make_selector("exact")
        self._edges = partition(self.length, min(BLOCKS, max(1, self.length)))  # of the blocks
        bounds = partition(len(self._edges) - 1, ranks)
        self.state = ExDynaState(0, 0.0, bounds, np.zeros(ranks, np.int64))

    def set_density(self, density: float) -> None:
        """See :meth:`ResidualReducer.set_density`; the threshold is found again in the next step."""
        super().set_density(density)
        self.state = replace(self.state, threshold=0.0)

    def _exchange(self, collected: Float32) -> tuple[SparseVector, int]:
        accumulated, comm, is_valid = self._spare, self.comm, self._accumulate(collected)
        self.wait_for_comparison()  # the state says which exchanges follow
        bounds = self._balanced() if self.options.balance else self.state.bounds
        edges = self._edges[bounds]
        of_ranks = (np.arange(comm.size) + self.state.counted) % comm.size  # the partition of each rank
        place = of_ranks[comm.rank]
        own = accumulated[edges[place] : edges[place + 1]]
        with self.measure(self.link):
            threshold = self._threshold(own, is_valid)
            selected = self._reaching(own, threshold)
            finite, found = comm.allgather_ints([is_valid, selected.nnz]).T
        if not finite.all():
            return non_finite(self.length, self.arrays), selected.nnz
        kept, limit = found, MOST * self.k
        if found.sum() > limit:
            kept = np.diff(found.cumsum() * limit // found.sum(), prepend=0)
            selected = selected.top_k(int(kept[comm.rank]))
        ranks = np.argsort(of_ranks)  # of the partitions
        union = self._union(selected, ranks, edges)
        # On every rank: what is applied leaves all residuals.
        total = self.all_reduce(take_out(accumulated, union))
        self.state = ExDynaState(self.state.counted + 1, float(threshold), bounds, found[ranks])
        return SparseVector.trusted(self.length, union, total), selected.nnz

    def _accumulate(self, collected: Float32) -> bool:
        """Write the accumulated gradient to the next residual; return whether it is finite."""
        residual = self._decayed()
        maxima = self.workspace.get("maxima", -(-self.length // BLOCK), np.uint32)
        with self.measure("select"):
            accumulate(collected, residual, self._spare, maxima)
            return bool(maxima.max() < INFINITY)

    def _balanced(self) -> Integers:
        """Return the bounds of the partitions after each gave a block to a neighbour that found fewer."""
        bounds, found = self.state.bounds.copy(), self.state.found.astype(float)
        blocks, ranks = len(self._edges) - 1, len(found)
        mean, moved = found.sum() / ranks, found.sum() / blocks
        least = max(1, blocks // (LEAST_SHARE * ranks))
        for left in range(ranks - 1):
            sizes = np.diff(bounds)
            for giver, taker, step in ((left, left + 1, -1), (left + 1, left, 1)):
                is_uneven = found[giver] > UNEVEN * mean and found[taker] * UNEVEN < mean
                if is_uneven and sizes[giver] > least:
                    bounds[left + 1] += step
                    found[giver] -= moved
                    found[taker] += moved
                    break
        return bounds

    def _threshold(self, own: Float32, is_valid: bool) -> np.float32:
        """Return the threshold of this step, the same on all ranks."""
        before, total = np.float32(self.state.threshold), int(self.state.found.sum())
        if self.k >= self.length:
            return SMALLEST
        if before and self.k <= DRIFT * total <= DRIFT**2 * self.k:
            if TOLERANCE * total < self.k or total > TOLERANCE * self.k:
                before *= np.float32(SCALE if total > self.k else 1 / SCALE)
            return max(before, SMALLEST)
        magnitudes, counts = np.zeros(SAMPLES, np.float32), np.zeros(SAMPLES, np.int64)
        if is_valid and len(own):
            largest = -np.sort(-np.abs(self._selector.select(own, self.k).values))
            counts[...] = np.geomspace(1, len(largest), SAMPLES)  # entries that reach each sample
            magnitudes[...] = largest[counts - 1]
        own_samples = [*magnitudes.view(np.uint32).tolist(), *np.diff(counts, prepend=0).tolist()]
        bits, weights = np.split(self.comm.allgather_ints(own_samples), 2, axis=1)
        sampled = bits.astype(np.uint32).view(np.float32).ravel()
        order = np.argsort(-sampled, kind="stable")
        place = np.searchsorted(weights.ravel()[order].cumsum(), self.k)
        return np.maximum(sampled[order[min(int(place), len(order) - 1)]], SMALLEST)

    def _reaching(self, own: Float32, threshold: np.float32) -> SparseVector:
        """Return the entries of a partition that reach the threshold."""
        lowest, get = threshold.view(np.uint32), self.workspace.get
        with self.measure("select"):
            maxima = block_maxima(own.view(np.uint32))
            found = reaching(own, maxima, lowest, MOST * self.k, allocate=get)
            if found is None:  # too many to be sent, but the next threshold follows from their number
                found = reaching(own, maxima, lowest, len(own), allocate=get)
            assert found is not None, "there are no more entries"
            return found

    def _union(self, selected: SparseVector, ranks: Integers, edges: Integers) -> Index:
        """Return the indices that all ranks have selected, in order; ``ranks`` of the partitions."""
        codec, dtype = self._index_codec, index_dtype(self.length)
        own = selected.indices_or_range
        message = codec.encode(own, selected.size) if len(own) else np.empty(0, np.uint8)
        with self.measure(self.link):
            messages = gather_messages(self.comm, message, self.workspace)
        indices = [np.empty(0, dtype)]
        with self.measure("combine"):
            for rank, low, high in zip(ranks, edges[:-1], edges[1:], strict=True):
                if len(messages[rank]):
                    own, _ = codec.decode(messages[rank], int(high - low), lambda entries: 0)
                    indices.append(own.astype(dtype) + dtype.type(low))
            return np.concatenate(indices)
