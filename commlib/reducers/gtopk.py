"""gTop-k: a reduction tree with a top-k at every merge, then a broadcast (Shi et al. 2019, algorithm 3)."""

from commlib.reducers.messages import receive_message, send_message
from commlib.reducers.selecting import SelectingReducer
from commlib.vectors import SparseVector, non_finite


class GTopK(SelectingReducer):
    """In round ``t`` every ``2ᵗ⁺¹``-th rank adds what the rank ``2ᵗ`` beyond holds, and keeps ``k`` of it.

    The entries that a merge drops stay with the rank that merged (the published code loses them). A rank
    whose partner is beyond ``P`` sits the round out.
    """

    def _combine(self, selected: SparseVector, finite: bool) -> SparseVector | None:
        if self.synchronize_step(finite) is None:
            return None
        comm = self.comm
        held, distance = selected, 1
        with self.measure(self.link):
            while distance < comm.size and comm.rank % (2 * distance) == 0:
                if comm.rank + distance < comm.size:
                    held = self._merge(held, comm.rank + distance)
                distance *= 2
            if comm.rank == 0:
                message = self.lossless.encode(held)
            else:
                send_message(comm, self.encode(held), comm.rank - distance)
                message = receive_message(comm, comm.rank - distance, self.workspace)
            # The tree again, from the root: each rank passes on to those it merged from, the farthest first.
            while distance > 1:
                distance //= 2
                if comm.rank + distance < comm.size:
                    send_message(comm, message, comm.rank + distance)
        return self.lossless.decode(message, self.length)

    def _merge(self, held: SparseVector, source: int) -> SparseVector:
        """Return the ``k`` largest of the sum with what ``source`` sends, and drop the others."""
        received = self.codec.decode(receive_message(self.comm, source, self.workspace), self.length)
        with self.measure("combine"):
            merged = self.sum_sparse([held, received])
            if not merged.is_finite:  # finite parts may add up to an infinity; it has to reach the root
                return non_finite(self.length, self.arrays)
            kept = merged.top_k(self.k)
            self.drop(merged.without(kept))
        return kept
