"""What every transport does. The same bodies run on threads and, under ``mpirun``, on processes
(``mpirun -np 4 python -m pytest tests/transport/test_communicator.py``).
"""

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from commlib.errors import InvalidArgument, PeerFailed, UseAfterClose
from commlib.topology import Topology
from commlib.transport import mpi
from commlib.transport.base import Ring
from commlib.vectors import partition

DTYPES = [np.uint8, np.float32, np.int64]
INT64 = np.iinfo(np.int64)


def message(source, destination, dtype=np.float32, length=None):
    """What one rank sends to another in these tests: different for every pair, often empty."""
    length = (5 * source + 3 * destination) % 7 if length is None else length
    large = 2**40 if dtype is np.int64 else 0  # no float32 and no int32 holds 2**40 + 1
    return (large + (3 * np.arange(length) + 17 * source + 5 * destination) % 251).astype(dtype)


def neighbours(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


# ------------------------------------------------------------- messages


@pytest.mark.parametrize("dtype", DTYPES)
def test_send_and_receive_move_an_array_to_the_next_rank(ranks, dtype):
    def body(comm):
        right, left = neighbours(comm)
        incoming, outgoing = np.zeros((7, 143), dtype), message(comm.rank, right, dtype, 1001).reshape(7, 143)
        receipt = comm.receive(incoming, left)
        comm.send(outgoing, right).wait()
        outgoing.fill(255)  # after which the buffer may be used
        comm.barrier()
        receipt.wait()
        return incoming

    for rank, incoming in enumerate(ranks.run(body)):
        expected = message((rank - 1) % ranks.size, rank, dtype, 1001).reshape(7, 143)
        assert incoming.dtype == dtype
        np.testing.assert_array_equal(incoming, expected)


def test_several_messages_between_one_pair_stay_in_order(ranks):
    def body(comm):
        right, left = neighbours(comm)
        incoming = [np.zeros(10, np.int64) for _ in range(8)]
        receipts = [comm.receive(array, left) for array in incoming]
        sent = [comm.send(np.full(10, 100 * comm.rank + number), right) for number in range(8)]
        for request in reversed(receipts + sent):  # the order of posting counts, not that of waiting
            request.wait()
        return np.stack(incoming)[:, 0].tolist()

    for rank, numbers in enumerate(ranks.run(body)):
        assert numbers == [100 * ((rank - 1) % ranks.size) + number for number in range(8)]


# ------------------------------------------------------------- messages of any length


@pytest.mark.parametrize("eager_bytes", [None, 1, 16, 20])
def test_a_message_is_received_by_ranks_that_do_not_know_its_length(ranks, eager_bytes, monkeypatch):
    """Whole, and in pieces of 1, 4 and 5 bytes; MPI cuts what is longer than a C int counts."""
    lengths = [[3 + rank, 0, 20, 4 * rank] for rank in range(ranks.size)]
    monkeypatch.setattr(mpi, "PIECE_BYTES", eager_bytes or mpi.PIECE_BYTES)

    def body(comm):
        (right, left), asked, at_once, send = neighbours(comm), [], [], comm._send_message
        monkeypatch.setattr(comm, "eager_bytes", eager_bytes or comm.eager_bytes)
        monkeypatch.setattr(comm, "in_pieces", comm.rank % 2 == 0)  # the sender decides
        noting = lambda *sent: at_once.append(sent[0].nbytes) or send(*sent)  # noqa: E731
        monkeypatch.setattr(comm, "_send_message", noting)

        def room(length):
            asked.append(length)
            return np.full(length, 255, np.uint8)

        before = comm.sent_bytes.copy(), comm.received_bytes.copy()
        sent = [
            comm.send_message(message(comm.rank, right, np.uint8, length), right)
            for length in lengths[comm.rank]
        ]
        arrived = [comm.receive_message(left, room) for _ in lengths[left]]
        for request in sent:
            request.wait()
        assert not isinstance(comm, mpi.MPICommunicator) or max(at_once) <= mpi.PIECE_BYTES
        return arrived, asked, comm.sent_bytes - before[0], comm.received_bytes - before[1]

    for rank, (arrived, asked, sent, received) in enumerate(ranks.run(body)):
        right, left = (rank + 1) % ranks.size, (rank - 1) % ranks.size
        assert (sent[right], sent.sum()) == (sum(lengths[rank]), sum(lengths[rank]))
        assert (received[left], received.sum()) == (sum(lengths[left]), sum(lengths[left]))
        assert asked == [len(each) for each in arrived] == lengths[left]
        for each in arrived:
            np.testing.assert_array_equal(each, message(left, rank, np.uint8, len(each)))


def test_messages_of_known_and_unknown_length_stay_in_order(ranks):
    def body(comm):
        right, left = neighbours(comm)
        first, last = np.zeros(3, np.uint8), np.zeros(3, np.uint8)
        receipt = comm.receive(first, left)
        sent = [
            comm.send(np.full(3, 1, np.uint8), right),
            comm.send_message(np.full(3, 2, np.uint8), right),
            comm.send(np.full(3, 3, np.uint8), right),
        ]
        between = comm.receive_message(left, lambda length: np.empty(length, np.uint8))
        for request in (receipt, comm.receive(last, left), *sent):
            request.wait()
        return [first[0], between[0], last[0]]

    assert ranks.run(body) == [[1, 2, 3]] * ranks.size


@pytest.mark.parametrize("eager_bytes", [None, 12])
def test_the_messages_of_all_go_round_a_ring(ranks, eager_bytes, monkeypatch):
    def body(comm):
        monkeypatch.setattr(comm, "eager_bytes", eager_bytes or comm.eager_bytes)
        monkeypatch.setattr(comm, "in_pieces", True)
        ring, own = Ring(comm, range(comm.size)), message(comm.rank, 0, np.uint8)
        before, called = comm.sent_bytes.sum(), []
        room, meanwhile = lambda _, size: np.zeros(size, np.uint8), lambda: called.append(1)
        gathered = ring.allgather_messages(own, room, meanwhile)
        return gathered, gathered[comm.rank] is own, comm.sent_bytes.sum() - before, len(called)

    lengths = [len(message(rank, 0, np.uint8)) for rank in range(ranks.size)]
    for own, (gathered, is_own, sent, called) in enumerate(ranks.run(body)):
        assert (is_own, called) == (True, int(ranks.size > 1))
        assert sent == sum(lengths) - lengths[(own + 1) % ranks.size]
        for rank, each in enumerate(gathered):
            np.testing.assert_array_equal(each, message(rank, 0, np.uint8))


# ------------------------------------------------------------- exchange, reduce_scatter, allgather


def exchange_all(comm, dtype):
    outgoing = [message(comm.rank, other, dtype) for other in range(comm.size)]
    incoming = [np.zeros_like(message(other, comm.rank, dtype)) for other in range(comm.size)]
    comm.exchange(outgoing, incoming)
    return incoming


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece_bytes", [mpi.PIECE_BYTES, 1, 5, 8])
def test_exchange_brings_every_rank_what_every_rank_sent_it(ranks, dtype, piece_bytes, monkeypatch):
    """Pieces end within an entry, at its end, and after every byte: MPI sends up to 1 GiB in one."""
    monkeypatch.setattr(mpi, "PIECE_BYTES", piece_bytes)
    for rank, incoming in enumerate(ranks.run(lambda comm: exchange_all(comm, dtype))):
        for source in range(ranks.size):
            np.testing.assert_array_equal(incoming[source], message(source, rank, dtype))


@pytest.mark.parametrize("sent", [3, 5])
def test_a_message_of_another_length_is_refused(ranks, sent):
    def body(comm):
        right, left = neighbours(comm)
        incoming = np.zeros(4, np.uint8)
        receipt = comm.receive(incoming, left)
        request = comm.send(np.ones(sent, np.uint8), right)
        with pytest.raises(PeerFailed, match=f"receiving from rank {left}.*4 bytes"):
            receipt.wait()
        request.wait()
        return True

    assert all(ranks.run(body))


def test_a_negative_color_is_refused(ranks):
    def body(comm):
        with pytest.raises(InvalidArgument, match="color: expected at least 0, got -1"):
            comm.split(-1)
        return True

    assert all(ranks.run(body))


def test_what_one_rank_does_to_gathered_objects_the_others_do_not_see(ranks):
    def body(comm):
        own = [comm.rank]
        values = comm.allgather_objects(own)
        own.append("later")
        values[0].append(comm.rank)
        comm.barrier()
        return values

    expected = [[rank] for rank in range(ranks.size)]
    for rank, values in enumerate(ranks.run(body)):
        assert values == [[0, rank], *expected[1:]]


def addend(rank, size):
    """Heavy tails, so that another order of additions gives other bits."""
    return np.random.default_rng([rank, size]).standard_t(1, size).astype(np.float32)


def all_to_the_last(size, parts):
    return np.array([0] * parts + [size])


@pytest.mark.parametrize("bounds_of", [partition, all_to_the_last])
@pytest.mark.parametrize("size", [0, 1, 3, 8, 100, 1000, 4099])
def test_reduce_scatter_adds_in_rank_order_to_the_last_bit(ranks, size, bounds_of):
    bounds = bounds_of(size, ranks.size)

    def body(comm):
        vector = addend(comm.rank, size)
        part = comm.reduce_scatter(vector, bounds)
        found = part.copy()
        part[:] = np.nan  # which is of nobody else
        comm.barrier()
        return found, vector

    expected = addend(0, size)
    for rank in range(1, ranks.size):
        expected = expected + addend(rank, size)
    for rank, (part, vector) in enumerate(ranks.run(body)):
        assert part.dtype == np.float32
        assert part.tobytes() == expected[bounds[rank] : bounds[rank + 1]].tobytes()
        assert vector.tobytes() == addend(rank, size).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "length_of",
    [lambda rank: 11, lambda rank: 4 * rank, lambda rank: 3 * (rank % 2), lambda rank: 0],
    ids=["equal", "first-empty", "every-other-empty", "all-empty"],
)
def test_allgather_brings_every_rank_everybodys_array(ranks, dtype, length_of):
    def body(comm):
        parts = [np.zeros(length_of(rank), dtype) for rank in range(comm.size)]
        comm.allgather(message(comm.rank, 1, dtype, length_of(comm.rank)), parts)
        return parts

    for parts in ranks.run(body):
        for source, part in enumerate(parts):
            np.testing.assert_array_equal(part, message(source, 1, dtype, length_of(source)))


