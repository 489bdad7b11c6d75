"""The simulated transport: ranks as threads, and what happens when one of them fails."""

import threading

import numpy as np
import pytest

from commlib import InvalidArgument, PeerFailed
from commlib.transport import simulated

PATIENCE_SECONDS = 0.1  # long enough for threads that come, short for those that do not


class Broken(Exception):
    """What a rank raises in these tests."""


def test_results_come_in_rank_order_whoever_is_first():
    turns = [threading.Event() for _ in range(6)]

    def body(comm):
        if comm.rank < 5:
            turns[comm.rank + 1].wait()
        turns[comm.rank].set()  # the last rank returns first
        return f"rank {comm.rank} of {comm.size}"

    assert simulated.run(body, 6) == [f"rank {rank} of 6" for rank in range(6)]


def test_a_function_may_return_anything_or_nothing():
    results = simulated.run(lambda comm: None if comm.rank else {1: np.float32(2)}, 2)
    assert results == [{1: 2}, None]


def test_64_ranks_exchange_with_each_other():
    def body(comm):
        outgoing = [np.array([64 * comm.rank + other]) for other in range(comm.size)]
        incoming = [np.zeros(1, np.int64) for _ in range(comm.size)]
        comm.exchange(outgoing, incoming)
        return np.concatenate(incoming)

    np.testing.assert_array_equal(simulated.run(body, 64), np.arange(64 * 64).reshape(64, 64).T)


def test_ranks_of_one_node_share_a_host_and_nodes_do_not():
    hosts = simulated.run(lambda comm: comm.host, 5, ranks_per_node=[2, 1, 2])
    assert hosts == ["node0", "node0", "node1", "node2", "node2"]
    assert simulated.run(lambda comm: comm.split(0).host, 2, ranks_per_node=1) == ["node0", "node1"]


def test_runs_do_not_see_each_other():
    def body(comm):
        comm.send(np.array([comm.rank]), comm.rank)  # never received
        incoming = np.zeros(1, np.int64)
        comm.receive(incoming, comm.rank).wait()
        comm.send(np.array([-1]), comm.rank)
        return incoming.tolist()

    assert simulated.run(body, 3) == simulated.run(body, 3) == [[0], [1], [2]]


@pytest.mark.parametrize("counts", [[3, 1], [5], [], 0, -1])
def test_a_layout_that_does_not_fit_is_refused_before_any_rank_starts(counts):
    started = []
    with pytest.raises(InvalidArgument, match="ranks_per_node: expected"):
        simulated.run(lambda comm: started.append(comm.rank), 3, ranks_per_node=counts)
    assert not started


def test_a_run_without_ranks_is_refused():
    with pytest.raises(InvalidArgument, match="world_size: expected at least 1, got 0"):
        simulated.run(lambda comm: None, 0)


# ------------------------------------------------------------- one rank fails


def test_a_group_made_after_a_failure_keeps_nobody_waiting():
    job = simulated._Job(patience_seconds=60.0)
    job.fail()
    assert job.group("late", 2).barrier.broken


WAITS = {
    "receiving": lambda comm: comm.receive(np.zeros(1), 2).wait(),
    "in-a-barrier": lambda comm: comm.barrier(),
    "agreeing": lambda comm: comm.agree([comm.rank]),
    "splitting": lambda comm: comm.split(0),
    "exchanging": lambda comm: comm.exchange([np.zeros(1)] * 4, [np.zeros(1) for _ in range(4)]),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=list(WAITS))
def test_the_exception_of_one_rank_ends_the_others_and_is_raised(wait):
    """With an hour of patience, only the failure can end those that wait before the test's own limit."""
    ended = []

    def body(comm):
        if comm.rank == 2:
            raise Broken("rank 2 had enough")
        try:
            wait(comm)
        except PeerFailed as error:
            ended.append((comm.rank, str(error)))
            raise

    with pytest.raises(Broken, match="rank 2 had enough"):
        simulated.run(body, 4, patience_seconds=3600)
    assert sorted(rank for rank, _ in ended) == [0, 1, 3]
    for rank, text in ended:
        assert f"rank {rank} of 4" in text


def test_a_rank_that_waits_in_a_group_is_ended_by_one_outside_of_it():
    def body(comm):
        group = comm.split(comm.rank % 2)
        comm.barrier()
        if comm.rank == 1:
            raise Broken("the odd one")
        if comm.rank == 0:
            group.barrier()  # rank 2 does not come: it waits below
        comm.barrier()

    with pytest.raises(Broken, match="the odd one"):
        simulated.run(body, 4, patience_seconds=3600)


def test_the_first_error_is_raised_and_not_what_it_led_to():
    is_first_done = threading.Event()

    def body(comm):
        if comm.rank == 3:
            is_first_done.set()
            raise Broken("the first")
        is_first_done.wait()
        try:
            comm.barrier()
        except PeerFailed as error:
            raise Broken("a consequence") from error

    with pytest.raises(Broken, match="the first"):
        simulated.run(body, 4)


def test_an_error_on_every_rank_raises_one_of_them():
    def body(comm):
        raise Broken(f"rank {comm.rank}")

    with pytest.raises(Broken, match=r"rank [0-4]"):
        simulated.run(body, 5)


def test_an_exit_on_one_rank_is_an_exit_of_the_run():
    def body(comm):
        if comm.rank == 0:
            raise SystemExit(3)
        comm.barrier()

    with pytest.raises(SystemExit) as caught:
        simulated.run(body, 2)
    assert caught.value.code == 3


def test_after_a_failed_run_the_next_one_works():
    with pytest.raises(ZeroDivisionError):
        simulated.run(lambda comm: 1 // comm.rank, 3)
    assert simulated.run(lambda comm: comm.agree([comm.rank]).sum(), 3) == [3, 3, 3]


# ------------------------------------------------------------- messages that do not fit or do not come


def test_a_message_that_never_comes_names_both_ranks_and_the_patience():
    def body(comm):
        if comm.rank == 2:
            comm.receive(np.zeros(3), 1).wait()

    with pytest.raises(PeerFailed) as caught:
        simulated.run(body, 3, patience_seconds=PATIENCE_SECONDS)
    assert str(caught.value) == "rank 2 of 3, receiving from rank 1: nothing came in 0.1 s"


def test_a_rank_that_never_comes_is_missed_in_the_barrier():
    def body(comm):
        if comm.rank == 1:
            comm.barrier()

    with pytest.raises(PeerFailed) as caught:
        simulated.run(body, 3, patience_seconds=PATIENCE_SECONDS)
    assert str(caught.value) == "rank 1 of 3: another rank did not come"


@pytest.mark.parametrize("sent", [1, 3], ids=["shorter", "longer"])
def test_a_message_of_another_length_names_both_lengths(sent):
    def body(comm):
        if comm.rank == 0:
            comm.send(np.zeros(sent, np.float32), 1)
        else:
            comm.receive(np.zeros(2, np.float32), 0).wait()

    with pytest.raises(PeerFailed) as caught:
        simulated.run(body, 2)
    assert str(caught.value) == f"rank 1 of 2, receiving from rank 0: expected 8 bytes, got {4 * sent}"


def test_a_message_of_another_type_and_the_same_length_keeps_its_bytes():
    def body(comm):
        incoming = np.zeros(8, np.uint8)
        comm.send(np.array([1.5, -2.5], np.float32), comm.rank)
        comm.receive(incoming, comm.rank).wait()
        return incoming.view(np.float32).tolist()

    assert simulated.run(body, 2) == [[1.5, -2.5]] * 2
