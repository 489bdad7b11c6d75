"""``torus2d`` with values that are rounded between nodes; test_promises.py has it among its cases."""

import numpy as np
import pytest

from commlib import Topology, make_reducer
from commlib.transport import simulated
from commlib.vectors import partition
from commlib.wire import VALUE_CODECS

RANKS, RANKS_PER_NODE, SIZE = 6, 2, 6000  # three nodes; two shards of three slices of 1,000


def gradients():
    return [np.random.default_rng(rank).standard_t(3, SIZE).astype(np.float32) for rank in range(RANKS)]


def reduced(values, steps=1):
    """On every rank its means, its residual and the bytes that it sent between nodes in one step."""

    def body(comm):
        reducer = make_reducer("torus2d", Topology(comm, RANKS_PER_NODE), SIZE, values=values)
        means = [reducer.reduce(gradients()[comm.rank]).copy() for _ in range(steps)]
        return means, reducer.residual, reducer.last.traffic.sent.inter

    return simulated.run(body, RANKS)


@pytest.mark.parametrize("values", ["qsgd8", "lloyd4", "fp16"])
def test_what_is_applied_is_rounded_twice_and_who_rounded_keeps_the_rest(values):
    def through(vector):
        codec = VALUE_CODECS[values]()
        return codec.decode(codec.encode(vector), len(vector))

    given, seen = gradients(), reduced(values)
    of_nodes = [given[rank] + given[rank + 1] for rank in range(0, RANKS, 2)]
    bounds = partition(SIZE, 6).tolist()  # of the slices, shard after shard
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        local_rank, owner = low // 3000, low % 3000 // 1000
        sent = [through(each[low:high]) for each in of_nodes]
        total = sent[0] + sent[1] + sent[2]
        applied = through(total)
        for means, _, _ in seen:
            assert means[0][low:high].tobytes() == (applied / np.float32(RANKS)).tobytes()
        for node in range(3):
            rest = of_nodes[node][low:high] - sent[node]
            rest += total - applied if node == owner else 0
            found = seen[2 * node + local_rank][1][low:high]
            assert found.tobytes() == rest.tobytes()
            assert not seen[2 * node + 1 - local_rank][1][low:high].any()  # it has the other shard


@pytest.mark.parametrize(("values", "times"), [("fp16", 2), ("qsgd8", 3.9), ("lloyd4", 7), ("qsgd4", 7.7)])
def test_so_many_times_fewer_bytes_go_between_nodes(values, times):
    exact, rounded = (reduced(each) for each in ("fp32", values))
    for (_, none_kept, many), (_, _, few) in zip(exact, rounded, strict=True):
        assert many == 4 * 2 * 2 * 1000
        assert many >= times * few
        assert not none_kept.any()


def test_what_is_rounded_away_is_applied_later():
    mean = np.mean(gradients(), axis=0, dtype=np.float64)
    means, _, _ = reduced("qsgd4", steps=20)[0]
    first, all_of_them = (np.linalg.norm(each - mean) for each in (means[0], np.mean(means, axis=0)))
    assert all_of_them < first / 10


def test_on_one_node_nothing_is_rounded():
    def body(comm, **values):
        reducer = make_reducer("torus2d", Topology(comm, 3), 1000, **values)
        mean = reducer.reduce(gradients()[comm.rank][:1000])
        assert not reducer.residual.any()
        return mean.tobytes()

    assert simulated.run(lambda comm: body(comm, values="qsgd2"), 3) == simulated.run(body, 3)
