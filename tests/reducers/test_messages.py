"""What algorithms say to each other: entries that are evened out, and who keeps what a codec rounds away."""

import numpy as np
import pytest

from commlib import REDUCERS, Network, Topology, make_reducer
from commlib.cost import Step
from commlib.reducers import reducer_options
from commlib.reducers.messages import even_out
from commlib.transport import simulated


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
