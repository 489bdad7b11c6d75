"""The closed forms of bytes, against numbers worked out by hand; of seconds, against the virtual clock."""

import numpy as np
import pytest

from commlib import (
    REDUCERS,
    InvalidArgument,
    Link,
    LinkBytes,
    Network,
    Topology,
    UnknownName,
    bytes_sent,
    make_reducer,
    predict,
)
from commlib.cost import Group, Step, sparse_bytes
from commlib.network import EAGER_BYTES, node_of_ranks
from commlib.prediction import predict_seconds
from commlib.reducers import reducer_options
from commlib.transport import simulated
from commlib.tuning.probe import Gradients
from commlib.vectors import VALUE_BYTES
from commlib.work import ENTRIES_OF_A_MESSAGE, LONGEST_WAIT_SECONDS, WAITING, Speeds, Work
from tests.extent import dealt, more


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


@pytest.mark.parametrize(
    ("world", "rank", "size", "density", "intra", "inter"),
    [
        # m = 3, n = 2, shards of 500: 60 % of these are past δ, and the whole shard is shorter
        ((6, 2), 0, 1000, 0.6, 4 * 500 + 4 * 500, 2 * 4 * 500),
        # one entry at least to the other node; two inside, the other's shard of 500 values before them
        ((4, 2), 3, 1000, 1e-9, 4 * 500 + 8 * 2, 8),
        # one entry for two ranks a node: shards of 0 and 1 entries
        ((4, 2), 0, 1, 0.5, 4, 0),
        ((4, 2), 1, 1, 0.5, 4, 4),
        # nodes of three and two: two streams of 500 entries, 5 selected; rank 2 owns none and contributes;
        # round the ring of three, rank 0 sends its sums and the nothing of rank 2, rank 2 those of rank 1
        ((5, [3, 2]), 0, 1000, 0.01, 4 * 500 + 8 * 10, 8 * 5),
        ((5, [3, 2]), 1, 1000, 0.01, 4 * 500 + 2 * 8 * 10, 8 * 5),
        ((5, [3, 2]), 2, 1000, 0.01, 4 * 1000 + 8 * 10, 0),
        ((5, [3, 2]), 3, 1000, 0.01, 4 * 500 + 8 * 10, 8 * 5),
    ],
)
def test_hitopk_at_its_edges(world, rank, size, density, intra, inter):
    assert bytes_sent("hitopk", layout(*world), rank, size, density=density) == LinkBytes(intra, inter)


# ------------------------------------------------------------- seconds

NETWORK = Network(Link.of(microseconds=7, gbit_per_second=300), Link.of(microseconds=40, gbit_per_second=10))
DENSITY = 0.01
STEPS = 3

# The papers' cases: every message has one known length, and P is a power of two.
EXACT = ["dense", "torus2d", "gtopk"]


DEALT = {2: 2, 4: 1, 7: 1, 12: 4, 16: 8}  # ranks and ranks a node, of which a change meets each with some
HIERARCHICAL = [name for name in REDUCERS if reducer_options(name).get("hierarchical") is False]


def simulated_seconds(name, world_size, ranks_per_node, size, network=NETWORK, **options):
    """Seconds of a step after the first, on the slowest rank: the mean of some, on independent gradients."""

    def body(comm):
        density = {"density": DENSITY} if REDUCERS[name].sparse else {}
        reducer = make_reducer(name, Topology(comm), size, **density, **options)
        seconds = []
        for step in range(STEPS):
            # New each step, and much larger each time: what earlier steps left back is never selected.
            gradient = 1e3**step * np.random.default_rng([comm.rank, step]).standard_normal(size)
            comm.barrier()
            start = comm.now()
            reducer.reduce(gradient.astype(np.float32))
            seconds.append(comm.now() - start)
        return seconds[1:]

    return np.mean(np.max(simulated.run(body, world_size, ranks_per_node, network), axis=0))


