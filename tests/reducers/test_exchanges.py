"""How often the ranks exchange something in a step, and what that takes on the virtual clock."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from commlib import REDUCERS, Link, Network, RanksDisagree, Topology, make_reducer
from commlib.transport import simulated
from commlib.transport.base import Ring
from tests.extent import more

NODES, RANKS_PER_NODE = 2, 4
RANKS = NODES * RANKS_PER_NODE

# Messages of all ranks in a step, inside nodes and between them, at two nodes of four ranks.
RING, ALL_TO_ALL = (7 * 6, 7 * 2), (RANKS * 3, RANKS * 4)
INSIDE = (RANKS * 3, 0)
DOUBLING = ((6, 2), (4, 4), (0, RANKS))  # to the rank one, two and four beyond
MESSAGES = {
    "dense": (RING, RING),
    "torus2d": (INSIDE, (0, RANKS), (0, RANKS), INSIDE),
    "allgather": (RING,),
    "gtopk": ((6, 1), (6, 1)),
    "ssar_doubling": ((RANKS, 0), (RANKS, 0), (0, RANKS)),
    "ssar_split": (ALL_TO_ALL, RING),
    "dsar_split": (ALL_TO_ALL, RING),
    "oktopk": (ALL_TO_ALL, RING, RING),  # magnitudes for the global threshold, and the result
    "hitopk": (INSIDE, (0, RANKS), INSIDE),
    "hioktopk": (INSIDE, (0, RANKS), (0, RANKS), (0, RANKS), INSIDE),
    "exdyna": (RING, RING, RING),
    "spardl": (*DOUBLING, *DOUBLING),
    "arctopk": (RING, RING, RING, RING),
    "powersgd": (RING, RING, *DOUBLING, RING, RING),
}


def options_of(name, density):
    return {"density": density} if REDUCERS[name].sparse else {}


def gradient(size, rank, step):
    """New in each step: a residual that was left back would be selected instead."""
    return np.random.default_rng([rank, step]).standard_normal(size).astype(np.float32)


def note_exchanges(topology, noted):
    """Count the exchanges of integers over each communicator, and how many integers each has."""
    for place in ("world", "node", "stream"):
        comm = getattr(topology, place)
        for name in ("start_allgather_ints", "alltoall_ints"):
            original = getattr(comm, name)

            def exchange(values, name=name, place=place, original=original):
                noted[place, name, len(values)] += 1
                return original(values)

            setattr(comm, name, exchange)


def one_step(name, size, density=0.01):
    """Return the transfers and the exchanges of integers of a step after the first, and its seconds."""
    record = []

    def body(comm):
        topology, noted = Topology(comm), Counter()
        every_step = {"reevaluate_every": 1} if "oktopk" in name else {}
        reducer = make_reducer(name, topology, size, **options_of(name, density), **every_step)
        reducer.reduce(gradient(size, comm.rank, 0))
        comm.barrier()
        begun = comm.now()
        note_exchanges(topology, noted)
        reducer.reduce(gradient(size, comm.rank, 1))
        return begun, comm.now(), noted

    ranks = simulated.run(body, RANKS, RANKS_PER_NODE, record=record)
    begun = ranks[0][0]
    transfers = [transfer for transfer in record if transfer.sent >= begun]
    return transfers, [noted for _, _, noted in ranks], max(ended for _, ended, _ in ranks) - begun


@pytest.mark.parametrize("name", REDUCERS)
def test_a_step_is_its_messages_and_a_comparison_of_one_integer(name):
    transfers, noted, _ = one_step(name, 40_000)
    expected = Counter({("world", "start_allgather_ints", 1): 1})
    if name in ("oktopk", "hioktopk"):  # is it finite, how many entries are there, and how many are large
        expected["world" if name == "oktopk" else "stream", "start_allgather_ints", 3] = 1
    if name == "exdyna":  # is it finite, and how many entries are there
        expected["world", "start_allgather_ints", 2] = 1
    assert noted == [expected] * RANKS
    inter = sum(transfer.is_inter for transfer in transfers)
    assert (len(transfers) - inter, inter) == tuple(np.sum(MESSAGES[name], axis=0))


def test_an_exchange_of_values_is_none_on_all_ranks_where_one_of_them_is_not_finite():
    """As a reducer of one's own asks for it; ``dense`` has it from its base class."""

    def body(comm):
        reducer = make_reducer("dense", Topology(comm), 10)
        return [reducer.synchronize_step(comm.rank != bad, 7, comm.rank) for bad in (None, 2)]

    for values, of_bad in simulated.run(body, 3):
        assert values.tolist() == [[7, 0], [7, 1], [7, 2]]
        assert of_bad is None


