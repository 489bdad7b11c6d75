"""The simulated transport: ranks as threads, their virtual clock, and what happens when one of them fails."""

import numpy as np
import pytest

from commlib import InvalidArgument, Link, Network, PeerFailed
from commlib.transport import simulated

# Exact in binary: 1 s and 1/8 s a byte inside a node, 16 s and 1 s a byte between nodes.
NETWORK = Network(intra=Link(1.0, 0.125), inter=Link(16.0, 1.0))


class Broken(Exception):
    """What a rank raises in these tests."""


def test_results_come_in_rank_order_whichever_rank_is_first():
    order = []

    def body(comm):
        if comm.rank < 5:
            comm.receive(np.zeros(1), comm.rank + 1).wait()
        if comm.rank > 0:
            comm.send(np.zeros(1), comm.rank - 1)
        order.append(comm.rank)  # the last rank returns first
        return f"rank {comm.rank} of {comm.size}"

    assert simulated.run(body, 6) == [f"rank {rank} of 6" for rank in range(6)]
    assert order == [5, 4, 3, 2, 1, 0]


def test_runs_do_not_see_each_other():
    def body(comm):
        comm.send(np.array([comm.rank]), comm.rank)  # never received
        incoming = np.zeros(1, np.int64)
        comm.receive(incoming, comm.rank).wait()
        comm.send(np.array([-1]), comm.rank)
        return incoming.tolist()

    assert simulated.run(body, 3) == simulated.run(body, 3) == [[0], [1], [2]]


@pytest.mark.parametrize("count, counts", [*((3, each) for each in ([3, 1], [5], [], 0, -1)), (0, 1)])
def test_a_layout_that_does_not_fit_is_refused_before_any_rank_starts(count, counts):
    started, named = [], "ranks_per_node: expected" if count else "world_size: expected at least 1, got 0"
    with pytest.raises(InvalidArgument, match=named):
        simulated.run(lambda comm: started.append(comm.rank), count, ranks_per_node=counts)
    assert not started


# ------------------------------------------------------------- one rank fails


WAITS = {
    "receiving": lambda comm: comm.receive(np.zeros(1), 2).wait(),
    "in-a-barrier": lambda comm: comm.barrier(),
    "agreeing": lambda comm: comm.allgather_ints([comm.rank]),
    "splitting": lambda comm: comm.split(0),
    "exchanging": lambda comm: comm.exchange([np.zeros(1)] * 4, [np.zeros(1) for _ in range(4)]),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=list(WAITS))
def test_the_exception_of_one_rank_ends_the_others_and_is_raised(wait):
    ended = []

    def body(comm):
        if comm.rank == 2:
            comm.receive(np.zeros(1), 3).wait()  # the others are waiting by then
            raise Broken("rank 2 had enough")
        if comm.rank == 3:
            comm.send(np.zeros(1), 2)
        try:
            wait(comm)
        except PeerFailed as error:
            ended.append((comm.rank, str(error)))
            raise

    with pytest.raises(Broken, match="rank 2 had enough"):
        simulated.run(body, 4)
    assert sorted(rank for rank, _ in ended) == [0, 1, 3]
    for rank, text in ended:
        assert f"rank {rank} of 4" in text


@pytest.mark.parametrize("first", [Broken("the first"), SystemExit(3)], ids=repr)
def test_the_first_error_is_raised_and_not_what_it_led_to(first):
    def body(comm):
        if comm.rank == 3:
            raise first
        try:
            comm.barrier()
        except PeerFailed as error:
            raise Broken("a consequence") from error

    with pytest.raises(type(first)) as caught:
        simulated.run(body, 4)
    assert caught.value is first


# ------------------------------------------------------------- messages that do not fit or do not come


def test_a_message_that_never_comes_names_both_ranks():
    def body(comm):
        if comm.rank == 2:
            comm.receive(np.zeros(3), 1).wait()

    with pytest.raises(PeerFailed) as caught:
        simulated.run(body, 3)
    never = "it never comes, all others have ended or wait"
    assert str(caught.value) == f"rank 2 of 3, receiving from rank 1: {never}"


# ------------------------------------------------------------- the virtual clock


