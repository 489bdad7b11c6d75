"""SparCML's recursive doubling on sparse vectors (SSAR_Recursive_double)."""

from commlib.reducers.messages import exchange_message, receive_message, send_message
from commlib.reducers.selecting import SelectingReducer
from commlib.vectors import SparseVector
from commlib.wire import Message


class SSARDoubling(SelectingReducer):
    """In round ``t`` ranks ``2ᵗ`` apart exchange and add all they have, dense once δ is passed.

    Where ``P`` is no power of two, each rank beyond hands its entries to one within before, and gets the
    result after. Addition commutes, also to the bit: both partners of a round hold the same sum.
    """

    def _combine(self, selected: SparseVector, finite: bool) -> SparseVector | None:
        if self.synchronize_step(finite) is None:
            return None
        comm = self.comm
        within = 1 << (comm.size.bit_length() - 1)  # the largest power of two that is not above P
        partner = comm.rank ^ within
        with self.measure(self.link):
            if comm.rank >= within:
                send_message(comm, self.encode(selected), partner)
                return self.lossless.decode(receive_message(comm, partner, self.workspace), self.length)
            combined = selected
            if partner < comm.size:
                combined = self._add(self.encode(selected), receive_message(comm, partner, self.workspace))
            distance = 1
            while distance < within:
                combined = self._round(combined, distance)
                distance *= 2
            if partner < comm.size:
                send_message(comm, self.lossless.encode(combined), partner)
        return combined

    def _round(self, combined: SparseVector, distance: int) -> SparseVector:
        """Return the sum of the two groups of ``distance`` ranks that meet in this round."""
        comm = self.comm
        # All ranks of a group encode the same sum: one of them keeps what is rounded away.
        own = self.encode(combined, keeps=comm.rank % distance == 0)
        return self._add(own, exchange_message(comm, own, comm.rank ^ distance, self.workspace))

    def _add(self, first: Message, second: Message) -> SparseVector:
        with self.measure("combine"):
            return self.sum_sparse([self.codec.decode(message, self.length) for message in (first, second)])
