"""Messages with a digest behind each: what is altered on its way is noticed, and nothing else changes."""

import numpy as np
import pytest

from commlib import Topology, make_reducer
from commlib.errors import PeerFailed
from commlib.transport import simulated
from commlib.transport.base import Ring
from commlib.transport.verified import verified


@pytest.fixture
def flipping(monkeypatch):
    """Flip one bit of every message of 4,000 bytes on its way."""
    whole = simulated._Mailbox.put

    def put(mailbox, message):
        if message.nbytes == 4000:
            message = message.copy()
            message.view(np.uint8)[1234] ^= 16
        whole(mailbox, message)

    monkeypatch.setattr(simulated._Mailbox, "put", put)


def exchange(comm):
    incoming = np.empty(1000, np.float32)
    if comm.rank == 1:
        comm.send(np.arange(1000, dtype=np.float32), 2).wait()
    if comm.rank == 2:
        comm.receive(incoming, 1).wait()
    return incoming


def test_a_bit_that_flips_on_its_way_is_noticed_and_both_ranks_are_named(flipping):
    arrived = simulated.run(exchange, 3)[2]
    assert (arrived != np.arange(1000)).sum() == 1  # unverified, it goes unnoticed
    with pytest.raises(PeerFailed, match="rank 2 of 3 on node0, receiving from rank 1: 4000 bytes of "):
        simulated.run(lambda comm: exchange(verified(comm)), 3)


def test_a_split_of_verified_ranks_is_verified_and_nothing_is_verified_twice(flipping):
    with pytest.raises(PeerFailed, match="receiving from rank 1: 4000 bytes of digest"):
        simulated.run(lambda comm: exchange(verified(verified(comm)).split(0)), 3)
    comm = simulated.run(verified, 1)[0]
    assert verified(comm) is comm


def test_verified_ranks_send_at_once_what_the_ranks_below_do():
    def body(comm):
        comm.eager_bytes = 1000
        return verified(comm).eager_bytes

    assert simulated.run(body, 1) == [1000]


@pytest.mark.parametrize("name", ["dense", "hitopk", "oktopk"])
def test_means_and_counted_bytes_are_those_of_ranks_that_do_not_verify(name):
    settings = {} if name == "dense" else {"density": 0.05}

    def body(comm):
        reducer = make_reducer(name, Topology(comm, ranks_per_node=2), size=1003, **settings)
        mean = reducer.reduce(np.random.default_rng(comm.rank).normal(size=1003))
        return mean.tobytes(), reducer.last.traffic

    assert simulated.run(lambda comm: body(verified(comm)), 4) == simulated.run(body, 4)


def test_ranks_that_give_different_numbers_of_integers_are_told_so():
    with pytest.raises(PeerFailed, match=r"expected 2 integers from every rank, got \[2, 3\]"):
        simulated.run(lambda comm: comm.allgather_ints([7] * (2 + comm.rank)), 2)


def test_messages_whose_length_the_receiver_does_not_know_have_a_digest_too(flipping):
    def body(comm, length):
        if comm.rank == 0:
            comm.send_message(np.arange(length).astype(np.uint8), 1).wait()
            return None
        return comm.receive_message(0, lambda length: np.empty(length, np.uint8)).tolist()

    for length in (0, 1, 200):
        assert simulated.run(lambda comm: body(verified(comm), length), 2)[1] == list(range(length))  # noqa: B023
    with pytest.raises(PeerFailed, match="receiving from rank 0: 4000 bytes of digest"):
        simulated.run(lambda comm: body(verified(comm), 4000), 2)


def test_a_rank_passes_on_no_piece_that_is_corrupt(flipping):
    def body(comm):
        comm.eager_bytes, comm.in_pieces = 4 * 4000, True  # of a message, pieces of 4000 bytes
        own = np.zeros(9000, np.uint8) if comm.rank == 0 else np.zeros(8, np.uint8)
        room = lambda _, size: np.empty(size, np.uint8)  # noqa: E731
        return Ring(comm, range(comm.size)).allgather_messages(own, room)

    with pytest.raises(PeerFailed, match="rank 1 of 3 .*receiving from rank 0: 4000 bytes of digest"):
        simulated.run(lambda comm: body(verified(comm)), 3)