def test_hitopk_takes_no_longer_than_its_messages():
    """Agreement on lengths, settings and finite numbers took 110 µs of 223 µs when it was waited for."""
    *_, seconds = one_step("hitopk", 1_000_000, 0.001)
    intra, inter, shard = Network().intra, Network().inter, 250_000
    scatter = 3 * intra.seconds(4 * shard)
    # the four ranks of a node share a card, and the lengths of sums vary a little with the selections
    messages = scatter + inter.alpha + 4 * 8 * 250 * inter.beta + 3 * intra.seconds(8 * 500)
    assert seconds == pytest.approx(messages, rel=1e-3)
    assert seconds < 205e-6 / 1.6


def test_short_selections_go_straight_to_every_node_and_long_ones_round_a_ring():
    """From the step after that in which all ranks have compared the new density."""
    record = []

    def body(comm):
        reducer, times = make_reducer("hitopk", Topology(comm), 40_000, density=0.5), []
        for step in range(3):
            comm.barrier()
            times.append(comm.now())
            if step == 1:
                reducer.set_density(0.01)
            reducer.reduce(gradient(40_000, comm.rank, step))
        return [*times, np.inf]

    times, *_ = simulated.run(body, 4, 1, record=record)
    found = [
        Counter((each.source, each.destination) for each in record if low <= each.sent < high)
        for low, high in pairwise(times)
    ]
    ring = Counter({(rank, (rank + 1) % 4): 3 for rank in range(4)})
    straight = Counter({(rank, other): 1 for rank in range(4) for other in range(4) if other != rank})
    assert found == [ring, ring, straight]


class _Noting:
    """A request whose wait is noted."""

    def __init__(self, request, what, noted):
        self.request, self.what, self.noted = request, what, noted

    def wait(self):
        self.noted.append(self.what)
        self.request.wait()


def noted_by(exchange):
    """Return what each of four ranks posts, sends and waits for in an exchange."""

    def body(comm):
        noted, receive, send = [], comm.receive, comm.send
        comm.receive = lambda *given: noted.append("post") or _Noting(receive(*given), "receipt", noted)
        comm.send = lambda *given: noted.append("send") or _Noting(send(*given), "sent", noted)
        exchange(comm)
        return noted

    return simulated.run(body, 4)


def test_a_hop_of_a_ring_waits_for_the_left_neighbour_only():
    """Whose parts may come early: all receipts are posted before the first part is sent."""

    def allgather(comm):
        given = np.split(np.arange(12, dtype=np.float32) + comm.rank, comm.size)
        Ring(comm, range(comm.size)).allgather(given)
        for rank, part in enumerate(given):
            np.testing.assert_array_equal(part, np.arange(3 * rank, 3 * rank + 3) + rank)

    for noted in noted_by(allgather):
        assert noted == ["post"] * 3 + ["send", "receipt"] * 3 + ["sent"] * 3