def predicted(name, world_size, ranks_per_node, size, network=NETWORK, **options):
    density = DENSITY if REDUCERS[name].sparse else None
    nodes = layout(world_size, ranks_per_node or world_size)
    return predict(name, nodes, size, density, network, **options)


def check_seconds(*case, rel, **options):
    """Compare what is predicted with the virtual time; return it."""
    found = predicted(*case, **options).seconds
    assert found == pytest.approx(simulated_seconds(*case, **options), rel=rel)
    return found


@pytest.mark.parametrize("world_size, ranks_per_node", [(2, 1), (4, None), (8, 1), (8, 4), (16, 8)])
@pytest.mark.parametrize("name", EXACT)
def test_where_every_length_is_known_the_closed_form_is_the_virtual_time(name, world_size, ranks_per_node):
    # sums of a few hundred products, in another order
    check_seconds(name, world_size, ranks_per_node, 4096 * world_size, rel=1e-9)


# Messages of a rank are on their way together, and bytes travel while ranks wait for a processor.
TOGETHER = Network(Link(7e-6, 3e-11, gap=2e-6, busy=3e-6), Link(40e-6, 8e-10, gap=5e-6, busy=20e-6))


@pytest.mark.parametrize("entries", [64, 65_536])  # whose bytes take less than all waits, or more
@pytest.mark.parametrize("world_size, ranks_per_node", [(2, 1), (4, None), (8, 1), (8, 4), (16, 8)])
@pytest.mark.parametrize("name", ["dense", "torus2d", "hitopk"])
def test_near_it_where_messages_are_under_way_together(name, world_size, ranks_per_node, entries):
    # On nodes of several ranks a message may wait for others at a card; without, nothing else happens.
    rel = 1e-6 if ranks_per_node in (None, 1) else 0.1
    check_seconds(name, world_size, ranks_per_node, entries * world_size, TOGETHER, rel=rel)


def test_where_messages_are_under_way_together_an_agreement_waits_for_one_latency():
    link = Link(20e-3, 1e-9, gap=10e-6)
    assert link.agreement_seconds(8, 2) == pytest.approx(20e-3 + 6 * 10e-6 + 16e-9)
    assert link.agreement_seconds(1, 2) == 0
    assert Link(20e-3, 1e-9).agreement_seconds(8, 2) == pytest.approx(3 * 20e-3 + 7 * 16e-9)


def test_one_port_takes_in_the_messages_of_all_others_without_an_incast():
    network = Network(Link(1e-6, 1e-10, gap=1e-7), Link(20e-3, 1e-9, incast=3.0, gap=1e-7))
    assert Group(4, 2, network).gather(1000) == pytest.approx(20e-3 + 6 * 1e-6)
    assert Group(1, 4, network).gather(1000) == pytest.approx(1e-6 + 3e-7)
    assert Group(4, 2, network).gather(0) == Group(1, 1, network).gather(1000) == 0


def test_latency_of_the_wire_is_waited_for_once_in_an_exchange_and_at_each_hop_of_a_ring():
    link = Link(20e-3, 1e-9, gap=10e-6)
    group = Group(8, 1, Network(inter=link))
    assert group.exchange(1000) == pytest.approx(20e-3 + 6 * 10e-6 + 1e-6)
    assert group.ring(1000) == pytest.approx(7 * (20e-3 + 1e-6))


@pytest.mark.parametrize("world_size, kibibytes", [(3, 700), (4, 1024), (8, 384)])
@pytest.mark.parametrize("name", ["dense", "torus2d", "dsar_split"])
def test_long_arrays_go_round_a_ring_in_pieces(name, world_size, kibibytes, monkeypatch):
    monkeypatch.setattr(simulated.SimulatedCommunicator, "eager_bytes", EAGER_BYTES)
    network = Network(inter=Link(20e-3, 4e-8, gap=1e-4))
    check_seconds(name, world_size, 1, world_size * kibibytes * 256, network, rel=0.05)


