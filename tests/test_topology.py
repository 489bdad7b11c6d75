"""Which ranks share a node, and what is counted over which link."""

import numpy as np
import pytest

from commlib import InvalidArgument, LinkBytes, Topology, Traffic
from commlib.network import node_of_ranks
from commlib.transport import simulated
from tests.launching import python_on_ranks, tail

# World size and ranks per node, and the nodes that they make.
LAYOUTS = {
    "even": (6, 3, ((0, 1, 2), (3, 4, 5))),
    "last-node-smaller": (5, 2, ((0, 1), (2, 3), (4,))),
    "counts": (6, [1, 3, 2], ((0,), (1, 2, 3), (4, 5))),
    "one-node": (3, 3, ((0, 1, 2),)),
    "node-not-full": (3, 8, ((0, 1, 2),)),
    "one-rank-a-node": (3, 1, ((0,), (1,), (2,))),
    "alone": (1, 1, ((0,),)),
}


@pytest.fixture(params=LAYOUTS.values(), ids=list(LAYOUTS))
def layout(request):
    return request.param


@pytest.mark.parametrize("ranks_per_node", [0, -2, [3, 2], [3], [4, 0], [5, -1], ()], ids=str)
def test_an_impossible_layout_is_refused_with_received_and_expected(ranks_per_node):
    with pytest.raises(InvalidArgument, match="^ranks_per_node: expected") as caught:
        node_of_ranks(4, ranks_per_node)
    given = list(ranks_per_node) if isinstance(ranks_per_node, tuple) else ranks_per_node
    assert str(caught.value).endswith(f"got {given}")
    with pytest.raises(InvalidArgument, match="^ranks_per_node: expected"):
        simulated.run(lambda comm: Topology(comm, ranks_per_node), 4)


def test_nodes_are_discovered_by_host_and_the_same_when_emulated(layout):
    world_size, ranks_per_node, nodes = layout

    def found(comm, *arguments):
        topology = Topology(comm, *arguments)
        node, stream = topology.node, topology.stream
        joined = [(each.rank, each.allgather_ints([comm.rank])[:, 0].tolist()) for each in (node, stream)]
        assert (topology.streams, topology.nodes) == (min(map(len, nodes)), nodes)
        assert [each.in_pieces for each in (comm, stream, node)] == [len(nodes) > 1] * 2 + [False]
        return topology.node_index, topology.local_rank, joined

    expected = []
    for rank in range(world_size):
        index, own = next((index, node) for index, node in enumerate(nodes) if rank in node)
        place = own.index(rank)
        # a stream beyond the smallest node's ranks joins those nodes that reach it
        across = [each[place] for each in nodes if len(each) > place]
        expected.append((index, place, [(place, list(own)), (across.index(rank), across)]))
    assert simulated.run(found, world_size, ranks_per_node) == expected
    assert simulated.run(lambda comm: found(comm, ranks_per_node), world_size) == expected


