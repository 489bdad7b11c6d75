"""Gradients that are sparse from birth: a ``SparseVector`` given to a reducer, and its mean.

The selector ``all`` sends every entry and keeps no residual. With any other selector the mean and the
residual are to the bit those of the same gradient given as a dense vector.
"""

import numpy as np
import pytest

from benchmarks.memory import Meter, MeteredCommunicator, traced
from commlib import (
    REDUCERS,
    BucketExchange,
    InvalidArgument,
    SparseVector,
    Topology,
    bytes_sent,
    make_reducer,
)
from commlib.transport import simulated
from commlib.vectors import delta, index_dtype
from tests.extent import more

ALL = {"selector": "all", "density": 1.0}
SPLIT = ["ssar_split", "dsar_split", "oktopk"]
OF_SHARDS = ["hitopk", "hioktopk"]
SENDS_ALL = ["allgather", "gtopk", "ssar_doubling", *SPLIT, *OF_SHARDS]
STAYS_SPARSE = [name for name in SENDS_ALL if name != "dsar_split"]  # whose second half is dense
SELECTED = {
    **{name: (name, {"density": 0.02} if reducer.sparse else {}) for name, reducer in REDUCERS.items()},
    "allgather-reused": ("allgather", {"density": 0.02, "selector": "reused"}),
    "allgather-bucketed": ("allgather", {"density": 0.02, "selector": "bucketed"}),
    "ssar_split-gap+fp16": ("ssar_split", {"density": 0.02, "wire": "gap+fp16"}),
    "dsar_split-qsgd4": ("dsar_split", {"density": 0.02, "sums": "qsgd4"}),
    "oktopk-owner": ("oktopk", {"density": 0.02, "leftovers": "owner", "reevaluate_every": 2}),
    "oktopk-corrected": (
        "oktopk",
        {"density": 0.02, "wrappers": [{"name": "momentum_correction", "momentum": 0.5}]},
    ),
}
LAYOUTS = [[1], [3, 2], *more([1, 1], [2, 1], [4, 4], [7], [1] * 6, [5, 4, 3])]
SHARES = [0.03, 0.8]  # of the entries: few, and more than a sparse message is shorter for
STEPS = 4


def entries(size: int, share: float, rank: int, step: int) -> SparseVector:
    """About ``share·size`` entries, heavy tailed; a third of the places are the same on all ranks."""
    own, shared = np.random.default_rng([size, rank, step]), np.random.default_rng([size, step])
    is_given = np.where(shared.random(size) < 1 / 3, shared.random(size), own.random(size)) < share
    indices = np.flatnonzero(is_given).astype(index_dtype(size))
    return SparseVector(size, indices, own.standard_t(2, len(indices)).astype(np.float32))


def bits(vector: SparseVector) -> bytes:
    return vector.to_dense().tobytes()


def on(layout, body):
    return simulated.run(body, sum(layout), layout)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("size", [1, 6, 1009])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", SENDS_ALL)
def test_all_that_is_given_is_in_the_mean(name, layout, size, share):
    ranks = range(sum(layout))

    def body(comm):
        topology = Topology(comm)
        reducer, twin = (make_reducer(name, topology, size, **ALL) for _ in range(2))
        means = []
        for step in range(STEPS):
            given = entries(size, share, comm.rank, step)
            before = given.indices.copy(), given.values.copy()
            means.append(reducer.reduce(given))
            of_dense = twin.reduce(given.to_dense())
            # the regions of oktopk's, and who adds first, follow from the indices
            if "oktopk" not in name or share < 0.5:
                assert bits(means[-1]) == of_dense.tobytes()
            assert np.array_equal(given.indices, before[0])
            assert np.array_equal(given.values, before[1])
            assert reducer.last.finite
            assert reducer.last.selected == given.nnz or name in OF_SHARDS
            most = max(entries(size, share, rank, step).nnz for rank in ranks)
            is_summed = name in ("gtopk", *OF_SHARDS)  # what travels are sums, which cut nothing
            density = 1.0 if is_summed else max(most, 1) / size
            formula = bytes_sent(name, topology.nodes, comm.rank, size, density=density, selector="all")
            assert reducer.last.traffic.sent.inter <= formula.inter
            assert reducer.last.traffic.sent.intra <= formula.intra
        assert not reducer.residual.any()
        return [mean.to_dense() for mean in means]  # all of them are still what they were

    seen = on(layout, body)
    for step in range(STEPS):
        assert len({means[step].tobytes() for means in seen}) == 1
        given = np.array([entries(size, share, rank, step).to_dense() for rank in ranks], np.float64)
        # one rounding a term and one of the division
        tolerance = (len(ranks) + 1) * 2.0**-23 * np.abs(given).mean(axis=0) + 1e-45
        assert (np.abs(seen[0][step] - given.mean(axis=0)) <= tolerance).all()