def test_bytes_travel_while_ranks_wait_for_a_processor():
    group = Group(8, 1, Network(inter=Link(1e-3, 1e-7, gap=1e-4, busy=6e-4)))
    assert group.ring(5000) == pytest.approx(7 * 1e-3)  # 0.5 ms of bytes
    assert group.ring(20_000) == pytest.approx(7 * (1e-3 + 1.4e-3))


NEAR = sorted(set(REDUCERS) - {"oktopk", "hioktopk"})


@pytest.mark.pairs(
    lambda name, world_size, **_: world_size in (3, 6, 8) or dealt(name, NEAR, world_size, DEALT)
)
@pytest.mark.parametrize("world_size, ranks_per_node", [(3, 1), (6, 2), (8, 4), *DEALT.items()])
@pytest.mark.parametrize("name", NEAR)
def test_the_closed_form_is_near_the_virtual_time_on_random_selections(name, world_size, ranks_per_node):
    # Sums of random selections vary by some percent, and where P is no power of two some ranks need not wait.
    check_seconds(name, world_size, ranks_per_node, 40_001, rel=0.1)


@pytest.mark.parametrize("world_size, ranks_per_node", [(6, 2), (8, 4), *more((16, 8))])
@pytest.mark.parametrize("name", [name for name in HIERARCHICAL if name != "oktopk"])
def test_between_nodes_the_closed_form_is_near_the_virtual_time_too(name, world_size, ranks_per_node):
    # The streams of a node begin at about the same time, and take turns at its card.
    check_seconds(name, world_size, ranks_per_node, 40_001, rel=0.2, hierarchical=True)


@pytest.mark.parametrize("world_size, ranks_per_node", [(2, 1), (4, None), (8, 4), (32, 8)])
@pytest.mark.parametrize("values", ["hadamard4", "hadamard8"])
def test_of_a_ring_of_levels_the_closed_form_is_the_virtual_time(world_size, ranks_per_node, values):
    size = 512 * 8 * world_size
    check_seconds("dense", world_size, ranks_per_node, size, rel=1e-9, values=values)
    # 32 ranks add up hadamard4 in two bytes, as hadamard8
    message = 2 * 4 + 1024 * (1 if values == "hadamard4" and world_size < 19 else 2)
    sent = bytes_sent("dense", layout(world_size, 1), 0, size, values=values)
    assert sent.inter == (world_size - 1) * 8 * message


@pytest.mark.parametrize("world_size, ranks_per_node", [(3, 1), (6, 2), (16, 8)])
def test_a_torus_that_rounds_is_near_the_virtual_time(world_size, ranks_per_node):
    case = "torus2d", world_size, ranks_per_node, 400_001
    # the slices are not all equally long, and the streams of a node do not begin at the same time
    assert check_seconds(*case, rel=0.1, values="qsgd8") < predicted(*case).seconds


@pytest.mark.parametrize("world_size, ranks_per_node", [(4, 1), (6, 2), (8, 4), (8, 1)])
@pytest.mark.parametrize("name", ["oktopk", "hioktopk"])
def test_ok_topk_is_near_its_average_step(name, world_size, ranks_per_node):
    """Here every step re-evaluates both thresholds: gradients that grow a thousandfold defeat their reuse."""
    # re-evaluating costs an exchange of magnitudes, and saves one of counts
    check_seconds(name, world_size, ranks_per_node, 40_001, rel=0.4)


def test_a_step_takes_no_less_than_the_comparison_of_settings():
    seconds = check_seconds("ssar_doubling", 16, 8, 1000, rel=1e-9)
    assert seconds == NETWORK.inter.agreement_seconds(16, 1)


@pytest.mark.parametrize("name", REDUCERS)
def test_uneven_nodes_cost_about_what_the_larger_one_does(name):
    # two nodes of three: a ring of five hops, where it has four
    check_seconds(name, 5, [3, 2], 40_001, rel=0.6 if "oktopk" in name else 0.26)