# ------------------------------------------------------------- agree, allgather_objects, barrier


def test_agree_returns_everybodys_values_in_rank_order_to_64_bits(ranks):
    def values(rank):  # 2⁵³ + 1 is no float64
        return [rank == 0, np.int32(-3 * rank), INT64.min + rank, INT64.max - rank, 2**53 + 1 + 2 * rank]

    for rows in ranks.run(lambda comm: comm.allgather_ints(values(comm.rank))):
        assert rows.dtype == np.int64
        assert rows.tolist() == [values(rank) for rank in range(ranks.size)]


def test_agreements_are_under_way_while_messages_travel_and_end_in_any_order(ranks):
    def body(comm):
        first = comm.start_allgather_ints([comm.rank, 7])
        outgoing = [np.array([comm.rank, other]) for other in range(comm.size)]
        incoming = [np.zeros(2, np.int64) for _ in range(comm.size)]
        comm.exchange(outgoing, incoming)
        second = comm.start_allgather_ints([10 * comm.rank])
        third = comm.allgather_ints([100 * comm.rank])
        return [rows.tolist() for rows in (third, second(), first())], np.stack(incoming).tolist()

    everyone = range(ranks.size)
    for rank, (rows, incoming) in enumerate(ranks.run(body)):
        assert rows == [
            [[100 * each] for each in everyone],
            [[10 * each] for each in everyone],
            [[each, 7] for each in everyone],
        ]
        assert incoming == [[each, rank] for each in everyone]


