"""SparCML's split all-reduces: each rank adds up one range of the indices, then all gather the ranges."""

from typing import Any

import numpy as np

from commlib.errors import InvalidArgument
from commlib.reducers.messages import gather_messages, swap_messages
from commlib.reducers.sparse import SelectingReducer
from commlib.topology import Topology
from commlib.vectors import SparseVector, concatenate, partition, total
from commlib.wire import VALUE_CODECS


class SplitReducer(SelectingReducer):
    """The half that both share: entries go to the owners of their ranges, who add them up in rank order."""

    def _own_range(self, low: int, high: int) -> None:
        super()._own_range(low, high)
        bounds = [int(bound) for bound in partition(self.length, self.comm.size)]
        self._ranges = list(zip(bounds[:-1], bounds[1:], strict=True))

    def _add_up_own_range(self, selected: SparseVector, finite: bool) -> SparseVector | None:
        """Return the sum of this rank's range, or ``None`` where a rank is not finite."""
        comm = self.comm
        messages = [self.encode(selected.slice(low, high), at=low) for low, high in self._ranges]
        if self.agree(finite) is None:
            return None
        with self.measure(self.link):
            received = swap_messages(comm, messages)
        with self.measure("combine"):
            low, high = self._ranges[comm.rank]
            return total([self.codec.decode(message, high - low) for message in received])


class SSARSplit(SplitReducer):
    """Split, add up, all-gather the sums as sparse vectors (SparCML, SSAR_Split_allgather)."""

    def _combine(self, selected: SparseVector, finite: bool) -> SparseVector | None:
        own = self._add_up_own_range(selected, finite)
        if own is None:
            return None
        comm = self.comm
        message = self.encode(own, at=self._ranges[comm.rank][0])
        with self.measure(self.link):
            lengths = comm.agree([len(message)])[:, 0]
            messages = gather_messages(comm, message, lengths)
        with self.measure("combine"):
            decoded = [
                self.codec.decode(each, high - low)
                for each, (low, high) in zip(messages, self._ranges, strict=True)
            ]
            return concatenate(decoded)


class DSARSplit(SplitReducer):
    """Split, add up, all-gather the sums as dense ranges (SparCML, DSAR_Split_allgather; TopkDSA).

    ``sums``: the value codec that the ranges travel in, one of ``VALUE_CODECS``; ``qsgd8``, ``qsgd4`` and
    ``qsgd2`` are the low precision of SparCML's section 6. What it rounds away stays with the range's owner.
    """

    def __init__(self, topology: Topology, size: int, *, sums: str = "fp32", **settings: Any) -> None:
        if sums not in VALUE_CODECS:
            raise InvalidArgument(f"sums: expected one of {', '.join(VALUE_CODECS)}, got {sums!r}")
        self._sums_name, self._sums = sums, VALUE_CODECS[sums]()
        super().__init__(topology, size, **settings)

    def _combine(self, selected: SparseVector, finite: bool) -> SparseVector | None:
        own = self._add_up_own_range(selected, finite)
        if own is None:
            return None
        sums, lengths = own.to_dense(), [high - low for low, high in self._ranges]
        message = self._sums.encode(sums)
        message_bytes = np.array([self._sums.message_bytes(length) for length in lengths])
        with self.measure(self.link):
            messages = gather_messages(self.comm, message, message_bytes)
        with self.measure("combine"):
            decoded = [
                self._sums.decode(each, length) for each, length in zip(messages, lengths, strict=True)
            ]
            rank = self.comm.rank
            if not self._sums.lossless:
                lost = SparseVector(lengths[rank], None, sums - decoded[rank])
                self.drop(lost, at=self._ranges[rank][0])
            return SparseVector(self.length, None, np.concatenate(decoded))

    def settings(self) -> tuple[Any, ...]:
        """See :meth:`Reducer.settings`."""
        return (*super().settings(), self._sums_name)
