"""Computing on the virtual clock: ranks share cores, and the transport's own work costs nothing."""

import numpy as np
import pytest

from commlib import InvalidArgument, Link, Network
from commlib.transport import machines, simulated
from tests.processor_time import WORK_SECONDS, compute, processor_time

NETWORK = Network(Link(1e-3, 0.0), Link(1e-3, 1e-9))


@pytest.fixture(autouse=True)
def told_processor_time(monkeypatch):
    monkeypatch.setattr(machines, "time", processor_time)


def seconds_to_compute(comm):
    start = comm.now()
    compute()
    return comm.now() - start


def test_a_rank_alone_computes_in_the_processor_time_that_it_takes_here():
    (seconds,) = simulated.run(seconds_to_compute, 1, cores=1)
    assert seconds == pytest.approx(WORK_SECONDS)


@pytest.mark.parametrize("cores, times_as_long", [(1, 4), (2, 2), (4, 1), (9, 1)])
def test_ranks_share_the_cores(cores, times_as_long):
    seconds = simulated.run(seconds_to_compute, 4, cores=cores)
    assert max(seconds) == pytest.approx(times_as_long * WORK_SECONDS)
    # they take turns: one after the other, the first would be done after one
    assert cores > 1 or min(seconds) > 2 * WORK_SECONDS


def test_a_message_that_is_sent_after_computing_sets_out_then():
    def body(comm):
        if comm.rank == 0:
            compute()
            comm.send(np.zeros(4, np.float32), 1).wait()
            return 0.0
        start = comm.now()
        comm.receive(np.empty(4, np.float32), 0).wait()
        return comm.now() - start

    arrived = simulated.run(body, 2, network=NETWORK, cores=1)[1]
    assert arrived == pytest.approx(WORK_SECONDS + NETWORK.intra.alpha)


def test_computing_goes_on_while_a_message_is_under_way():
    slow = Network(Link(WORK_SECONDS, 0.0), Link(WORK_SECONDS, 0.0))

    def body(comm):
        start = comm.now()
        receipt = comm.receive(np.empty(4, np.float32), 1 - comm.rank)
        request = comm.send(np.zeros(4, np.float32), 1 - comm.rank)
        compute()
        request.wait()
        receipt.wait()
        return comm.now() - start

    assert max(simulated.run(body, 2, network=slow, cores=2)) == pytest.approx(WORK_SECONDS)


def test_no_cores_are_refused():
    with pytest.raises(InvalidArgument, match=r"^cores: expected at least 1, got 0$"):
        simulated.run(seconds_to_compute, 1, cores=0)


INCAST = Network(Link(0.0, 0.0), Link(0.0, 1e-6, incast=1.5))


def test_a_card_that_several_nodes_send_to_takes_longer_for_each_byte():
    def body(comm):
        start = comm.now()
        for source in range(1, comm.size):
            if comm.rank == 0:
                comm.receive(np.empty(1000, np.uint8), source).wait()
        if comm.rank:
            comm.send(np.zeros(1000, np.uint8), 0).wait()
        return comm.now() - start

    one, two = (simulated.run(body, ranks, ranks_per_node=1, network=INCAST)[0] for ranks in (2, 3))
    assert one == pytest.approx(1e-3)
    assert two == pytest.approx(1.5e-3 + 1e-3)  # the second one's bytes come behind the first one's


def test_a_ring_is_no_incast():
    def body(comm):
        start = comm.now()
        receipt = comm.receive(np.empty(1000, np.uint8), (comm.rank - 1) % comm.size)
        comm.send(np.zeros(1000, np.uint8), (comm.rank + 1) % comm.size).wait()
        receipt.wait()
        return comm.now() - start

    assert simulated.run(body, 5, ranks_per_node=1, network=INCAST) == pytest.approx([1e-3] * 5)


@pytest.mark.parametrize("cores, times_as_long", [(1, 2), (2, 1)])
def test_threads_of_a_rank_share_the_cores_too(cores, times_as_long):
    def body(comm):
        thread = comm.start_thread(compute)
        compute()
        thread.join()
        return comm.now()

    (seconds,) = simulated.run(body, 1, cores=cores)
    assert seconds == pytest.approx(times_as_long * WORK_SECONDS)