def test_ranks_dealt_to_hosts_in_turn_are_grouped_by_host_in_order_of_appearance():
    def body(comm):
        comm.host = ["zebra", "ant", "mule"][comm.rank % 3]  # as horovodrun places them with --map-by node
        topology = Topology(comm)
        joined = topology.node, topology.stream
        world_ranks = [each.allgather_ints([comm.rank]).tolist() for each in joined]
        return topology.nodes, topology.node_index, topology.local_rank, world_ranks

    seen = simulated.run(body, 6)
    nodes = ((0, 3), (1, 4), (2, 5))
    for rank in range(6):
        node, stream = [[rank % 3], [rank % 3 + 3]], [[each + rank // 3 * 3] for each in range(3)]
        assert seen[rank] == (nodes, rank % 3, rank // 3, [node, stream])


@pytest.mark.parametrize("size", [0, 1, 2, 7, 1000, 4099])
def test_shard_bounds_cut_the_vector_alike_on_every_node_and_leave_none_beyond_the_streams(layout, size):
    world_size, ranks_per_node, nodes = layout
    bounds = simulated.run(lambda comm: Topology(comm, ranks_per_node).shard_bounds(size), world_size)
    streams = min(map(len, nodes))
    shards = [size * (part + 1) // streams - size * part // streams for part in range(streams)]
    for node in nodes:
        for rank in node:
            assert bounds[rank].dtype == np.int64
            assert bounds[rank][0] == 0
            assert np.diff(bounds[rank]).tolist() == shards + [0] * (len(node) - streams)


def values(source, destination):
    """How many float32 the tests send from one rank to another: different for every pair."""
    return 10 + 7 * source + destination


def test_traffic_is_counted_by_link_exactly(layout):
    world_size, ranks_per_node, nodes = layout

    def exchange(comm, world_ranks):
        me = world_ranks[comm.rank]
        outgoing = [np.full(values(me, other), me, np.float32) for other in world_ranks]
        incoming = [np.empty(values(other, me), np.float32) for other in world_ranks]
        comm.exchange(outgoing, incoming)

    def body(comm):
        topology = Topology(comm, ranks_per_node)
        fresh = topology.traffic
        exchange(topology.world, range(comm.size))
        world = topology.traffic
        exchange(topology.node, topology.nodes[topology.node_index])
        node = topology.traffic
        exchange(topology.stream, topology.stream.allgather_ints([comm.rank])[:, 0].tolist())
        return fresh, world - fresh, node - world, topology.traffic - node

    for rank, (fresh, world, in_node, in_stream) in enumerate(simulated.run(body, world_size)):
        own = next(each for each in nodes if rank in each)
        across = [each[own.index(rank)] for each in nodes if len(each) > own.index(rank)]

        def passed(intra, inter, rank=rank):
            """What is sent to some ranks inside the node and between nodes, and received from them."""
            pairs = [[(rank, other) for other in ranks if other != rank] for ranks in (intra, inter)]
            sent = [sum(4 * values(*pair) for pair in each) for each in pairs]
            received = [sum(4 * values(*reversed(pair)) for pair in each) for each in pairs]
            return Traffic(LinkBytes(*sent), LinkBytes(*received))

        others = [each for each in range(world_size) if each not in own]
        assert fresh == Traffic()
        assert world == passed(own, others)
        assert in_node == passed(own, [])
        assert in_stream == passed([], across)


def test_traffic_adds_and_subtracts_field_by_field():
    first = Traffic(LinkBytes(1, 2), LinkBytes(30, 40))
    second = Traffic(LinkBytes(500, 600), LinkBytes(7000, 8000))
    assert first + second == Traffic(LinkBytes(501, 602), LinkBytes(7030, 8040))
    assert (first + second) - first == second


def test_a_node_that_would_span_machines_is_refused_with_their_names():
    def body(comm):
        with pytest.raises(InvalidArgument, match="makes node 1 of ranks on node0 and node1"):
            Topology(comm, ranks_per_node=2)
        return Topology(comm, ranks_per_node=[1, 1, 1, 1]).nodes

    assert simulated.run(body, 4, ranks_per_node=[3, 1]) == [((0,), (1,), (2,), (3,))] * 4


LIFETIMES = """
from collections import Counter
from mpi4py import MPI
from commlib import Topology
from commlib.transport import mpi

freed = Counter()
made = MPI.Comm.Create_keyval(delete_fn=lambda comm, key, number: freed.update([number]))
with mpi.world() as world:
    for number in range(3000):
        with Topology(world) as topology:
            for name in ("node", "stream"):
                getattr(topology, name)._handle.Set_attr(made, (name, number))
        topology.close()
assert len(freed) == 2 * 3000 and set(freed.values()) == {1}, freed
print("all are freed once")
"""


@pytest.mark.large
@pytest.mark.launch
def test_mpi_frees_every_communicator_of_three_thousand_topologies_once():
    result = python_on_ranks(2, LIFETIMES)
    assert result.returncode == 0, tail(result)
    assert result.stdout.count("all are freed once") == 2, tail(result)