def test_what_a_ring_sums_is_sent_before_sums_are_received_in_its_memory():
    """The sum of the left neighbour has memory of its own, and is posted from the start."""

    def allreduce(comm):
        given = np.split(np.arange(12, dtype=np.float32) + comm.rank, comm.size)
        sums = np.split(np.zeros(12, np.float32), comm.size)
        Ring(comm, range(comm.size)).allreduce(given, sums, lambda total: np.negative(total, out=total))
        np.testing.assert_array_equal(np.concatenate(sums), -(4 * np.arange(12) + 6))

    for noted in noted_by(allreduce):
        summed = ["post"] * 4 + ["send", "receipt"] * 3 + ["send"] + ["sent"] * 3
        assert noted == [*summed, *["post"] * 2, *["receipt", "send"] * 2, "receipt", *["sent"] * 3]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_ring_sends_pieces_of_what_a_transport_sends_at_once(size):
    """Bitwise the sums of whole parts; parts of several pieces, of one, and empty ones."""
    random = np.random.default_rng()
    vectors = random.standard_normal((size, 1003)).astype(np.float32)
    bounds = np.array([0, *sorted(random.integers(0, 300, size - 2).tolist()), 300, 1003])

    def body(comm, eager_bytes):
        comm.eager_bytes = eager_bytes
        ring, total, lengths = Ring(comm, range(size)), np.full(1003, np.nan, np.float32), []
        send = comm.send
        comm.send = lambda array, rank: lengths.append(array.nbytes) or send(array, rank)
        given, sums = (np.split(each, bounds[1:-1]) for each in (vectors[comm.rank], total))
        firsts = []
        ring.allreduce(given, sums, lambda piece: firsts.append(piece[0]) or piece.__imul__(np.float32(0.5)))
        own = ring.first_entries(bounds[comm.rank : comm.rank + 2])
        np.testing.assert_array_equal(total[own], np.float32(0.5) * np.array(firsts, np.float32))
        return total, max(lengths), comm.sent_bytes.tolist()

    pieces = simulated.run(lambda comm: body(comm, 250), size)
    whole = simulated.run(lambda comm: body(comm, 1 << 20), size)
    for (total, longest, sent), (expected, _, sent_whole) in zip(pieces, whole, strict=True):
        np.testing.assert_array_equal(total, expected)
        np.testing.assert_allclose(total, 0.5 * vectors.sum(axis=0, dtype=np.float64), atol=1e-5)
        assert longest == 248  # 62 entries
        assert sent == sent_whole


@pytest.mark.parametrize("size, nodes", [(20_011, 5), (3_001, 3)])
def test_a_long_sum_of_ssar_split_goes_round_in_pieces(size, nodes):
    """Where large entries are all in one range: the same bits, without waiting for all of it at each hop."""
    network = Network(inter=Link(alpha=1e-6, beta=1e-7, gap=1e-7))

    def body(comm, eager_bytes):
        comm.eager_bytes = eager_bytes
        reducer = make_reducer("ssar_split", Topology(comm), size, density=0.05)
        large = gradient(size, comm.rank, 0)
        large[: size // nodes] *= 1000
        mean = reducer.reduce(large).copy()
        return mean, comm.now(), comm.sent_bytes.tolist()

    pieces = simulated.run(lambda comm: body(comm, 400), nodes, 1, network)
    whole = simulated.run(lambda comm: body(comm, 1 << 20), nodes, 1, network)
    for (mean, _, sent), (expected, _, sent_whole) in zip(pieces, whole, strict=True):
        np.testing.assert_array_equal(mean, expected)
        assert sent == sent_whole
    last, last_whole = (max(seconds for _, seconds, _ in each) for each in (pieces, whole))
    assert last < 0.8 * last_whole


@pytest.mark.parametrize("ranks_per_node", [2, [1, 4], *more([3, 1, 1], 5)], ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in REDUCERS),
        ("spardl", {"hierarchical": True}),
        ("arctopk", {"hierarchical": True}),
    ],
    ids=str,
)
def test_every_rank_learns_what_one_of_them_has_different(name, options, ranks_per_node):
    """Also where nodes are uneven, and some ranks own no shard: each rank differs in turn."""

    def body(comm):
        topology = Topology(comm)
        messages = []
        for other in range(comm.size):
            reducer = make_reducer(name, topology, 100, **options_of(name, 0.1), **options)
            reducer.reduce(gradient(100, comm.rank, 0))
            if comm.rank == other and reducer.sparse:
                reducer.set_density(0.4)
            elif comm.rank == other:
                reducer.steps += 1
            with pytest.raises(RanksDisagree) as caught:
                reducer.reduce(gradient(100, comm.rank, 1))
            messages.append(str(caught.value))
        return messages

    seen = simulated.run(body, 5, ranks_per_node)
    setting, usual, different = ("density", 0.1, 0.4) if REDUCERS[name].sparse else ("step", 1, 2)
    for other in range(5):
        rest = [rank for rank in range(5) if rank != other]
        (first, one), (second, another) = sorted([(rest, usual), ([other], different)])
        named = f"{setting} is {one} on ranks {first}, {another} on ranks {second}"
        expected = f"the reducer is not the same on all ranks: {named}"
        assert [messages[other] for messages in seen] == [expected] * 5


