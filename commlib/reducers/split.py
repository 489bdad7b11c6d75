"""SparCML's split all-reduces: each rank adds up one range of the indices, then all gather the ranges."""

import numpy as np

from commlib.reducers.messages import gather_messages, swap_messages
from commlib.reducers.sparse import SelectingReducer
from commlib.vectors import SparseVector, concatenate, partition, total


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
        with self.measure(self.link):
            if self.agree(finite) is None:
                return None
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
    """Split, add up, all-gather the sums as dense ranges (SparCML, DSAR_Split_allgather; TopkDSA)."""

    def _combine(self, selected: SparseVector, finite: bool) -> SparseVector | None:
        own = self._add_up_own_range(selected, finite)
        if own is None:
            return None
        combined = np.empty(self.length, np.float32)
        with self.measure(self.link):
            self.comm.allgather(own.to_dense(), [combined[low:high] for low, high in self._ranges])
        return SparseVector(self.length, None, combined)
