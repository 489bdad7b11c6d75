"""ExDyna, SparDL, ARC-Top-K and PowerSGD: what distinguishes them; options that any reducer refuses."""

import numpy as np
import pytest

from commlib import InvalidArgument, Topology, bytes_sent, make_reducer
from commlib.exchange import BucketExchange, check_config
from commlib.transport import simulated

SIZE = 1000
ALL = {"selector": "all", "density": 1.0}


def drawn(rank, step=0, size=SIZE):
    return np.random.default_rng([rank, step]).standard_t(3, size).astype(np.float32)


def reduced(name, gradient, ranks=4, steps=1, size=SIZE, ranks_per_node=1, **options):
    """The means of each step on rank 0, and the residuals of all ranks."""

    def body(comm):
        reducer = make_reducer(name, Topology(comm, ranks_per_node=ranks_per_node), size, **options)
        means = [reducer.reduce(gradient(comm.rank, step)).copy() for step in range(steps)]
        return means, reducer.residual, reducer.last

    means, residuals, reports = zip(*simulated.run(body, ranks), strict=True)
    return means[0], residuals, reports


def test_exdyna_sends_the_values_of_all_ranks_at_what_one_selected_in_its_own_partition():
    means, residuals, reports = reduced("exdyna", drawn, density=0.04)
    (applied,) = np.nonzero(means[0])
    # the mean of the thresholds of four partitions: about as many as wanted
    assert 20 <= len(applied) <= 80
    assert sum(report.selected for report in reports) == len(applied)
    total = np.sum([drawn(rank) for rank in range(4)], axis=0, dtype=np.float64)
    np.testing.assert_allclose(4 * means[0][applied], total[applied], rtol=1e-5)
    for rank, residual in enumerate(residuals):
        assert not residual[applied].any()
        kept = np.delete(np.arange(SIZE), applied)
        np.testing.assert_array_equal(residual[kept], drawn(rank)[kept])
        quarter = np.arange(250 * rank, 250 * (rank + 1))  # its partition in the first step
        selected = np.intersect1d(applied, quarter)
        left = np.setdiff1d(quarter, applied)
        assert np.abs(drawn(rank)[selected]).min() > np.abs(drawn(rank)[left]).max()


def test_exdyna_rotates_its_partitions_so_that_each_rank_selects_everywhere():
    def own_hundred(rank, step):
        gradient = np.zeros(SIZE, np.float32)
        gradient[250 * ((rank + step) % 4) + np.arange(10)] = 1
        return gradient

    means, residuals, _ = reduced("exdyna", own_hundred, steps=4, density=0.04)
    for step, mean in enumerate(means):
        expected = np.sum([own_hundred(rank, step) for rank in range(4)], axis=0) / 4
        np.testing.assert_array_equal(mean, expected)
    assert not np.any(residuals)


def test_exdyna_balances_its_partitions_unless_told_not_to():
    def found(balance):
        def body(comm):
            reducer = make_reducer("exdyna", Topology(comm), 4096, density=0.05, balance=balance)
            weights = np.where(np.arange(4096) < 1024, 4, 1).astype(np.float32)  # one layer is larger
            for step in range(40):
                reducer.reduce(weights * drawn(comm.rank, step, 4096))
            return reducer.state.bounds

        return np.diff(simulated.run(body, 4)[0])

    assert found(balance=False).tolist() == [256] * 4
    balanced = found(balance=True)
    assert balanced[0] < 230
    assert balanced.sum() == 1024


def test_exdyna_sends_twice_as_many_as_wanted_where_far_more_reach_the_threshold():
    def larger_from_step_to_step(rank, step):
        return drawn(rank, step) * np.float32(1000**step)

    means, residuals, _ = reduced("exdyna", larger_from_step_to_step, steps=3, density=0.04)
    assert np.count_nonzero(means[1]) == 80  # nearly all entries reached the threshold of the step before
    assert np.count_nonzero(means[2]) <= 80
    given = np.sum([larger_from_step_to_step(rank, step) for rank in range(4) for step in range(3)], axis=0)
    np.testing.assert_allclose(
        4 * np.sum(means, axis=0) + np.sum(residuals, axis=0), given, rtol=1e-4, atol=1
    )


