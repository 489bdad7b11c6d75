"""Top-k all-gather: everybody sends everybody its entries (TopkA in Ok-Topk, NaiveAG in HiTopKComm)."""

from commlib.cost import Cost, LinkSeconds, Step, by_link
from commlib.reducers.messages import gather_messages
from commlib.reducers.sparse import SelectingReducer
from commlib.topology import LinkBytes
from commlib.vectors import SparseVector
from commlib.wire import Message
from commlib.work import Work


def _traffic(step: Step, rank: int) -> LinkBytes:
    """``(P − 1)·k`` entries, to the next rank of a ring."""
    message = step.message(step.most_selected(step.size), step.size)
    ranks = step.ranks
    return by_link(step.nodes, rank, {(rank + 1) % ranks: (ranks - 1) * message})


def _seconds(step: Step) -> LinkSeconds:
    """``(P − 1)·(α + 2k·β)``; HiTopKComm's equation 3 and gTop-k's 6 have ``α·log P`` for the latency."""
    return step.on_slowest_link(step.world.ring_of_messages(step.message(step.k, step.size)))


def _work(step: Step) -> Work:
    """Select; add up the ``k`` entries of every rank."""
    ranks, k = step.world.size, step.k
    gathered = Work(entry=ranks * k, coded=ranks * k, messages=1)
    return step.selecting(step.size, k) + gathered + step.rounding(k) + step.placing_sum()


class AllGather(SelectingReducer):
    """Each rank sends its ``k`` entries to the ``P − 1`` others, and all add them up in rank order."""

    cost = Cost(_traffic, _seconds, _work, is_exact=True)

    def _combine(self, selected: SparseVector) -> SparseVector:
        message = self.encode(selected)
        with self.measure(self.link):
            messages = self._gather(message)
        with self.measure("combine"):
            return self.sum_sparse([self.codec.decode(each, self.length) for each in messages])

    def _gather(self, message: Message) -> list[Message]:
        """Return the message of every rank of ``comm``."""
        return gather_messages(self.comm, message, self.workspace, meanwhile=self.clear_mean)