@pytest.mark.parametrize("piece_bytes", [mpi.PIECE_BYTES, 1, 50])
def test_objects_come_in_rank_order(ranks, piece_bytes, monkeypatch):
    monkeypatch.setattr(mpi, "PIECE_BYTES", piece_bytes)

    def objects(rank):
        return {"rank": rank, "text": "x" * rank, "nested": (rank, [None, 0.5 * rank])}

    expected = [objects(rank) for rank in range(ranks.size)]
    assert ranks.run(lambda comm: comm.allgather_objects(objects(comm.rank))) == [expected] * ranks.size


def test_no_rank_leaves_a_barrier_before_the_last_has_come(ranks):
    def body(comm):
        name = tempfile.mkdtemp() if comm.rank == 0 else None
        folder = Path(comm.allgather_objects(name)[0])
        if comm.rank == comm.size - 1:
            time.sleep(0.05)  # the others have time to run on, where nothing holds them
        (folder / str(comm.rank)).touch()
        comm.barrier()
        arrived = len(list(folder.iterdir()))
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(folder)
        return arrived

    assert ranks.run(body) == [ranks.size] * ranks.size


# ------------------------------------------------------------- split


@pytest.mark.parametrize(
    "color_of",
    [lambda rank: 0, lambda rank: rank, lambda rank: rank % 2, lambda rank: -(rank // 2) + 5],
    ids=["together", "alone", "odd-and-even", "pairs"],
)
def test_split_joins_the_ranks_of_one_color_in_their_order(ranks, color_of):
    def body(comm):
        group = comm.split(color_of(comm.rank))
        return (
            group.rank,
            group.size,
            group.host == comm.host,
            group.allgather_ints([comm.rank])[:, 0].tolist(),
        )

    for rank, seen in enumerate(ranks.run(body)):
        members = [other for other in range(ranks.size) if color_of(other) == color_of(rank)]
        assert seen == (members.index(rank), len(members), True, members)


def test_messages_of_different_communicators_do_not_meet(ranks):
    def body(comm):
        right, left = neighbours(comm)
        groups = [comm, comm.split(0), comm.split(0)]
        incoming = [np.zeros(3, np.int64) for _ in groups]
        receipts = [group.receive(array, left) for group, array in zip(groups, incoming, strict=True)]
        sent = [
            group.send(np.full(3, 10 * comm.rank + number), right)
            for number, group in reversed(list(enumerate(groups)))
        ]
        for request in receipts + sent:
            request.wait()
        return [array[0] for array in incoming]

    for rank, numbers in enumerate(ranks.run(body)):
        assert numbers == [10 * ((rank - 1) % ranks.size) + number for number in range(3)]


# ------------------------------------------------------------- byte counts


def test_the_payload_to_and_from_every_rank_is_counted_in_bytes(ranks):
    def body(comm):
        group = comm.split(0)  # with counters of its own
        for dtype in DTYPES:
            exchange_all(group, dtype)
        return group.sent_bytes, group.received_bytes

    for rank, (sent, received) in enumerate(ranks.run(body)):
        others = [other for other in range(ranks.size) if other != rank]
        width = sum(np.dtype(dtype).itemsize for dtype in DTYPES)
        assert (sent.dtype, received.dtype) == (np.int64, np.int64)
        assert sent[rank] == received[rank] == 0  # the own part stays in memory
        assert sent[others].tolist() == [width * len(message(rank, other)) for other in others]
        assert received[others].tolist() == [width * len(message(other, rank)) for other in others]


def test_collectives_count_what_they_exchange(ranks):
    def body(comm):
        group = comm.split(0)
        bounds = partition(1001, comm.size)
        group.reduce_scatter(addend(comm.rank, 1001), bounds)
        scattered = group.sent_bytes.copy(), group.received_bytes.copy()
        group.allgather(
            np.zeros(comm.rank, np.int64), [np.zeros(rank, np.int64) for rank in range(comm.size)]
        )
        return scattered, (group.sent_bytes - scattered[0], group.received_bytes - scattered[1])

    lengths = np.diff(partition(1001, ranks.size))
    for rank, (scattered, gathered) in enumerate(ranks.run(body)):
        is_other = np.arange(ranks.size) != rank
        np.testing.assert_array_equal(scattered, [4 * lengths * is_other, 4 * lengths[rank] * is_other])
        # round a ring: all parts but its own go to the right neighbour, and all but mine come from the left
        left, right, everything = (rank - 1) % ranks.size, (rank + 1) % ranks.size, 8 * sum(range(ranks.size))
        expected = np.zeros((2, ranks.size), np.int64)
        if ranks.size > 1:
            expected[0, right], expected[1, left] = everything - 8 * right, everything - 8 * rank
        np.testing.assert_array_equal(gathered, expected)


def test_agreement_objects_and_splits_are_no_payload(ranks):
    def body(comm):
        group = comm.split(0)
        group.allgather_ints([1, 2, comm.rank])
        group.allgather_objects("text" * comm.rank)
        group.barrier()
        group.split(comm.rank % 2)
        return int(group.sent_bytes.sum() + group.received_bytes.sum())

    assert ranks.run(body) == [0] * ranks.size


# ------------------------------------------------------------- the end of a communicator

EXCHANGES = {
    "split": lambda comm: comm.split(0),
    "allgather_ints": lambda comm: comm.allgather_ints([1]),
    "alltoall_ints": lambda comm: comm.alltoall_ints([1] * comm.size),
    "allgather_objects": lambda comm: comm.allgather_objects("text"),
    "barrier": lambda comm: comm.barrier(),
    "send": lambda comm: comm.send(np.zeros(3, np.float32), 0),
    "receive": lambda comm: comm.receive(np.zeros(3, np.float32), 0),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_closed_communicator_is_refused_and_the_others_stay_open(ranks, exchange):
    def body(comm):
        group = comm.split(0)
        part = group.split(0)
        group.close()
        group.close()
        refusal = f"^rank {comm.rank} of {comm.size}: the communicator was closed$"
        with pytest.raises(UseAfterClose, match=refusal):
            EXCHANGES[exchange](group)
        return [other.allgather_ints([comm.rank])[:, 0].tolist() for other in (part, comm)]

    everyone = list(range(ranks.size))
    assert ranks.run(body) == [[everyone, everyone]] * ranks.size


def test_a_topology_closes_what_it_has_split_but_nothing_where_an_exception_leaves_its_block(ranks):
    def body(comm):
        with pytest.raises(ZeroDivisionError), Topology(comm) as left_open:
            raise ZeroDivisionError
        with Topology(comm, ranks_per_node=2) as topology:
            topology.stream.barrier()
        topology.close()
        for closed in (topology.node, topology.stream):
            with pytest.raises(UseAfterClose):
                closed.barrier()
        return [each.allgather_ints([comm.rank])[:, 0].tolist() for each in (comm, left_open.node)]

    everyone = list(range(ranks.size))
    assert ranks.run(body) == [[everyone, everyone]] * ranks.size


@pytest.mark.parametrize("is_permitted", [True, False])
def test_a_thread_that_exchanges_goes_before_others_where_that_is_permitted(is_permitted, monkeypatch):
    asked, bodies = [], []

    def setpriority(which, thread, niceness):
        asked.append((which, thread, niceness))
        if not is_permitted:
            raise PermissionError

    monkeypatch.setattr(os, "setpriority", setpriority)
    mpi.world().start_thread(lambda: bodies.append(threading.get_native_id())).join()
    assert asked == [(os.PRIO_PROCESS, *bodies, mpi.EXCHANGE_NICENESS)]
