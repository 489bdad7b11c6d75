"""gTop-k: a reduction tree with a top-k at every merge, then a broadcast (Shi et al. 2019, algorithm 3)."""

from commlib.cost import Cost, LinkSeconds, Step, by_link, sparse_bytes
from commlib.reducers.messages import receive_message
from commlib.reducers.sparse import SelectingReducer
from commlib.topology import LinkBytes
from commlib.vectors import SparseVector, non_finite
from commlib.work import Work


def _traffic(step: Step, rank: int) -> LinkBytes:
    """``k`` entries to the parent in the tree and to each child: at most ``k·⌈log₂ P⌉``, on the root."""
    k = step.most_selected(step.size)
    to_parent, to_child = step.message(k, step.size), sparse_bytes(k, step.size)
    rounds = range(step.ranks.bit_length())
    lowest_bit = rank & -rank if rank else 1 << len(rounds)
    to_each = {rank + (1 << each): to_child for each in rounds if 1 << each < lowest_bit}
    if rank:
        to_each[rank - lowest_bit] = to_parent
    return by_link(step.nodes, rank, to_each)


def _seconds(step: Step) -> LinkSeconds:
    """``2·log₂ P·(α + 2k·β)`` (gTop-k, equation 7).

    Where ``P`` is no power of two, a rank that sat a round out has sent before it is waited for.
    """
    world = step.world
    upwards, downwards = step.message(step.k, step.size), sparse_bytes(step.k, step.size)
    done = [0.0] * world.size  # when each rank has merged, and later when it has passed on
    distances = [1 << exponent for exponent in range((world.size - 1).bit_length())]
    for distance in distances:
        hop = world.hop(distance, upwards)
        for rank in range(0, world.size - distance, 2 * distance):
            done[rank] = max(done[rank], done[rank + distance] + hop)
    for distance in reversed(distances):
        hop = world.hop(distance, downwards)
        for rank in range(0, world.size - distance, 2 * distance):
            done[rank] += hop
            done[rank + distance] = done[rank]
    return step.on_slowest_link(max(done))


def _work(step: Step) -> Work:
    """Select; on each level of the tree merge two selections and select; hand the result down as it is."""
    levels, k = (step.world.size - 1).bit_length(), step.k
    merges = Work(entry=4 * k * levels, coded=k * levels, messages=levels)
    return step.selecting(step.size, k) + merges + step.rounding(k) + step.placing(k)


class GTopK(SelectingReducer):
    """In round ``t`` every ``2ᵗ⁺¹``-th rank adds what the rank ``2ᵗ`` beyond holds, and keeps ``k`` of it.

    The entries that a merge drops stay with the rank that merged (the published code loses them). A rank
    whose partner is beyond ``P`` sits the round out.
    """

    cost = Cost(_traffic, _seconds, _work, is_exact=True, applied=lambda step: step.k)

    def _combine(self, selected: SparseVector) -> SparseVector:
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
                comm.send_message(self.encode(held), comm.rank - distance).wait()
                message = receive_message(comm, comm.rank - distance, self.workspace)
            # The tree again, from the root: each rank passes on to those it merged from, the farthest first.
            while distance > 1:
                distance //= 2
                if comm.rank + distance < comm.size:
                    comm.send_message(message, comm.rank + distance).wait()
        return self.lossless.decode(message, self.length)

    def _merge(self, held: SparseVector, source: int) -> SparseVector:
        """Add the entries that ``source`` sends; return the ``k`` largest of the sum, and drop the others."""
        received = self.codec.decode(receive_message(self.comm, source, self.workspace), self.length)
        with self.measure("combine"):
            merged = self.sum_sparse([held, received])
            if not merged.is_finite:  # finite parts may add up to an infinity; it has to reach the root
                return non_finite(self.length, self.arrays)
            kept = merged.top_k(self.k)
            self.drop(merged.without(kept))
        return kept