@pytest.mark.parametrize("layout", [[1], [2, 1], *more([2, 2], [3, 2])], ids=str)
@pytest.mark.parametrize("case", SELECTED)
def test_what_selects_does_to_the_bit_what_it_does_with_the_dense_vector(case, layout):
    name, options = SELECTED[case]

    def body(comm):
        reducer, twin = (make_reducer(name, Topology(comm), 1009, **options) for _ in range(2))
        same = []
        for step in range(STEPS):
            given = entries(1009, SHARES[step % 2], comm.rank, step)
            mean = reducer.reduce(given)
            same.append(bits(mean) == twin.reduce(given.to_dense()).tobytes())
            same.append(reducer.residual.tobytes() == twin.residual.tobytes())
            same.append(reducer.last.traffic.sent == twin.last.traffic.sent)
        return all(same), any(reducer.residual)

    seen = on(layout, body)
    assert all(same for same, _ in seen)
    has_residual = REDUCERS[name].sparse and sum(layout) > 1
    assert any(is_left for _, is_left in seen) == has_residual


@pytest.mark.parametrize("name", STAYS_SPARSE)
def test_the_mean_of_few_entries_is_sparse_and_its_arrays_are_the_callers(name):
    def body(comm):
        reducer = make_reducer(name, Topology(comm), 1009, **ALL)
        means = [reducer.reduce(entries(1009, 0.03, comm.rank, step)) for step in range(STEPS)]
        before = [bits(mean) for mean in means]
        for mean in means[1:]:
            mean.values[...] = 7  # the first one, and later steps, are none of its business
        again = make_reducer(name, Topology(comm), 1009, **ALL)
        later = reducer.reduce(entries(1009, 0.03, comm.rank, 9))
        expected = again.reduce(entries(1009, 0.03, comm.rank, 9))
        assert not any(mean.is_dense for mean in means)
        assert all(mean.nnz < delta(1009) for mean in means)
        return bits(means[0]) == before[0] and bits(later) == bits(expected)

    assert all(simulated.run(body, 3))


@pytest.mark.parametrize("name", SENDS_ALL)
def test_ranks_without_entries_take_part(name):
    def body(comm):
        reducer = make_reducer(name, Topology(comm, ranks_per_node=2), 100, **ALL)
        nothing = SparseVector.empty(100)
        of_none = reducer.reduce(nothing)
        one = SparseVector.from_pairs(100, [99], [6.0]) if comm.rank == 1 else nothing
        of_one = reducer.reduce(one)
        return bits(of_none), np.flatnonzero(of_one.to_dense()).tolist(), of_one.to_dense()[99]

    zeros = np.zeros(100, np.float32).tobytes()
    assert simulated.run(body, 3) == [(zeros, [99], 2.0)] * 3


@pytest.mark.parametrize("options", [ALL, {"density": 0.1}], ids=["all", "selected"])
@pytest.mark.parametrize("name", SENDS_ALL)
@pytest.mark.parametrize("bad", [np.nan, -np.inf], ids=str)
def test_a_bad_number_skips_the_step_on_every_rank(name, options, bad):
    def body(comm):
        reducer, twin = (make_reducer(name, Topology(comm), 100, **options) for _ in range(2))
        first, second = (entries(100, 0.3, comm.rank, step) for step in range(2))
        reducer.reduce(first)
        twin.reduce(first)
        values = second.values.copy()
        if comm.rank == 1:
            values[3] = bad
        skipped = reducer.reduce(SparseVector(100, second.indices, values))
        was_finite = reducer.last.finite
        same = reducer.residual.tobytes() == twin.residual.tobytes()
        return was_finite, skipped.is_finite, same, bits(reducer.reduce(second)) == bits(twin.reduce(second))

    assert simulated.run(body, 3) == [(False, False, True, True)] * 3


@pytest.mark.parametrize("name", STAYS_SPARSE)
def test_tables_past_what_32_bits_address(name):
    size = 5 * 2**31 + 3

    def body(comm):
        reducer = make_reducer(name, Topology(comm, ranks_per_node=2), size, wire="gap", **ALL)
        places = [comm.rank, 2**31 - 1, 2**31, 3 * 2**31 + comm.rank, size - 1]
        mean = reducer.reduce(SparseVector.from_pairs(size, places, np.arange(1, 6)))
        return mean.indices.dtype, mean.indices.tolist(), (3 * mean.values).tolist()

    places = [0, 1, 2, 2**31 - 1, 2**31, 3 * 2**31, 3 * 2**31 + 1, 3 * 2**31 + 2, size - 1]
    sums = [1.0, 1.0, 1.0, 6.0, 9.0, 4.0, 4.0, 4.0, 15.0]
    for dtype, indices, values in simulated.run(body, 3):
        assert dtype == np.int64
        assert indices == places
        np.testing.assert_allclose(values, sums, rtol=1e-6)


TABLE, GIVEN = 20_000_000, 1_000