@pytest.mark.parametrize("count", [2, 5, 8])
def test_spardl_applies_the_same_share_of_each_block(count):
    means, _, _ = reduced("spardl", drawn, count, density=0.04)
    bounds = [SIZE * block // count for block in range(count + 1)]
    counts = [np.count_nonzero(part) for part in np.split(means[0], bounds[1:-1])]
    assert counts == [-(-40 // count)] * count


def test_spardl_keeps_with_each_rank_what_it_held_where_nothing_was_applied():
    means, residuals, _ = reduced("spardl", drawn, 5, density=0.04)
    unapplied = means[0] == 0
    for rank, residual in enumerate(residuals):
        np.testing.assert_array_equal(residual[unapplied], drawn(rank)[unapplied])
    given = np.sum([drawn(rank) for rank in range(5)], axis=0, dtype=np.float64)
    np.testing.assert_allclose(5 * means[0] + np.sum(residuals, axis=0), given, atol=1e-5)


def test_spardl_reuses_the_threshold_of_each_block_for_that_block_until_its_density_changes():
    def body(comm):
        options = {"density": 0.04, "selector": "reused", "decay": 0.01}  # a residual would raise the counts
        reducer = make_reducer("spardl", Topology(comm), 8000, **options)
        scales = np.repeat(np.float32([1, 10, 100, 1000]), 2000)
        states = []
        for step in range(2):
            reducer.reduce(scales * drawn(comm.rank, step, 8000))
            states.append(reducer.state_dict()["selectors"])
        with pytest.raises(InvalidArgument, match="^state: expected one of 4 selectors, got another$"):
            reducer.load_state_dict({**reducer.state_dict(), "selectors": [{}]})
        reducer.set_density(0.08)
        return [*states, reducer.state_dict()["selectors"]]

    for first, second, changed in simulated.run(body, 4):
        thresholds = np.array([state["threshold"] for state in first], np.uint32).view(np.float32)
        assert (thresholds[1:] > 3 * thresholds[:-1]).all()
        assert [state["calls"] for state in second] == [2] * 4
        assert [state["threshold"] for state in second] == [state["threshold"] for state in first]
        assert changed == [{"calls": 0, "threshold": 0}] * 4


@pytest.mark.parametrize("teams", [2, 3, 6])
def test_teams_of_spardl_agree_and_lose_nothing_in_fewer_rounds(teams):
    steps = 6
    means, residuals, _ = reduced("spardl", drawn, 6, steps=steps, density=0.04, teams=teams)
    given = np.sum([drawn(rank, step) for rank in range(6) for step in range(steps)], axis=0, dtype=float)
    np.testing.assert_allclose(6 * np.sum(means, axis=0) + np.sum(residuals, axis=0), given, atol=1e-4)
    for mean in means:
        assert 40 / teams <= np.count_nonzero(mean) <= 42


def test_teams_of_spardl_that_hold_the_same_entries_take_more_of_them():
    means, _, _ = reduced("spardl", lambda rank, step: drawn(0, step), 8, steps=8, density=0.016, teams=4)
    assert np.count_nonzero(means[0]) == 2 * 2  # of each of two blocks a quarter of its eight entries
    assert np.count_nonzero(means[-1]) == 2 * 8


def test_teams_of_spardl_divide_the_nodes_and_a_rank_without_a_shard_has_none():
    def body(comm):
        topology = Topology(comm, ranks_per_node=[3, 2])
        config = check_config({"name": "spardl", "hierarchical": True, "teams": 2}, topology)
        reducer = make_reducer(config.pop("name"), topology, SIZE, **config)
        return reducer.reduce(drawn(comm.rank)).copy(), reducer.residual

    means, residuals = zip(*simulated.run(body, 5), strict=True)
    given = np.sum([drawn(rank) for rank in range(5)], axis=0, dtype=np.float64)
    for mean in means:
        np.testing.assert_allclose(5 * mean + np.sum(residuals, axis=0), given, atol=1e-5)
    assert check_config({"name": "spardl", "teams": 2})  # on one rank there is nothing to divide


def test_arctopk_picks_the_rows_of_the_sum_with_the_largest_norms():
    def two_rows(rank, step):
        gradient = 0.01 * drawn(rank, step)
        gradient[160:176] += 1  # row 10, of all ranks
        gradient[320:336] += 5 * (-1) ** rank  # row 20, where they cancel each other out
        return gradient

    means, residuals, _ = reduced("arctopk", two_rows, row=16, sketch=8, density=0.01)
    (applied,) = np.nonzero(means[0])
    assert applied.tolist() == list(range(160, 176))
    for rank, residual in enumerate(residuals):
        assert not residual[applied].any()
        np.testing.assert_array_equal(residual[320:336], two_rows(rank, 0)[320:336])


def test_arctopk_sends_rows_without_indices():
    sent = bytes_sent("arctopk", [[0], [1]], 0, 10_240, density=0.1)
    # two rounds of a ring, half of it each: 20 rows of 4 values sketched, 2 rows of 512 values sent
    assert sent.inter == 4 * (20 * 4 + 2 * 512)


def low_rank(rank, step):
    """A matrix of 20 × 50 of rank two, of which each rank has a part."""
    factors = np.random.default_rng(7)
    left, right = factors.standard_normal((20, 2)), factors.standard_normal((2, 50))
    noise = np.random.default_rng([step, rank]).standard_normal(1000)
    others = np.random.default_rng([step, 1 - rank]).standard_normal(1000)
    return ((left @ right).ravel() + noise - others).astype(np.float32)


def test_powersgd_finds_a_sum_of_low_rank_exactly_and_keeps_the_rest():
    means, residuals, _ = reduced("powersgd", low_rank, 2, matrix_rank=2, shapes=[(20, 50)])
    expected = np.mean([low_rank(rank, 0) for rank in range(2)], axis=0)
    np.testing.assert_allclose(means[0], expected, atol=1e-4)
    for rank, residual in enumerate(residuals):
        np.testing.assert_allclose(residual, low_rank(rank, 0) - means[0], atol=1e-6)


def test_powersgd_sends_vectors_and_small_matrices_whole():
    shapes = [(30, 30), (70,), (5, 6)]
    means, residuals, _ = reduced("powersgd", drawn, matrix_rank=3, shapes=shapes)
    expected = np.mean([drawn(rank) for rank in range(4)], axis=0)
    np.testing.assert_allclose(means[0][900:], expected[900:], rtol=1e-5, atol=1e-6)
    assert all(not residual[900:].any() and residual[:900].any() for residual in residuals)


def test_powersgd_goes_on_after_a_gradient_of_zeros():
    def zero_first(rank, step):
        return low_rank(rank, step) * (step > 0)

    means, _, _ = reduced("powersgd", zero_first, 2, steps=3, matrix_rank=2, shapes=[(20, 50)])
    assert not means[0].any()
    np.testing.assert_allclose(means[1], np.mean([low_rank(rank, 1) for rank in range(2)], axis=0), atol=1e-4)


def test_powersgd_skips_a_step_in_which_only_the_right_factors_overflow():
    def column(rank, step):
        gradient = np.zeros((100, 10), np.float32)
        gradient[:, 1] = 1e37  # its norm on 4 ranks is 4e38; the left factors are 0.12 of the entries
        return gradient.ravel()

    means, residuals, _ = reduced("powersgd", column, matrix_rank=1, shapes=[(100, 10)])
    assert np.isnan(means[0]).all()
    assert not np.any(residuals)


def test_frameworks_give_shapes_to_reducers_that_take_them():
    def body(comm):
        shapes = [[(20, 50)], [(10, 10), (7,)]]
        config = {"name": "powersgd", "matrix_rank": 2}
        with BucketExchange(Topology(comm), [1000, 107], config, shapes=shapes) as exchange:
            return [reducer.options.shapes for reducer in exchange.reducers]

    assert simulated.run(body, 2)[0] == [[(20, 50)], [(10, 10), (7,)]]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("spardl", {"teams": 3}, "teams: expected a divisor of the 4 ranks, got 3"),
        ("spardl", ALL, "selector: expected one that selects k entries, got 'all'"),
        ("exdyna", {"indices": "fp16"}, "whose values can be added up, got 'fp16'"),
        ("arctopk", {"row": 4}, "sketch: expected a whole number from 1 to 3, which is less than a row of 4"),
        ("arctopk", {"sketch": 0}, "sketch: expected a whole number from 1 to 511"),
        ("powersgd", {"matrix_rank": 51, "shapes": [(20, 50)]}, "from 1 to 50, the longest side of a matrix"),
        ("powersgd", {"matrix_rank": 0}, "matrix_rank: expected a whole number from 1, got 0"),
        ("powersgd", {"shapes": [(3, 3)]}, "shapes: expected shapes of 1000 entries together"),
        ("powersgd", {"shapes": 3}, "shapes: expected a list of shapes, got 3"),
        ("powersgd", {"shapes": ["x"]}, "shapes: expected a list of shapes, got ['x']"),
        ("arctopk", {"row": "8"}, "row: expected a whole number from 1, got '8'"),
        ("exdyna", {"balance": "no"}, "balance: expected true or false, got 'no'"),
        ("torus2d", {"values": []}, "values: expected one of fp32, fp16, "),
        ("dsar_split", {"sums": {}}, "sums: expected one of fp32, fp16, "),
        ("gtopk", {"hierarchical": 1}, "hierarchical: expected true or false, got 1"),
        ("oktopk", {"repartition_every": 0}, "repartition_every: expected a whole number of steps from 1"),
        ("oktopk", {"reevaluate_every": -1}, "reevaluate_every: expected a whole number of steps from 1"),
        ("oktopk", {"leftovers": "nobody"}, "leftovers: expected sender or owner, got 'nobody'"),
        ("allgather", {"selector": "all"}, "density: expected 1.0 with selector all, got 0.01"),
        ("allgather", {**ALL, "decay": 0.5}, "decay: expected 1.0 with selector all, which keeps no"),
        ("ssar_split", {**ALL, "wire": "gap+fp16"}, "wire: expected one without loss with selector all, got"),
        ("dsar_split", {**ALL, "sums": "qsgd4"}, "sums: expected one without loss with selector all"),
        ("exdyna", {"density": 0}, "density: expected a number in (0, 1], got 0"),
    ],
)
def test_options_that_cannot_be_are_one_line(name, options, message):
    def body(comm):
        with pytest.raises(InvalidArgument) as caught:
            make_reducer(name, Topology(comm, ranks_per_node=1), SIZE, **options)
        return str(caught.value)

    found = simulated.run(body, 4)[0]
    assert message in found
    assert "\n" not in found
