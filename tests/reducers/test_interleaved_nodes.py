"""Nodes whose ranks are not neighbours in the world."""

import numpy as np
import pytest

from commlib import Topology, make_reducer
from commlib.transport import simulated

SIZE = 4000


@pytest.mark.parametrize("name", ["torus2d", "hitopk", "hioktopk"])
def test_a_reducer_does_not_care_in_which_order_the_nodes_ranks_come(name):
    # The messages of a node that has nothing to say are shorter in this codec than those of the other.
    options = {} if name == "torus2d" else {"density": 0.1, "wire": "gap"}
    given = {"a": np.arange(SIZE, dtype=np.float32) * (np.arange(SIZE) % 7 == 0), "b": np.zeros(SIZE)}

    def body(comm, hosts):
        comm.host = hosts[comm.rank]
        topology = Topology(comm)
        return topology.nodes, make_reducer(name, topology, SIZE, **options).reduce(given[comm.host])

    neighbours = simulated.run(lambda comm: body(comm, "aabb"), 4)
    # Here the second rank of the second node comes before the second rank of the first.
    interleaved = simulated.run(lambda comm: body(comm, "abba"), 4)
    assert interleaved[0][0] == ((0, 3), (1, 2))
    for (_, mean), (_, expected) in zip(interleaved, neighbours, strict=True):
        assert mean.any()
        np.testing.assert_array_equal(mean, expected)