def given_in_a_table(rank: int) -> SparseVector:
    rng = np.random.default_rng(rank)
    return SparseVector.from_pairs(TABLE, rng.integers(0, TABLE, GIVEN), rng.standard_normal(GIVEN))


def peaks_of(name, options, body, ranks=4):
    """Return the most bytes that ``body(reducer, given, restart)`` allocates on a rank, and the reducer."""

    def metered(comm):
        given, meter = given_in_a_table(comm.rank), Meter()
        topology = Topology(MeteredCommunicator(comm, meter), ranks_per_node=2)
        reducer = make_reducer(name, topology, TABLE, **options)
        body(reducer, given, meter.restart)
        with meter.pause():
            return meter.peak

    with traced():
        return max(simulated.run(metered, ranks))


@pytest.mark.parametrize("name", STAYS_SPARSE)
def test_no_array_of_the_tables_length_is_made_where_all_is_sent(name):
    def three_steps(reducer, given, restart):
        for _ in range(3):
            assert GIVEN < reducer.reduce(given).nnz <= 4 * GIVEN

    # a few messages and sums of 4 · 1,000 entries of 8 bytes; a vector of one byte an entry has 20 MB
    assert peaks_of(name, ALL, three_steps) < TABLE / 20


def test_the_dense_second_half_of_dsar_split_is_one_vector():
    assert peaks_of("dsar_split", ALL, lambda reducer, given, restart: reducer.reduce(given)) < 4.2 * TABLE


@pytest.mark.parametrize("name", ["allgather", "ssar_split", "oktopk"])
def test_what_selects_makes_no_dense_copy_of_the_gradient(name):
    def second_step(reducer, given, restart):
        reducer.reduce(given)
        restart()
        assert reducer.reduce(given).nnz <= 4 * GIVEN

    # the largest of every 64 entries; what was selected
    options = {"density": GIVEN / TABLE}
    assert peaks_of(name, options, second_step) < 4 * TABLE / 20


@pytest.mark.parametrize("options", [ALL, {"density": 0.1}], ids=["all", "selected"])
@pytest.mark.parametrize("name", SENDS_ALL)
def test_the_residual_of_a_predecessor_is_flushed_once_whichever_ranks_have_one(name, options):
    def body(comm):
        reducer, twin = (make_reducer(name, Topology(comm), 100, **options) for _ in range(2))
        if comm.rank == 1:
            for each in (reducer, twin):
                each.add_residual(np.arange(100, dtype=np.float32))
        same = []
        for step in range(2):
            given = entries(100, 0.1, comm.rank, step)
            same.append(bits(reducer.reduce(given)) == twin.reduce(given.to_dense()).tobytes())
        return same

    assert simulated.run(body, 3) == [[True, True]] * 3


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("overlap", [False, True], ids=["inline", "overlapped"])
def test_an_exchange_takes_dense_gradients_and_sparse_ones_in_one_step(world_size, overlap):
    sizes, config = [10, 500, 499], {"name": "allgather", "density": 0.02}

    def body(comm):
        topology, same = Topology(comm), []
        exchange, twin = (
            BucketExchange(topology, sizes, config, tables=[1], overlap=each) for each in (overlap, False)
        )
        with exchange:
            for step in range(STEPS):
                own = [entries(size, 0.1, comm.rank, step) for size in sizes]
                if step == 2 and comm.rank == comm.size - 1:
                    own[0] = SparseVector(10, None, np.full(10, np.nan, np.float32))
                for bucket, each in enumerate(own):
                    exchange.submit(bucket, each if bucket == 1 else each.to_dense())
                    twin.submit(bucket, each.to_dense())
                mean, of_tables, report = exchange.wait_sparse()
                expected, _ = twin.wait()
                table = exchange.slices[1]
                assert list(of_tables) == [1]
                mean[table] = of_tables[1].to_dense()
                if step == 2:
                    same.append(
                        not report.finite and not of_tables[1].is_finite and np.isnan(mean[:10]).all()
                    )
                else:
                    same.append(mean.tobytes() == expected.tobytes())
            return same, exchange.residual.tobytes() == twin.residual.tobytes()

    assert simulated.run(body, world_size) == [([True] * STEPS, True)] * world_size


def test_what_is_no_gradient_of_the_reducer_is_refused_and_changes_nothing():
    def body(comm):
        reducer = make_reducer("ssar_split", Topology(comm), 100, **ALL)
        with pytest.raises(InvalidArgument, match="^gradient: expected a SparseVector of size 100"):
            reducer.reduce(SparseVector.empty(99))
        with pytest.raises(InvalidArgument, match="^out: the mean of a SparseVector is one"):
            reducer.reduce(SparseVector.empty(100), np.empty(100, np.float32))
        with pytest.raises(InvalidArgument, match="^density: expected 1.0 with selector all, got 0.5"):
            reducer.set_density(0.5)
        return reducer.density, reducer.steps

    assert simulated.run(body, 2) == [(1.0, 0)] * 2
