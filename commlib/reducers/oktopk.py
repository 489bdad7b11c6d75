"""Ok-Topk's O(k) sparse all-reduce (Li and Hoefler 2022, algorithm 1), and its cost in a group of ranks."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib.cost import Cost, LinkSeconds, Step, by_link, union
from commlib.errors import InvalidArgument
from commlib.reducers.messages import even_out, gather_entries, swap_in_buckets
from commlib.reducers.residual import State
from commlib.reducers.sparse import SelectingReducer, SparseOptions
from commlib.selection import GivenSelector
from commlib.topology import LinkBytes, Topology
from commlib.transport.base import Integers
from commlib.vectors import (
    VALUE_BYTES,
    Float32,
    SparseVector,
    concatenate,
    index_dtype,
    non_finite,
    partition,
)
from commlib.wire import Message
from commlib.work import Work


def _most(step: Step) -> int:
    return min(step.size, 2 * step.k)


def _traffic(step: Step, rank: int) -> LinkBytes:
    """At most the entries of the split, all magnitudes, and the entries of balance and all-gather.

    A rank selects at most ``2k`` entries between re-evaluations, and at most ``2k`` reach the global
    threshold. Of a message that is dense its region's sum has all entries: no more values than the bytes of a
    sparse one hold. The bound is for a step that re-evaluates the threshold: by the paper's equation 3 an
    ordinary balanced step sends at most ``6·k·(P − 1)/P`` words.
    """
    ranks, size, selected = step.ranks, step.size, _most(step)
    final = (index_dtype(size).itemsize + VALUE_BYTES) * selected
    message = max(final, step.codec.message_bytes(selected, size))  # a codec's header may be all of it
    summed = min(size, ranks * message * size // step.codec.values.message_bytes(size))
    to_each = dict.fromkeys(range(ranks), message + final)
    to_each[(rank + 1) % ranks] += final + VALUE_BYTES * summed
    return by_link(step.nodes, rank, to_each)


# Before thresholds have settled, entries are so many times k on average, as residuals grow until one is found
# again: 1.2 to 1.7 of docs/validation.md's gradients, where the global one is found every 2.8 to 18 steps.
DRIFT, UNSETTLED_REEVALUATION = 1.5, 5


def _sent(step: Step) -> float:
    """Return how many entries are sent, and are in the result, on average."""
    return step.k if step.settled else min(step.size, DRIFT * step.k)


def _seconds(step: Step) -> LinkSeconds:
    """``6k·(P − 1)/P`` words at most (equation 3), on average over the steps of its periods."""
    group, size, period = step.world, step.size, step.options["reevaluate_every"]
    parts = _sent(step) / group.size
    split = group.exchange(step.message(parts, size / group.size))
    entry = index_dtype(size).itemsize + VALUE_BYTES
    gather = group.allgather_ints(3) + group.ring(entry * parts)
    magnitudes = VALUE_BYTES * union(group.size, _sent(step), size) / group.size
    regions: float = 2 * group.allgather_ints(1) / step.options["repartition_every"]
    threshold = group.ring(magnitudes) / (period if step.settled else min(UNSETTLED_REEVALUATION, period))
    return step.after_comparison(split + gather + regions + threshold)


def _work(step: Step) -> Work:
    """Select; split, reduce, gather the entries of the result, and keep what is not in it.

    With a lossy codec, the entries that were sent are decoded as well.
    """
    k = _sent(step)
    moved = Work(entry=5 * k, coded=k, messages=step.world.size + 5)
    work = step.selecting(step.size, k) + moved + step.placing(k)
    return work if step.codec.lossless else work + Work(entry=3 * k, coded=k, place=3 * k)


BUCKET_RANKS = 4  # so many sends and receives are under way while the bucket before is added up
IMBALANCE = 4  # parts are evened out where the largest is more than so many times the mean


@dataclass(frozen=True)
class OkTopKOptions(SparseOptions):
    """Periods in steps, and who keeps entries below the global threshold: see :class:`OkTopK`."""

    repartition_every: int
    reevaluate_every: int
    leftovers: str

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("repartition_every", "reevaluate_every"):
            period = getattr(self, name)
            if type(period) is not int or period < 1:
                raise InvalidArgument(f"{name}: expected a whole number of steps from 1, got {period!r}")
        if self.leftovers not in ("sender", "owner"):
            raise InvalidArgument(f"leftovers: expected sender or owner, got {self.leftovers!r}")


@dataclass(frozen=True)
class OkTopKState(State):
    """``counted``: steps that were not skipped, ``t`` of the paper. ``regions``: their ``P + 1`` bounds."""

    counted: int
    global_threshold: float
    regions: npt.NDArray[np.int64]


class OkTopK(SelectingReducer):
    """Split and reduce by balanced regions; keep the global top-k; balance and all-gather it.

    Every ``repartition_every`` steps (τ) the ranks agree on regions that hold equal shares of what they
    select; every ``reevaluate_every`` steps (τ′), and whenever the count has drifted beyond a factor of two,
    the global threshold is found exactly. The ``reused`` selector does the same for the local one.

    ``leftovers``: who keeps entries below the global threshold: each ``sender`` its own entries (the paper's
    local ∩ global rule), or the ``owner`` of the region their sum.
    """

    cost = Cost(_traffic, _seconds, _work, is_exact=False, applied=_sent, most=lambda step: 2 * step.k)
    options: OkTopKOptions
    state: OkTopKState

    def __init__(
        self,
        topology: Topology,
        size: int,
        *,
        selector: GivenSelector = "reused",
        repartition_every: int = 64,
        reevaluate_every: int = 32,
        leftovers: str = "sender",
        **options: Any,
    ) -> None:
        super().__init__(topology, size, selector=selector, **options)
        self.options = OkTopKOptions(
            **asdict(self.options),
            repartition_every=repartition_every,
            reevaluate_every=reevaluate_every,
            leftovers=leftovers,
        )
        self.state = OkTopKState(0, 0.0, partition(self.length, self.comm.size))

    def set_density(self, density: float) -> None:
        """See :meth:`SelectingReducer.set_density`; the global threshold is found again in the next step."""
        super().set_density(density)
        self.state = replace(self.state, global_threshold=float("inf"))

    def _combine(self, selected: SparseVector) -> SparseVector:
        self.wait_for_comparison()  # periods and k say which exchanges follow
        with self.measure(self.link):
            if self.state.counted % self.options.repartition_every == 0:
                self.state = replace(self.state, regions=self._repartition(selected))
            messages = self._split(selected)
            reduced = self._reduce_region(messages)
            reaches = np.abs(reduced.values) >= np.float32(self.state.global_threshold)
            here = [reduced.is_finite, reduced.nnz, int(np.count_nonzero(reaches))]
            finite, counts, reaching = self.comm.allgather_ints(here).T
            if not finite.all():
                return non_finite(self.length, self.arrays)
            if self.sends_all:
                kept = reduced
            elif self._is_threshold_due(counts.sum(), reaching.sum()):
                kept, counts = self._exact_global_top_k(reduced, counts)
            else:
                kept, counts = reduced.where(reaches), reaching
            combined = self._balance_and_allgather(kept, counts)
        with self.measure("combine"):
            if self.options.leftovers == "sender":
                self._keep_unapplied(selected, messages, combined)
            else:
                self.drop(reduced.without(kept), at=self._low_of(self.comm.rank))
        self.state = replace(self.state, counted=self.state.counted + 1)
        return combined

    def _repartition(self, selected: SparseVector) -> npt.NDArray[np.int64]:
        """Return the mean over ranks of the bounds that cut each rank's selection into equal shares."""
        comm, places = self.comm, selected.indices_or_range
        if len(places):
            inner = [int(places[len(places) * region // comm.size]) for region in range(1, comm.size)]
        else:
            inner = [int(bound) for bound in partition(self.length, comm.size)[1:-1]]
        # Rank r averages the r-th bound of all ranks; then all ranks gather the averages.
        of_this_region = comm.alltoall_ints([0, *inner])
        averages = comm.allgather_ints([int(of_this_region.sum()) // comm.size])[:, 0]
        return np.array([0, *averages[1:], self.length], np.int64)

    def _split(self, selected: SparseVector) -> list[Message]:
        """Return the messages to the owners of the regions."""
        bounds, owner_keeps = self.state.regions.tolist(), self.options.leftovers == "owner"
        return [
            self.encode(selected.slice(low, high), at=low, keeps=owner_keeps)
            for low, high in zip(bounds[:-1], bounds[1:], strict=True)
        ]

    def _reduce_region(self, messages: list[Message]) -> SparseVector:
        """Return the sum of this rank's region: each sends to its right neighbour first, and goes round."""
        rank = self.comm.rank
        reduced = self._decode(messages[rank], rank)
        for arrived in swap_in_buckets(self.comm, messages, self.workspace, BUCKET_RANKS):
            with self.measure("combine"):  # while the next bucket is under way
                vectors = [reduced, *(self._decode(message, rank) for message in arrived.values())]
                reduced = self.sum_sparse(vectors, at=self._low_of(rank))
        return reduced

    def _decode(self, message: Message, region: int) -> SparseVector:
        return self.codec.decode(message, self._low_of(region + 1) - self._low_of(region))

    def _low_of(self, region: int) -> int:
        return int(self.state.regions[region])

    def _is_threshold_due(self, entries: int, reaching: int) -> bool:
        """Return whether the global threshold is found again; ``reaching`` entries reach the old one."""
        is_due = self.state.counted % self.options.reevaluate_every == 0
        return is_due or not min(self.k, entries) <= 2 * reaching <= 4 * self.k

    def _exact_global_top_k(self, reduced: SparseVector, counts: Integers) -> tuple[SparseVector, Integers]:
        """Gather all magnitudes, find the threshold (lines 9–12) and cut ties off at the highest indices.

        ``counts``: of the entries of every region; also returned, of those that are kept.
        """
        comm, magnitudes = self.comm, np.abs(reduced.values)
        everything = self.workspace.get("magnitudes", int(counts.sum()))
        gathered = np.split(everything, counts.cumsum()[:-1])
        comm.allgather(magnitudes, gathered)
        k, threshold = min(self.k, len(everything)), np.float32(0)
        if k:
            threshold = self._partitioned(everything, -k)[-k]
        self.state = replace(self.state, global_threshold=float(threshold))
        above = np.array([int(np.count_nonzero(each > threshold)) for each in gathered])
        ties = np.array([int(np.count_nonzero(each == threshold)) for each in gathered])
        kept_ties = np.clip(k - above.sum() - (ties.cumsum() - ties), 0, ties)
        is_tie = magnitudes == threshold
        is_kept_tie = is_tie & (np.cumsum(is_tie) <= int(kept_ties[comm.rank]))
        return reduced.where((magnitudes > threshold) | is_kept_tie), above + kept_ties

    def _partitioned(self, values: Float32, place: int) -> Float32:
        """Return the values with the one at ``place`` where sorting puts it, in memory of the workspace."""
        if self.arrays is not np:
            return np.partition(values, place)
        ordered: Float32 = self.workspace.get("partitioned", len(values))
        ordered[...] = values
        ordered.partition(place)
        return ordered

    def _balance_and_allgather(self, kept: SparseVector, counts: Integers) -> SparseVector:
        """Return the kept entries of all regions, ``counts`` in each, gathered from parts not too uneven."""
        comm = self.comm
        indices = kept.indices_or_range.astype(index_dtype(self.length))
        indices += indices.dtype.type(self.state.regions[comm.rank])
        values = kept.values
        if counts.max() * comm.size > IMBALANCE * counts.sum():
            indices, values = even_out(comm, [indices, values], counts)
            counts = np.diff(partition(int(counts.sum()), comm.size))
        return SparseVector(self.length, *gather_entries(comm, [indices, values], counts, self.workspace))

    def _keep_unapplied(
        self, selected: SparseVector, messages: list[Message], combined: SparseVector
    ) -> None:
        """Put back into the residual what was sent in vain: only local ∩ global is cleared (line 14)."""
        if self.codec.lossless:
            self.drop(selected.without(combined))
        else:
            self.drop(selected)
            sent = concatenate([self._decode(message, region) for region, message in enumerate(messages)])
            self.take_off(sent.within(combined))
