"""The overlapped exchange: buckets in one order on all ranks, to the same bits as without overlap."""

import numpy as np
import pytest

from commlib import InvalidArgument, Link, Network, PeerFailed, Topology, predict
from commlib.errors import UseAfterClose
from commlib.reducers import REDUCERS
from commlib.transport import simulated
from tests.exchanges import whole_exchange

SIZES = [3, 500, 41, 1]
WRAPPERS = {
    "momentum_correction": [{"name": "momentum_correction", "momentum": 0.5}],
    "local_clipping": [{"name": "local_clipping", "norm": 3.0}],
}
CASES = {
    **{name: (name, {"density": 0.05} if reducer.sparse else {}) for name, reducer in REDUCERS.items()},
    **{name: ("hitopk", {"density": 0.05, "wrappers": wrappers}) for name, wrappers in WRAPPERS.items()},
    "oktopk-gap+fp16": ("oktopk", {"density": 0.05, "wire": "gap+fp16", "reevaluate_every": 2}),
}
STEPS = 4


def overlapped_on(comm, name, options, sizes=SIZES, *, overlap=True):
    """The exchange of a gradient on this rank, on nodes of two ranks."""
    return whole_exchange(name, Topology(comm, ranks_per_node=2), sizes, overlap=overlap, **options)


def drawn(rank, step, size):
    """A gradient that differs between ranks and steps."""
    return np.random.default_rng([rank, step, size]).standard_t(2, size).astype(np.float32)


@pytest.mark.world_sizes(1, 3, 4)
@pytest.mark.pairs(lambda ranks, case: ranks.size == 3 or case in ("dense", "oktopk-gap+fp16", *WRAPPERS))
@pytest.mark.parametrize("case", CASES)
def test_overlap_gives_the_bits_of_buckets_reduced_in_the_foreground(ranks, case):
    def body(comm):
        plain = overlapped_on(comm, *CASES[case], overlap=False)
        with overlapped_on(comm, *CASES[case]) as overlapped:
            for step in range(STEPS):
                gradient = drawn(comm.rank, step, plain.size)
                if step == 2 and comm.rank == comm.size - 1:
                    gradient[1] = np.nan
                order = np.random.default_rng([comm.rank, step]).permutation(len(SIZES)).tolist()
                mean = overlapped.reduce(gradient, order)
                assert mean.tobytes() == plain.reduce(gradient).tobytes()
                assert plain.last.finite == overlapped.last.finite == (step != 2)
                assert np.isnan(mean).all() == (step == 2)
                assert overlapped.last.traffic == plain.last.traffic
                assert overlapped.last.selected == plain.last.selected
                assert overlapped.steps == plain.steps == step + 1
            assert overlapped.residual.tobytes() == plain.residual.tobytes()
            return overlapped.order

    orders = ranks.run(body)
    assert orders == [orders[0]] * ranks.size
    assert sorted(orders[0]) == list(range(len(SIZES)))


@pytest.mark.world_sizes(3)
def test_the_order_is_that_of_the_first_step_on_rank_0(ranks):
    def body(comm):
        with overlapped_on(comm, "dense", {}) as exchange:
            exchange.reduce(
                drawn(comm.rank, 0, exchange.size), [2, 0, 3, 1] if comm.rank == 0 else [0, 1, 2, 3]
            )
            exchange.reduce(drawn(comm.rank, 1, exchange.size), [3, 1, 2, 0])
            return exchange.order[0], sorted(exchange.order)

    # the other three are submitted while the first is reduced, or after it
    assert ranks.run(body) == [(2, [0, 1, 2, 3])] * ranks.size


# ------------------------------------------------------------- in virtual time

NETWORK = Network(Link(1e-5, 1e-9), Link(3e-5, 1e-8))
IN_TIME = {"dense": {}, "torus2d": {}, "hitopk": {"density": 0.01}, "gtopk": {"density": 0.01}}
ENTRIES = [4_000, 16_000, 32_000]
FORWARD = 2e-4


def timed_step(comm, name, options, backward):
    """Return the virtual seconds of a step, those its thread was busy, and those of them that were hidden.

    The step is the second one: the first also records the order of the buckets.
    """
    with overlapped_on(comm, name, options, ENTRIES) as exchange:
        for step in range(2):
            gradient = drawn(comm.rank, step, exchange.size)
            comm.barrier()
            start = comm.now()
            comm.compute(FORWARD)
            for number, part in reversed(list(enumerate(exchange.slices))):
                comm.compute(backward[number])
                exchange.submit(number, gradient[part])
            _, report = exchange.wait()
            seconds = comm.now() - start
        return seconds, report.busy, report.hidden


