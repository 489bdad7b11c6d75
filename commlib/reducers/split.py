"""SparCML's split all-reduces: each rank adds up one range of the indices, then all gather the ranges."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from commlib.arrays import clear
from commlib.cost import (
    Cost,
    LinkSeconds,
    Step,
    by_link,
    other_messages_bytes,
    partition_lengths,
    union,
    whole_size,
)
from commlib.errors import InvalidArgument, look_up
from commlib.reducers.messages import gather_messages, message_buffer, swap_messages
from commlib.reducers.sparse import SelectingReducer, SparseOptions
from commlib.topology import LinkBytes, Topology
from commlib.vectors import VALUE_BYTES, SparseVector, concatenate, partition
from commlib.wire import VALUE_CODECS, Codec, Message, ValueCodec
from commlib.work import Work


def _split_traffic(step: Step, rank: int, sums_bytes: Callable[[int], int]) -> LinkBytes:
    """At most ``k`` entries to the owner of each range, and the ring all-gather of the sums."""
    lengths, k = partition_lengths(step.size, step.ranks), step.most_selected(step.size)
    to_each = {to: step.message(min(k, length), length) for to, length in enumerate(lengths)}
    to_each[(rank + 1) % len(lengths)] += other_messages_bytes(lengths, rank, sums_bytes)
    return by_link(step.nodes, rank, to_each)


def _ssar_traffic(step: Step, rank: int) -> LinkBytes:
    """At most ``P·k`` entries, at least ``2·k·(P − 1)/P`` (SparCML's bounds)."""
    most = step.ranks * step.most_selected(step.size)
    return _split_traffic(step, rank, lambda part: step.message(min(part, most), part))


def _dsar_traffic(step: Step, rank: int) -> LinkBytes:
    """At most ``k`` entries, then ``(P − 1)·d/P`` values."""
    return _split_traffic(step, rank, _sums_codec(step).message_bytes)


def _sums_codec(step: Step) -> ValueCodec:
    return look_up(VALUE_CODECS, "codec", step.options["sums"])()


def _ssar_seconds(step: Step) -> LinkSeconds:
    """Send the fullest range to its owner, then the sums; balanced it is SparCML's lower bound (5.3.2).

    Sums go round in pieces, as if ranges were balanced.
    """
    own, ranks = step.size / step.world.size, step.world.size
    fullest = step.message(step.fullest(step.k), own)
    split = max(step.world.exchange(step.message(step.k / ranks, own)), step.world.gather(fullest))
    sums = step.message(union(ranks, step.k, step.size) / ranks, own)
    return step.on_slowest_link(split + step.world.ring_of_messages(sums))


def _dsar_seconds(step: Step) -> LinkSeconds:
    """``2·(P − 1)·α``, ``(P − 1)/P·2k·β`` and ``(P − 1)/P·d·β`` (SparCML, 5.3.3)."""
    ranks = step.world.size
    split = step.world.exchange(step.message(step.k / ranks, step.size / ranks))
    sums = _sums_codec(step).message_bytes(round(step.size / ranks))
    return step.on_slowest_link(split + step.world.ring_of_messages(sums))


def _ssar_work(step: Step) -> Work:
    """Select; add up the fullest range of every rank; put the sums of all ranges together."""
    whole, added = union(step.world.size, step.k, step.size), step.world.size * step.fullest(step.k)
    split = Work(entry=added, coded=added + whole, messages=step.world.size + 1)
    return step.selecting(step.size, step.k) + split + step.rounding(step.k) + step.placing_sum()


def _dsar_work(step: Step) -> Work:
    """Select; add up ``k/P`` entries of every rank; the ranges travel dense, and are divided."""
    split = Work(entry=step.k, coded=step.k, add=2 * step.size, messages=step.world.size)
    return step.selecting(step.size, step.k) + split + step.rounding(step.k)


class SplitReducer(SelectingReducer):
    """The first half of both algorithms: the owner of each range adds up its entries in rank order."""

    def __init__(self, topology: Topology, size: int, **options: Any) -> None:
        super().__init__(topology, size, **options)
        bounds = partition(self.length, self.comm.size).tolist()
        self._ranges = list(zip(bounds[:-1], bounds[1:], strict=True))

    def _add_up_own_range(self, selected: SparseVector) -> SparseVector:
        """Return the sum of this rank's range."""
        comm = self.comm
        messages = [self.encode(selected.slice(low, high), at=low) for low, high in self._ranges]
        with self.measure(self.link):
            received = swap_messages(comm, messages, self.workspace)
        with self.measure("combine"):
            low, high = self._ranges[comm.rank]
            return self.sum_sparse([self.codec.decode(message, high - low) for message in received], at=low)

    def _gather_ranges(self, message: Message, codec: Codec) -> SparseVector:
        """Return the vector of which every rank sends its range.

        If one range is dense, the vector is dense, and plain float32 values arrive in their place in it.
        """
        sizes = [high - low for low, high in self._ranges]
        dense = cache(lambda: self.part_of_mean(0, self.length))

        def allocate(rank: int, length: int) -> Message:
            if 0 < length == VALUE_BYTES * sizes[rank]:
                return dense()[slice(*self._ranges[rank])].view(np.uint8)
            return message_buffer(self.workspace, rank, length)

        with self.measure(self.link):
            messages = gather_messages(self.comm, message, self.workspace, allocate)
        with self.measure("combine"):
            pairs = zip(sizes, map(len, messages), strict=True)
            if not any(0 < codec.message_bytes(size, size) == length for size, length in pairs):
                return concatenate(list(map(codec.decode, messages, sizes)))
            for (low, high), each in zip(self._ranges, messages, strict=True):
                decoded, part = codec.decode(each, high - low), dense()[low:high]
                if not decoded.is_dense:
                    clear(part)
                decoded.write_to(part)
        return SparseVector.trusted(self.length, None, dense())


class SSARSplit(SplitReducer):
    """Split, add up, all-gather the sums as sparse vectors (SparCML, SSAR_Split_allgather)."""

    cost = Cost(_ssar_traffic, _ssar_seconds, _ssar_work, is_exact=False)

    def _combine(self, selected: SparseVector) -> SparseVector:
        own = self._add_up_own_range(selected)
        message = self.encode(own, at=self._ranges[self.comm.rank][0])
        return self._gather_ranges(message, self.codec)


@dataclass(frozen=True)
class DSAROptions(SparseOptions):
    """``sums``: the value codec of the dense ranges."""

    sums: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sums not in list(VALUE_CODECS):  # some values have no hash
            raise InvalidArgument(f"sums: expected one of {', '.join(VALUE_CODECS)}, got {self.sums!r}")


class DSARSplit(SplitReducer):
    """Split, add up, all-gather the sums as dense ranges (SparCML, DSAR_Split_allgather; TopkDSA).

    ``sums``: the value codec that the ranges travel in, one of ``VALUE_CODECS``; ``qsgd8``, ``qsgd4`` and
    ``qsgd2`` are the low precision of SparCML's section 6. What it rounds away stays with the range's owner.
    """

    cost = Cost(_dsar_traffic, _dsar_seconds, _dsar_work, is_exact=False, applied=whole_size, most=whole_size)
    options: DSAROptions

    def __init__(self, topology: Topology, size: int, *, sums: str = "fp32", **options: Any) -> None:
        super().__init__(topology, size, **options)
        self.options = DSAROptions(**asdict(self.options), sums=sums)
        self._sums = self.kernels.make_codec(sums)
        self.check_loses_nothing("sums", sums, self._sums)

    def _combine(self, selected: SparseVector) -> SparseVector:
        own = self._add_up_own_range(selected)
        message = self.encode(self._as_dense(own), at=self._ranges[self.comm.rank][0], codec=self._sums)
        return self._gather_ranges(message, self._sums)

    def _as_dense(self, own: SparseVector) -> SparseVector:
        """Return the dense sum of this rank's range, in the memory of the mean."""
        if own.is_dense:
            return own
        values = self.part_of_mean(self._ranges[self.comm.rank][0], own.size)
        clear(values)
        own.write_to(values)
        return SparseVector.trusted(own.size, None, values)