@pytest.mark.parametrize("name", [name for name in REDUCERS if REDUCERS[name].sparse])
def test_ranks_of_different_densities_raise_also_where_that_changes_the_lengths_of_messages(name):
    def body(comm):
        comm.eager_bytes = 400  # longer messages go round a ring in pieces
        reducer = make_reducer(name, Topology(comm), 10_000, density=0.01)
        reducer.reduce(gradient(10_000, comm.rank, 0))
        reducer.set_density((0.001, 0.9, 0.1, 0.01)[comm.rank])
        with pytest.raises(RanksDisagree, match="density is 0.001"):
            reducer.reduce(gradient(10_000, comm.rank, 1))
        return True

    assert simulated.run(body, 4, 2) == [True] * 4


@pytest.mark.parametrize("ranks_per_node", [2, [3, 1, 1], *more([1, 4], 5)], ids=str)
@pytest.mark.parametrize("bad", [np.nan, *more(np.inf)], ids=str)
@pytest.mark.parametrize("name", REDUCERS)
def test_whoever_has_a_bad_number_all_ranks_skip_the_step_and_go_on_as_before(name, bad, ranks_per_node):
    def body(comm):
        topology = Topology(comm)
        reducer, twin = (make_reducer(name, topology, 100, **options_of(name, 0.1)) for _ in range(2))
        finite = []
        for other in range(comm.size):
            poisoned = gradient(100, comm.rank, 9)
            if comm.rank == other:
                poisoned[[0, 37, 99][other % 3]] = bad
            finite.append(bool(np.isfinite(reducer.reduce(poisoned)).any()) or reducer.last.finite)
            good = gradient(100, comm.rank, other)
            twin.steps = reducer.steps
            finite.append(reducer.reduce(good).tobytes() != twin.reduce(good).tobytes())
        return finite, reducer.residual.tobytes() == twin.residual.tobytes()

    assert simulated.run(body, 5, ranks_per_node) == [([False] * 10, True)] * 5


def test_ranks_whose_loops_meet_in_the_wrong_order_are_told_what_happened_and_what_to_do():
    def body(comm):
        reducer = make_reducer("dense", Topology(comm), size=5)
        if comm.rank == 0:
            reducer.synchronize_step(True)
        else:  # as another loop does that is at the same step, and whose reducer has the same settings
            comm.allgather_ints([True, 0])
            comm.allgather_objects(reducer.settings() | {"step": 0})

    with pytest.raises(RanksDisagree, match="threads share a topology; give each loop a topology of its own"):
        simulated.run(body, 2)


@pytest.mark.parametrize("name", ["torus2d", "hitopk", "hioktopk"])
def test_a_reducer_does_not_care_in_which_order_the_nodes_ranks_come(name):
    # The messages of a node that has nothing to say are shorter in this codec than those of the other.
    options = {} if name == "torus2d" else {"density": 0.1, "wire": "gap"}
    size = 4000
    given = {"a": np.arange(size, dtype=np.float32) * (np.arange(size) % 7 == 0), "b": np.zeros(size)}

    def body(comm, hosts):
        comm.host = hosts[comm.rank]
        topology = Topology(comm)
        return topology.nodes, make_reducer(name, topology, size, **options).reduce(given[comm.host])

    neighbours = simulated.run(lambda comm: body(comm, "aabb"), 4)
    # Here the second rank of the second node comes before the second rank of the first.
    interleaved = simulated.run(lambda comm: body(comm, "abba"), 4)
    assert interleaved[0][0] == ((0, 3), (1, 2))
    for (_, mean), (_, expected) in zip(interleaved, neighbours, strict=True):
        assert mean.any()
        np.testing.assert_array_equal(mean, expected)