@pytest.mark.parametrize("name", REDUCERS)
def test_one_rank_takes_no_time_and_between_nodes_it_is_spent_only_where_there_are_several(name):
    alone = predicted(name, 1, 1, 1000)
    assert (alone.seconds, alone.sent.intra, alone.sent.inter) == (0, 0, 0)
    together = predicted(name, 4, 4, 10_000)
    assert together.inter == 0 < together.intra
    apart = predicted(name, 4, 1, 10_000)
    assert apart.inter > 0
    is_hierarchical = name in ("torus2d", "hitopk", "hioktopk")
    assert apart.intra == 0 or (is_hierarchical and apart.intra < 1e-9)


def test_the_papers_order_of_algorithms_holds_on_its_cluster():
    """HiTopKComm's figure 7, 16 nodes of 8 at 25 Gbit/s, 25 M entries: hierarchical sparse beats the rest."""
    nodes = layout(128, 8)
    density = {name: 0.01 if REDUCERS[name].sparse else None for name in REDUCERS}
    seconds = {name: predict(name, nodes, 25_000_000, density[name]).seconds for name in REDUCERS}
    assert seconds["hitopk"] < seconds["torus2d"] < seconds["dense"]
    assert seconds["hitopk"] < seconds["allgather"]
    assert seconds["hioktopk"] < seconds["oktopk"] < seconds["allgather"]


def test_hierarchical_ok_topk_does_not_grow_with_the_nodes_where_hitopk_does():
    """At a density at which bytes count more than messages."""
    few, many = [layout(8 * nodes, 8) for nodes in (4, 64)]
    growth = {
        name: predict(name, many, 25_000_000, 0.01).inter / predict(name, few, 25_000_000, 0.01).inter
        for name in ("hitopk", "hioktopk")
    }
    assert growth["hitopk"] > 10
    assert growth["hioktopk"] < growth["hitopk"] / 2


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("hitop", layout(2, 1), 10, 0.1), {}, 'unknown reducer "hitop"'),
        (("hitopk", layout(4, 2), 10, 2), {}, "density: expected a number in (0, 1], got 2"),
        (("dense", layout(4, 2), 10, 0.1), {}, "density: dense has no such option (its options: values)"),
        (("dense", layout(4, 2), 0), {}, "size: expected at least 1 entry, got 0"),
        (("dense", [], 10), {}, "nodes: expected the ranks of one node or more, got []"),
        (("dense", layout(4, 2), 10), {"values": "qsgd4"}, "values: expected fp32 or a codec whose"),
        (("dsar_split", layout(4, 2), 10, 0.1), {"sums": "fp7"}, 'unknown codec "fp7"'),
        (("gtopk", layout(4, 2), 10, 0.1), {"sums": "fp16"}, "sums: gtopk has no such option"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(arguments, options, message):
    with pytest.raises((InvalidArgument, UnknownName)) as caught:
        predict(*arguments, **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "entries", "messages"),
    [
        ("allgather", 8 * 400, 1),
        ("gtopk", 3 * 4 * 400, 3),  # levels of the tree: added up, and selected from
        ("ssar_doubling", sum(2 * 40_000 * (1 - 0.99**ranks) for ranks in (1, 2, 4)), 3),  # sums of so many
        ("ssar_split", 8 * 400, 9),  # all are in one range
        ("dsar_split", 400, 8),
        ("oktopk", 5 * 400, 13),
        ("spardl", 4 * 400, 8),
        ("hitopk", 2 * 100, 1 + 4),  # of the shard, from each node; and the sums of the node's shards
        ("hioktopk", 5 * 100, 7 + 4),
    ],
)
def test_entries_that_are_added_up_and_their_messages_take_their_time(name, entries, messages):
    speeds = Speeds(add=0, fill=0, select=0, keep=0, place=0, entry=1e-9, code={"fp32": 0})
    found = predict(name, layout(8, 4), 40_000, density=DENSITY, network=NETWORK, speeds=speeds)
    assert found.computing == pytest.approx(1e-9 * (entries + ENTRIES_OF_A_MESSAGE * messages))