@pytest.mark.parametrize("name", IN_TIME)
@pytest.mark.parametrize("shares", [(0.2, 0.5, 0.3), (0.0, 0.1, 0.1), (3.0, 2.0, 1.0)], ids=str)
def test_messages_pass_while_a_rank_computes_each_as_soon_as_its_bucket_is_there(name, shares):
    """Two resources: a bucket's messages begin when it is computed, and when those before are over."""
    nodes, options = [[0, 1], [2, 3]], IN_TIME[name]
    messages = [predict(name, nodes, size, network=NETWORK, **options).seconds for size in ENTRIES]
    backward = [share * sum(messages) for share in shares]
    computing = end = FORWARD
    for own, seconds in zip(reversed(backward), reversed(messages), strict=True):
        computing += own
        end = max(end, computing) + seconds
    found = simulated.run(lambda comm: timed_step(comm, name, options, backward), 4, 2, NETWORK)
    for step, busy, hidden in found:
        # closed forms of sparse ones take an average union of what the ranks select
        assert step == pytest.approx(end, rel=1e-9 if name in ("dense", "torus2d") else 0.02)
        assert busy == pytest.approx(sum(messages), rel=0.02)
        assert hidden == pytest.approx(max(0.0, busy - (step - computing)))


def test_what_cannot_arrive_is_named_where_a_rank_waits_for_its_step():
    def body(comm):
        exchange = overlapped_on(comm, "dense", {})
        if comm.rank == 0:
            exchange.reduce(drawn(0, 0, exchange.size))

    with pytest.raises(PeerFailed, match="rank 0 of 2, .*meeting the other ranks"):
        simulated.run(body, 2)


def test_an_exchange_that_is_never_closed_does_not_hold_up_the_end():
    def body(comm):
        return overlapped_on(comm, "dense", {}, [2, 3]).reduce(np.arange(5.0)).tolist()

    assert simulated.run(body, 2) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2


class Failing(REDUCERS["dense"]):
    """Fails in its second step, on rank 1 alone."""

    def _reduce(self, gradient, buffer):
        if self.steps == 1 and self.topology.world.rank == 1:
            raise MemoryError("no room for a message")
        return super()._reduce(gradient, buffer)


def test_an_exception_in_the_thread_is_raised_where_the_step_is_waited_for_and_ends_the_other_ranks():
    seen = {}

    def body(comm):
        exchange = overlapped_on(comm, "dense", {}, [5, 7])
        exchange.reducers[0] = Failing(exchange.topology, 5)
        exchange.reduce(drawn(comm.rank, 0, 12), [1, 0])
        try:
            exchange.reduce(drawn(comm.rank, 1, 12), [0, 1])
        except BaseException as error:
            seen[comm.rank] = type(error)
            exchange.close()
            raise

    with pytest.raises(MemoryError, match="no room for a message"):
        simulated.run(body, 3)
    assert seen == {0: PeerFailed, 1: MemoryError, 2: PeerFailed}


@pytest.mark.parametrize("overlap", [False, True], ids=["inline", "overlapped"])
def test_each_bucket_is_submitted_once_a_step(overlap):
    def body(comm):
        with overlapped_on(comm, "dense", {}, [2, 3], overlap=overlap) as exchange:
            exchange.submit(0, np.ones(2))
            for bucket in (0, 2, -1):
                with pytest.raises(InvalidArgument, match="^bucket: "):
                    exchange.submit(bucket, np.ones(2))
            if not overlap:
                with pytest.raises(InvalidArgument, match="^bucket: .* 1 is missing"):
                    exchange.wait()
            exchange.submit(1, np.ones(3))
            return exchange.wait()[0].tolist()

    assert simulated.run(body, 2) == [[1.0] * 5] * 2


def test_a_closed_exchange_takes_nothing_and_leaves_nobody_waiting():
    def body(comm):
        exchange = overlapped_on(comm, "dense", {}, [2, 3])
        exchange.submit(0, np.ones(2))
        exchange.close()
        with pytest.raises(UseAfterClose):
            exchange.wait()
        with pytest.raises(UseAfterClose):
            exchange.submit(1, np.ones(3))
        return exchange.steps

    assert len(simulated.run(body, 2)) == 2


@pytest.mark.world_sizes(2)
def test_means_that_are_still_held_are_not_overwritten_and_memory_is_used_again(ranks):
    def body(comm):
        with overlapped_on(comm, "dense", {}, [2, 3]) as exchange:
            held = [exchange.reduce(np.full(5, float(step))) for step in range(4)]
            values = [mean.tolist() for mean in held]
            del held
            addresses = {exchange.reduce(np.ones(5)).ctypes.data for _ in range(4)}
            return values, len(addresses)

    assert ranks.run(body)[0] == ([[step] * 5 for step in range(4)], 1)