def times(body, world_size, ranks_per_node):
    """The clock of every rank at its end, in seconds since the beginning."""

    def timed(comm):
        body(comm)
        return comm.now()

    return simulated.run(timed, world_size, ranks_per_node, NETWORK)


def send_one(source, destination, size):
    """A body in which one rank sends ``size`` bytes to another, and both wait for it."""

    def body(comm):
        if comm.rank == source:
            comm.send(np.zeros(size, np.uint8), destination).wait()
        if comm.rank == destination:
            comm.receive(np.zeros(size, np.uint8), source).wait()

    return body


def test_a_message_takes_alpha_and_beta_of_its_link():
    assert times(send_one(0, 1, 80), 3, 2) == [1 + 10, 1 + 10, 0]
    assert times(send_one(1, 2, 80), 3, 2) == [0, 16 + 80, 16 + 80]


def test_a_rank_sends_one_message_after_the_other():
    def body(comm):
        if comm.rank == 0:
            requests = [comm.send(np.zeros(8, np.uint8), other) for other in (1, 2, 3)]
            for request in requests:
                request.wait()
        else:
            comm.receive(np.zeros(8, np.uint8), 0).wait()

    assert times(body, 4, 1) == [3 * (16 + 8), 16 + 8, 2 * (16 + 8), 3 * (16 + 8)]
    assert times(body, 4, 4) == [3 * (1 + 1), 1 + 1, 2 * (1 + 1), 3 * (1 + 1)]


@pytest.mark.parametrize(
    ("ranks_per_node", "queued"),
    [([2, 1, 1], [0, 1, 0, 1]), ([1, 1, 2], [0, 0, 0, 1]), (1, [0] * 4)],
    ids=["on the way out", "on the way in", "cards of their own"],
)
def test_the_ranks_of_a_node_share_its_card(ranks_per_node, queued):
    def body(comm):
        if comm.rank < 2:
            comm.send(np.zeros(100, np.uint8), comm.rank + 2).wait()
        else:
            comm.receive(np.zeros(100, np.uint8), comm.rank - 2).wait()

    assert times(body, 4, ranks_per_node) == [16 + 100 * (1 + each) for each in queued]


def test_a_card_sends_and_receives_at_the_same_time_and_in_parallel_to_the_links_inside():
    def body(comm):
        partner, neighbour, requests = comm.rank ^ 2, comm.rank ^ 1, []
        if comm.rank in (0, 2):
            requests.append(comm.send(np.zeros(100, np.uint8), partner))
            requests.append(comm.receive(np.zeros(100, np.uint8), partner))
        requests.append(comm.receive(np.zeros(8, np.uint8), neighbour))
        requests.append(comm.send(np.zeros(8, np.uint8), neighbour))
        for request in requests:
            request.wait()

    assert times(body, 4, 2) == [116, 2, 116, 2]


def test_receiving_late_costs_nothing_and_receiving_early_waits():
    def body(comm):
        if comm.rank == 0:
            comm.send(np.zeros(4, np.uint8), 1)
            comm.send(np.zeros(4, np.uint8), 1).wait()
        if comm.rank == 1:
            second = np.zeros(4, np.uint8)
            receipts = [comm.receive(np.zeros(4, np.uint8), 0), comm.receive(second, 0)]
            receipts[1].wait()
            late = comm.now()
            receipts[0].wait()
            assert comm.now() == late == 2 * (16 + 4)

    assert times(body, 2, 1) == [40, 40]


def test_an_exchange_of_integers_ends_for_all_when_the_last_has_come():
    def body(comm):
        if comm.rank == 0:
            comm.send(np.zeros(8, np.uint8), 1).wait()
        comm.allgather_ints([7, 7])

    # rank 0 comes after 16 + 8 s; two rounds of 16 s for three ranks; two integers to each of two others
    assert times(body, 3, 1) == [24 + 2 * 16 + 2 * 2 * 8] * 3


def test_a_record_holds_every_message_with_its_link_bytes_and_times():
    record = []
    simulated.run(send_one(1, 2, 80), 3, 2, NETWORK, record)
    assert record == [simulated.Transfer(1, 2, 80, is_inter=True, sent=0.0, left=96.0, arrived=96.0)]