def test_more_is_sent_while_residuals_grow_than_when_thresholds_have_settled():
    gradients, network = Gradients(100_000), Network(inter=Link(0.0, 1.0))  # a second a byte

    def body(comm):
        reducer = make_reducer("oktopk", Topology(comm), gradients.size, density=0.01)
        for step in range(18):
            reducer.reduce(gradients.of(comm.rank, step % 3))
        return comm.sent_bytes.sum() / 18

    options = {"density": 0.01, "network": network}
    growing = predict_seconds("oktopk", layout(4, 1), gradients.size, settled=False, **options)
    assert growing == pytest.approx(max(simulated.run(body, 4, 1)), rel=0.2)
    assert predict_seconds("oktopk", layout(4, 1), gradients.size, **options) < 0.8 * growing


@pytest.mark.parametrize("name", [name for name, reducer in REDUCERS.items() if reducer.sparse])
def test_a_residual_that_decays_takes_one_more_pass_over_it(name):
    speeds = Speeds(add=1e-9, fill=0, select=2e-9, keep=0, place=0, entry=0, code={"fp32": 0})
    given = {"density": DENSITY, "network": NETWORK, "speeds": speeds}
    kept, decayed = (predict(name, layout(8, 4), 40_000, **given, decay=decay) for decay in (1.0, 0.5))
    entries = 10_000 if name in ("hitopk", "hioktopk") else 40_000
    assert decayed.computing - kept.computing == pytest.approx(1e-9 * entries)
    assert decayed.sent == kept.sent


def test_few_places_are_cleared_and_otherwise_all():
    step = Step(layout(4, 2), 1600, {})
    assert step.placing(99.0) == Work(place=198.0)
    assert step.placing(100.0) == Work(fill=1600.0, place=100.0)


@pytest.mark.parametrize(
    ("ranges", "clustered", "selected", "expected"),
    [(8, True, 100, 100), (8, False, 100, 12.5), (32, True, 100, 50), (8, True, 900, 800)],
)
def test_the_fullest_range_has_all_entries_where_they_are_clustered(ranges, clustered, selected, expected):
    step = Step(layout(ranges, 1), 800 * ranges, {}, clustered=clustered)
    assert step.fullest(selected) == expected


def test_the_indices_of_the_fullest_partition_of_exdyna_go_round_as_a_whole():
    clustered, balanced = (
        Step(layout(8, 1), 40_000, {"density": 0.01, "indices": "raw32"}, NETWORK, clustered=each)
        for each in (True, False)
    )
    seconds, evenly = (sum(REDUCERS["exdyna"].cost.seconds(step)) for step in (clustered, balanced))
    apart = VALUE_BYTES * (520 - 65)  # 1.3 times k indices, or an eighth of them
    assert seconds - evenly == pytest.approx(7 * apart * NETWORK.inter.beta)


def test_a_step_of_ranks_that_share_cores_waits_in_proportion_and_at_most_so_long():
    own, shared = (Speeds(0, 0, 0, 0, 0, 0, {"fp32": 0}, ranks_per_core=each) for each in (1, 16))
    assert (own.with_waits(0.5), own.with_waits(1e-3)) == (0.5, 1e-3)
    waited = shared.with_waits(0.5) - 0.5, shared.with_waits(1e-3) - 1e-3
    assert waited == pytest.approx((16 * LONGEST_WAIT_SECONDS, 2e-3 * WAITING))


def test_waits_for_cores_are_part_of_the_prediction():
    speeds = [Speeds(1e-9, 0, 0, 0, 0, 0, {"fp32": 0}, ranks_per_core=each) for each in (1, 16)]
    alone, waiting = (predict("dense", layout(4, 1), 1000, network=NETWORK, speeds=each) for each in speeds)
    assert alone.computing > 0
    assert waiting.computing == pytest.approx((1 + 2 * WAITING) * alone.computing)
    assert waiting.inter == alone.inter
