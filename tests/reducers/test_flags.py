"""Flags of ranks, which a step carries with what it compares anyway."""

import numpy as np
import pytest

from commlib import REDUCERS, InvalidArgument, RanksDisagree, Topology, make_reducer
from tests.exchanges import whole_exchange

SIZE = 60
CLIPPED = {"density": 0.1, "wrappers": [{"name": "local_clipping", "norm": 1.0}]}
MAKERS = {
    **{name: lambda topology, name=name: make_reducer(name, topology, SIZE) for name in REDUCERS},
    "wrapped": lambda topology: make_reducer("oktopk", topology, SIZE, **CLIPPED),
    "buckets": lambda topology: whole_exchange("hitopk", topology, [SIZE // 2] * 2),
    "overlapped": lambda topology: whole_exchange("hitopk", topology, [SIZE // 2] * 2, overlap=True),
}


def gradient(rank):
    return np.arange(SIZE, dtype=np.float32) - 7 * rank


@pytest.mark.pairs(lambda ranks, kind: ranks.size == 3 or kind not in REDUCERS)
@pytest.mark.parametrize("kind", MAKERS)
def test_every_rank_gets_the_flags_of_all_with_each_step(ranks, kind):
    def body(comm):
        topology = Topology(comm, ranks_per_node=2 if comm.size % 2 == 0 else None)
        reducer, own, seen = MAKERS[kind](topology), [0], []
        topology.flags = lambda: own[0]
        # none; one of the last rank; one of each; a step that is skipped; none
        for first, last, poison in ((0, 0, 0), (0, 128, 0), (1, 2, 0), (4, 0, np.nan), (0, 0, 0)):
            own[0] = (first if comm.rank == 0 else 0) | (last if comm.rank == comm.size - 1 else 0)
            reducer.reduce(gradient(comm.rank) + np.float32(poison))
            seen.append((reducer.last.flags, reducer.last.finite))
        return seen

    expected = [(0, True), (128, True), (3, True), (4, False), (0, True)]
    assert ranks.run(body) == [expected] * ranks.size


@pytest.mark.world_sizes(3)
def test_ranks_that_differ_are_found_whatever_their_flags(ranks):
    def body(comm):
        topology = Topology(comm)
        topology.flags = lambda: comm.rank
        reducer = make_reducer("dense", topology, SIZE)
        reducer.reduce(gradient(comm.rank))
        reducer.steps += comm.rank == 1
        with pytest.raises(RanksDisagree, match=r"step is 1 on ranks \[0"):
            reducer.reduce(gradient(comm.rank))
        return True

    assert all(ranks.run(body))


def test_more_than_eight_bits_are_refused(ranks):
    def body(comm):
        topology = Topology(comm)
        topology.flags = lambda: 256
        with pytest.raises(InvalidArgument, match="flags: expected 8 bits, got 256"):
            make_reducer("dense", topology, SIZE).reduce(gradient(comm.rank))
        return True

    if ranks.size > 1:
        assert all(ranks.run(body))
