"""Top-k all-gather: everybody sends everybody its entries (TopkA in Ok-Topk, NaiveAG in HiTopKComm)."""

from commlib.reducers.messages import gather_messages
from commlib.reducers.selecting import SelectingReducer
from commlib.vectors import SparseVector


class AllGather(SelectingReducer):
    """Each rank sends its ``k`` entries to the ``P − 1`` others, and all add them up in rank order."""

    def _combine(self, selected: SparseVector, finite: bool) -> SparseVector | None:
        message = self.encode(selected)
        lengths = self.synchronize_step(finite, len(message))
        if lengths is None:
            return None
        with self.measure(self.link):
            messages = gather_messages(self.comm, message, lengths[self.peers, 0], self.workspace)
        with self.measure("combine"):
            return self.sum_sparse([self.codec.decode(each, self.length) for each in messages])