def test_runs_take_turns_in_the_same_order_every_time():
    def body(comm):
        order.append(comm.rank)
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        comm.send(np.zeros(10 * comm.rank, np.uint8), right)
        comm.receive(np.zeros(10 * left, np.uint8), left).wait()
        order.append((comm.rank, comm.now()))

    orders = []
    for _ in range(3):
        order = []
        simulated.run(body, 7, 2, NETWORK)
        orders.append(order)
    assert orders[0] == orders[1] == orders[2]
    clocks = [entry[1] for entry in orders[0] if isinstance(entry, tuple)]
    assert clocks == sorted(clocks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(-1.0, 0.0), "alpha: expected seconds from 0, got -1.0"),
        (lambda: Link(0.0, float("nan")), "beta: expected seconds from 0, got nan"),
        (lambda: Link(1.0, 0.0, gap=2.0), "gap: expected 0 to alpha, 1.0, got 2.0"),
        (lambda: Link(1.0, 0.0, busy=-1.0), "busy: expected 0 to alpha, 1.0, got -1.0"),
        (lambda: Link(0.0, 0.0, 0.9), "incast: expected a factor from 1, got 0.9"),
        (lambda: Link(0.0, 0.0, float("inf")), "incast: expected a factor from 1, got inf"),
        (lambda: Link(0.0, 0.0, float("nan")), "incast: expected a factor from 1, got nan"),
        (lambda: Link.of(microseconds=1, gbit_per_second=0), "gbit_per_second: expected more than 0, got 0"),
    ],
)
def test_a_link_that_cannot_be_is_refused(make, message):
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert str(caught.value) == message


# ------------------------------------------------------------- threads of a rank


def test_what_threads_of_a_rank_compute_takes_the_time_of_the_longest():
    def body(comm):
        thread = comm.start_thread(lambda: comm.compute(3.0))
        comm.compute(2.0)
        own = comm.now()
        thread.join()
        return own, comm.now()

    assert simulated.run(body, 2) == [(2.0, 3.0)] * 2


def test_a_thread_exchanges_while_the_rank_computes():
    def body(comm):
        incoming, arrived = np.zeros(8, np.uint8), []

        def exchange():
            request = comm.send(np.full(8, comm.rank, np.uint8), 1 - comm.rank)
            comm.receive(incoming, 1 - comm.rank).wait()
            request.wait()
            arrived.append(comm.now())

        thread = comm.start_thread(exchange)
        comm.compute(5.0)
        thread.join()
        return arrived, comm.now(), incoming[0]

    # 16 s and 1 s a byte between nodes: the computing is over by then
    assert simulated.run(body, 2, 1, NETWORK) == [([24.0], 24.0, 1), ([24.0], 24.0, 0)]


def test_threads_of_a_rank_wait_for_each_other_in_virtual_time():
    def body(comm):
        changed, given, taken = comm.condition(), [], []

        def take():
            for _ in range(2):
                with changed:
                    assert changed.wait_for(lambda: given)
                    taken.append((given.pop(), comm.now()))
                    changed.notify_all()

        thread = comm.start_thread(take)
        for number in range(2):
            comm.compute(4.0)
            with changed:
                given.append(number)
                changed.notify_all()
        thread.join()
        return taken

    assert simulated.run(body, 1) == [[(0, 4.0), (1, 8.0)]]


def test_a_thread_that_waits_for_ever_is_a_deadlock_only_if_its_rank_waits_too():
    def body(comm, *, joins):
        thread = comm.start_thread(lambda: comm.receive(np.zeros(1), 0).wait())
        if joins:
            thread.join()
        return comm.rank

    assert simulated.run(lambda comm: body(comm, joins=False), 2) == [0, 1]
    message = (
        "^rank 0 of 1, waiting for the end of a thread; rank 0 of 1, receiving from rank 0: it never comes"
    )
    with pytest.raises(PeerFailed, match=message):
        simulated.run(lambda comm: body(comm, joins=True), 1)


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_computing_takes_a_number_of_seconds(seconds):
    with pytest.raises(InvalidArgument, match=f"seconds: expected a number from 0, got {seconds!r}"):
        simulated.run(lambda comm: comm.compute(seconds), 1)
