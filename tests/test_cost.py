"""The closed forms, against numbers worked out by hand and identities that need no code."""

import pytest

from commlib import REDUCERS, LinkBytes, bytes_sent
from commlib.cost import sparse_bytes
from commlib.network import node_of_ranks


def layout(world_size, ranks_per_node):
    """The world ranks of every node."""
    node_of_rank = node_of_ranks(world_size, ranks_per_node)
    ranks = range(world_size)
    return [[rank for rank in ranks if node_of_rank[rank] == node] for node in range(max(node_of_rank) + 1)]


@pytest.mark.parametrize(
    "count, size, expected",
    [
        (0, 1000, 0),
        (1, 1000, 8),
        (499, 1000, 3992),
        (500, 1000, 4000),  # δ
        (501, 1000, 4000),
        (1000, 1000, 4000),
        (499, 999, 3992),
        (500, 999, 3996),
        (0, 1, 0),
        (1, 1, 4),
        (0, 0, 0),
        (5, 2**31 - 1, 40),
        (5, 2**31, 60),  # 64-bit indices
    ],
)
def test_a_sparse_message_takes_index_and_value_an_entry_and_all_values_from_delta_on(count, size, expected):
    assert sparse_bytes(count, size) == expected


# ------------------------------------------------------------- dense


@pytest.mark.parametrize("world_size", [1, 2, 4, 5, 16])
def test_dense_sends_twice_the_vector_but_for_the_own_part(world_size):
    size = 1000 * world_size
    expected = LinkBytes(inter=4 * 2 * size * (world_size - 1) // world_size)
    for rank in range(world_size):
        assert bytes_sent("dense", layout(world_size, 1), rank, size) == expected


def test_in_the_ring_only_the_last_rank_of_a_node_sends_between_nodes():
    # P = 8, d/P = 100 values of 4 bytes: 14 times to the right neighbour
    for rank in range(8):
        sent = 4 * 2 * 7 * 100
        expected = LinkBytes(inter=sent) if rank in (3, 7) else LinkBytes(intra=sent)
        assert bytes_sent("dense", layout(8, 4), rank, 800) == expected


@pytest.mark.parametrize("size", [1, 3, 1000, 4099])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 5, [1, 4], [2, 2, 1]], ids=str)
def test_all_ranks_of_dense_together_send_a_fixed_sum_whatever_the_shape(size, ranks_per_node):
    nodes = layout(5, ranks_per_node)
    sent = [bytes_sent("dense", nodes, rank, size) for rank in range(5)]
    # Each part makes P − 1 steps while it is added up and P − 1 while it is handed round.
    assert sum(each.intra + each.inter for each in sent) == 4 * 2 * size * (5 - 1)


# ------------------------------------------------------------- hitopk


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 4), (2, 1), (2, 4), (3, 2), (16, 8)])
def test_hitopk_sends_its_share_of_k_to_every_other_node(nodes, ranks_per_node):
    size = 10_000 * ranks_per_node
    k = size // 100
    intra = 4 * size * (ranks_per_node - 1) // ranks_per_node  # reduce-scatter, values
    intra += 8 * (ranks_per_node - 1) * nodes * k // ranks_per_node  # all-gather, entries
    inter = 8 * (nodes - 1) * k // ranks_per_node
    world = layout(nodes * ranks_per_node, ranks_per_node)
    for rank in range(nodes * ranks_per_node):
        assert bytes_sent("hitopk", world, rank, size, density=0.01) == LinkBytes(intra, inter)


def test_hitopk_sends_the_whole_shard_where_that_is_shorter():
    # m = 3, n = 2, shards of 500: 60 % of these are past δ
    assert bytes_sent("hitopk", layout(6, 2), 0, 1000, density=0.6) == LinkBytes(
        4 * 500 + 4 * 500, 2 * 4 * 500
    )


def test_hitopk_sends_one_entry_of_a_shard_at_least():
    # one entry to the other node; two inside, the other's shard of 500 values before them
    assert bytes_sent("hitopk", layout(4, 2), 3, 1000, density=1e-9) == LinkBytes(4 * 500 + 8 * 2, 8)


def test_hitopk_sends_nothing_of_an_empty_shard():
    # one entry for two ranks a node: shards of 0 and 1 entries
    nodes = layout(4, 2)
    assert bytes_sent("hitopk", nodes, 0, 1, density=0.5) == LinkBytes(intra=4, inter=0)
    assert bytes_sent("hitopk", nodes, 1, 1, density=0.5) == LinkBytes(intra=4, inter=4)


def test_with_uneven_nodes_hitopk_leaves_out_the_ranks_beyond_the_smallest_node():
    nodes = layout(5, [3, 2])
    # two streams of 500 entries, 5 selected; rank 2 owns none and only contributes
    # round the ring of three, rank 0 sends its sums and the nothing of rank 2, which hands on those of rank 1
    assert bytes_sent("hitopk", nodes, 0, 1000, density=0.01) == LinkBytes(4 * 500 + 8 * 10, 8 * 5)
    assert bytes_sent("hitopk", nodes, 1, 1000, density=0.01) == LinkBytes(4 * 500 + 2 * 8 * 10, 8 * 5)
    assert bytes_sent("hitopk", nodes, 2, 1000, density=0.01) == LinkBytes(4 * 1000 + 8 * 10, 0)
    assert bytes_sent("hitopk", nodes, 3, 1000, density=0.01) == LinkBytes(4 * 500 + 8 * 10, 8 * 5)


@pytest.mark.parametrize("name", REDUCERS)
def test_one_rank_alone_sends_nothing(name):
    density = {"density": 0.01} if REDUCERS[name].sparse else {}
    assert bytes_sent(name, [[0]], 0, 1000, **density) == LinkBytes()
