"""``torus2d`` with values that are rounded between nodes; test_promises.py has it among its cases."""

import numpy as np
import pytest

from commlib import Topology, make_reducer
from commlib.transport import simulated
from commlib.vectors import partition
from commlib.wire import VALUE_CODECS

RANKS, RANKS_PER_NODE, SIZE = 6, 2, 6000  # three nodes; two shards of three slices of 1,000


def gradients():
    return [np.random.default_rng(rank).standard_t(3, SIZE).astype(np.float32) for rank in range(RANKS)]


@pytest.mark.parametrize("values", ["qsgd8", "lloyd4", "fp16"])
def test_what_is_applied_is_rounded_twice_and_who_rounded_keeps_the_rest(values):
    def through(vector):
        codec = VALUE_CODECS[values]()
        return codec.decode(codec.encode(vector), len(vector))

    def body(comm):
        reducer = make_reducer("torus2d", Topology(comm, RANKS_PER_NODE), SIZE, values=values)
        return reducer.reduce(gradients()[comm.rank]), reducer.residual

    given, seen = gradients(), simulated.run(body, RANKS)
    of_nodes = [given[rank] + given[rank + 1] for rank in range(0, RANKS, 2)]
    bounds = partition(SIZE, 6).tolist()  # of the slices, shard after shard
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        local_rank, owner = low // 3000, low % 3000 // 1000
        sent = [through(each[low:high]) for each in of_nodes]
        total = sent[0] + sent[1] + sent[2]
        applied = through(total)
        for mean, _ in seen:
            assert mean[low:high].tobytes() == (applied / np.float32(RANKS)).tobytes()
        for node in range(3):
            rest = of_nodes[node][low:high] - sent[node]
            rest += total - applied if node == owner else 0
            found = seen[2 * node + local_rank][1][low:high]
            assert found.tobytes() == rest.tobytes()
            assert not seen[2 * node + 1 - local_rank][1][low:high].any()  # it has the other shard


def test_on_one_node_nothing_is_rounded():
    def body(comm, **values):
        reducer = make_reducer("torus2d", Topology(comm, 3), 1000, **values)
        mean = reducer.reduce(gradients()[comm.rank][:1000])
        assert not reducer.residual.any()
        return mean.tobytes()

    assert simulated.run(lambda comm: body(comm, values="qsgd2"), 3) == simulated.run(body, 3)
