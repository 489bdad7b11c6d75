"""What algorithms say to each other: entries that are evened out, and who keeps what a codec rounds away."""

import numpy as np
import pytest

from commlib import REDUCERS, Network, Topology, make_reducer
from commlib.arrays import Workspace
from commlib.cost import Step, allreduce_traffic
from commlib.network import Link
from commlib.reducers import reducer_options
from commlib.reducers.messages import all_reduce_doubling, even_out
from commlib.transport import simulated


@pytest.mark.parametrize("count, size", [(1, 5), (2, 5), (3, 1001), (4, 3), (5, 9_999), (7, 4_003), (8, 800)])
def test_an_all_reduce_by_doubling_takes_the_rounds_and_the_bytes_of_its_closed_form(count, size):
    drawn = np.random.default_rng([count, size]).standard_normal((count, size)).astype(np.float32)
    drawn[:, ::2] = np.round(100 * drawn[:, ::2])  # which add up without rounding
    network = Network(inter=Link(alpha=1e-3, beta=0, gap=1e-9))

    def body(comm):
        own = drawn[comm.rank].copy()
        total = all_reduce_doubling(comm, own, Workspace()).copy()
        np.testing.assert_array_equal(own, drawn[comm.rank])
        return total, comm.sent_bytes.sum(), comm.now()

    reduced = simulated.run(body, count, 1, network)
    expected = drawn.sum(axis=0, dtype=np.float64)
    for rank, (total, sent, seconds) in enumerate(reduced):
        assert total.tobytes() == reduced[0][0].tobytes()
        np.testing.assert_allclose(total, expected, atol=1e-5)
        np.testing.assert_array_equal(total[::2], expected[::2])
        assert sent == allreduce_traffic([[each] for each in range(count)], rank, size).inter
        if size > count:
            assert seconds == pytest.approx(2e-3 * (count - 1).bit_length(), rel=1e-3)


@pytest.mark.parametrize("counts", [[7, 0, 13, 1, 2], [0, 0, 0, 5], [1, 1, 40], [4, 4], [3]])
def test_entries_are_evened_out_in_the_order_of_the_ranks(counts):
    starts = np.cumsum([0, *counts])

    def body(comm):
        own = np.arange(starts[comm.rank], starts[comm.rank + 1])
        held = [own.astype(np.int32), (own / 2).astype(np.float32)]
        indices, values = even_out(comm, held, np.array(counts, np.int64))
        return indices.tolist(), values.tolist()

    shares = simulated.run(body, len(counts))
    assert [each for indices, _ in shares for each in indices] == list(range(sum(counts)))
    assert [each for _, values in shares for each in values] == [each / 2 for each in range(sum(counts))]
    lengths = [len(indices) for indices, _ in shares]
    assert max(lengths) - min(lengths) <= 1


def test_a_sum_that_two_ranks_round_alike_is_kept_by_one_of_them():
    """Round 1 adds 2048 and 1 on ranks 0, 1 and on 2, 3, exactly; round 2 sends 2049, in fp16 2048."""

    def body(comm):
        reducer = make_reducer("ssar_doubling", Topology(comm), 10, density=0.1, wire="fp16")
        gradient = np.zeros(10, np.float32)
        gradient[3] = [2048, 1, 2048, 1][comm.rank]
        return reducer.reduce(gradient)[3], reducer.residual[3]

    seen = simulated.run(body, 4)
    assert [mean for mean, _ in seen] == [4096 / 4] * 4
    assert sorted(residual for _, residual in seen) == [0, 0, 1, 1]


@pytest.mark.parametrize("name", ["allgather", "gtopk", "oktopk", "hitopk", "hioktopk"])
def test_a_report_counts_what_this_rank_selected_and_what_all_applied(name):
    def body(comm):
        options = {"selector": "mstopk", "density": 0.05}
        reducer = make_reducer(name, Topology(comm, ranks_per_node=2), 400, **options)
        gradient = np.zeros(400, np.float32)
        gradient[comm.rank :: 4] = 1 + np.arange(100)  # no rank has an entry where another has one
        mean = reducer.reduce(gradient)
        return reducer.last.selected, reducer.last.applied, np.count_nonzero(mean)

    # of 400 entries, or of a shard of 200
    k = 10 if name in ("hitopk", "hioktopk") else 20
    for selected, applied, nonzero in simulated.run(body, 4):
        assert selected == k
        assert applied == nonzero
        assert nonzero == (20 if name in ("gtopk", "oktopk", "hioktopk") else 4 * k)


@pytest.mark.parametrize("nodes", [2, 3, 7])
def test_hitopk_adds_up_the_entries_of_every_node(nodes):
    layout = [range(4 * node, 4 * node + 4) for node in range(nodes)]
    step = Step(layout, 40_000, reducer_options("hitopk") | {"density": 0.01}, Network())
    assert REDUCERS["hitopk"].cost.hierarchical().work(step).entry == pytest.approx(nodes * 100)
