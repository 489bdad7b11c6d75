"""Defects that were found in reference implementations: one test each, which fails where the defect is.

Each docstring names the implementation and what went wrong there. What is a selector's or a codec's own
affair is tested beside them (tests/selection, tests/wire); here is what reaches a reducer, a vector or a
transport.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from commlib import (
    CODECS,
    REDUCERS,
    SELECTORS,
    InvalidArgument,
    SparseVector,
    Topology,
    bytes_sent,
    make_reducer,
)
from commlib.reducers import reducer_options
from commlib.transport import Request, simulated
from commlib.vectors import concatenate, index_dtype, partition, sum_sparse
from commlib.wire import make_codec
from tests.extent import more

SPARSE = [name for name, reducer in REDUCERS.items() if reducer.sparse]
BEYOND_FLOAT32 = 2**24 + 1  # the first whole number that no float32 is


def sparse(size: int, entries: Mapping[int, float]) -> SparseVector:
    indices = np.array(sorted(entries), index_dtype(size))
    return SparseVector(size, indices, np.array([entries[index] for index in sorted(entries)], np.float32))


def dense(size: int, entries: Mapping[int, float]) -> np.ndarray:
    return sparse(size, entries).to_dense()


def entries_of(vector: SparseVector, at: int = 0) -> dict[int, float]:
    indices = [at + int(index) for index in vector.indices]
    return dict(zip(indices, vector.values.tolist(), strict=True))


def non_zeros(vector: np.ndarray) -> dict[int, float]:
    return {int(index): float(vector[index]) for index in np.flatnonzero(vector)}


def with_density(name: str, density: float) -> dict[str, float]:
    return {"density": density} if REDUCERS[name].sparse else {}


def train(comm, name, size, gradients, ranks_per_node=1, **options):
    """Reduce the gradients; return the reducer and the means."""
    reducer = make_reducer(name, Topology(comm, ranks_per_node=ranks_per_node), size=size, **options)
    return reducer, [reducer.reduce(gradient) for gradient in gradients]


def reduce_once(name, gradients, ranks_per_node=1, **options):
    """Reduce one gradient a rank; return the mean, and all ranks' residuals and reports."""

    def body(comm):
        gradient = gradients[comm.rank]
        reducer, (mean,) = train(comm, name, len(gradient), [gradient], ranks_per_node, **options)
        return mean, reducer.residual, reducer.last

    means, residuals, reports = zip(*simulated.run(body, len(gradients)), strict=True)
    assert len({mean.tobytes() for mean in means}) == 1
    return means[0], residuals, reports


def heavy_tailed(size: int, *seed: int) -> np.ndarray:
    return np.random.default_rng([size, *seed]).standard_t(3, size).astype(np.float32)


# ------------------------------------------------------------- Ok-Topk


@pytest.mark.parametrize("name", ["oktopk", "hitopk"])
def test_an_index_that_no_float32_can_hold_comes_back_exactly(name):
    """Ok-Topk C-K1: indices sent as float32 are wrong from 2²⁴ on.

    Both entries lie so that Ok-Topk's first region is longer than 2²⁴, and the first of them in it.
    """
    size = BEYOND_FLOAT32 + 2
    places = {BEYOND_FLOAT32: 2.0, BEYOND_FLOAT32 + 1: -4.0}

    def body(comm):
        gradient = np.zeros(size, np.float32)
        gradient[list(places)] = list(places.values())
        _, (mean,) = train(comm, name, size, [gradient], density=2 / size)
        return non_zeros(mean)

    assert simulated.run(body, 2) == [places] * 2


FAR = 2**33  # 32 GiB of float32: nothing of this size is allocated below
FAR_ENTRIES = [
    {5: -2.0, 2**31 + 7: 7.0, 2**32 + 1: 3.0},
    {5: -4.0, 2**31 + 8: 1.0, 2**32 + 1: 4.0},
    {2**32 + 1: 5.0, 2**33 - 2: 2.0, 2**33 - 1: 9.0},
]
FAR_SUMS = {5: -6.0, 2**31 + 7: 7.0, 2**31 + 8: 1.0, 2**32 + 1: 12.0, 2**33 - 2: 2.0, 2**33 - 1: 9.0}


def lengthened(comm, name, size, **options):
    """A reducer that combines vectors of ``size`` entries, without the residual that would not fit."""
    reducer = make_reducer(name, Topology(comm, ranks_per_node=1), size=6, density=0.5, **options)
    bounds = partition(size, comm.size)
    reducer.length, reducer._ranges = size, list(pairwise(map(int, bounds)))
    if name == "oktopk":
        reducer.state = replace(reducer.state, regions=bounds)
    return reducer


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("allgather", {}),
        ("gtopk", {}),
        ("ssar_doubling", {}),
        ("ssar_split", {}),
        ("oktopk", {"leftovers": "sender"}),
        ("oktopk", {"leftovers": "owner"}),
        ("oktopk", {"leftovers": "sender", "wire": "fp16"}),
    ],
    ids=str,
)
def test_indices_past_32_bits_are_combined_and_dropped_where_they_belong(name, options):
    """SparCML C-S5, OmniReduce C-O1: 32-bit dimensions, counts and indices."""

    def body(comm):
        reducer, dropped = lengthened(comm, name, FAR, **options), []
        reducer.drop = lambda vector, at=0: dropped.append(entries_of(vector, at))
        reducer.take_off = lambda vector, at=0: dropped.append(entries_of(vector.divided_by(-1), at))
        combined = reducer._combine(sparse(FAR, FAR_ENTRIES[comm.rank]), finite=True)
        return entries_of(combined), dropped

    seen = simulated.run(body, 3)
    combined = seen[0][0]
    assert all(each == combined for each, _ in seen)
    if name in ("gtopk", "oktopk"):  # the three largest sums
        assert combined == {index: FAR_SUMS[index] for index in (2**31 + 7, 2**32 + 1, 2**33 - 1)}
    else:
        assert combined == FAR_SUMS
    kept = dict.fromkeys(FAR_SUMS, 0.0)
    for _, dropped in seen:
        for index, value in (entry for vector in dropped for entry in vector.items()):
            kept[index] += value
    assert {index: combined.get(index, 0) + value for index, value in kept.items()} == FAR_SUMS


def test_vectors_past_32_bits_are_cut_joined_and_sent_without_loss():
    """SparCML C-S5, OmniReduce C-O1: 32-bit dimensions and indices."""
    vector = sparse(FAR, FAR_SUMS)
    bounds = [int(bound) for bound in partition(FAR, 5)]
    assert bounds == [0, 1717986918, 3435973836, 5153960755, 6871947673, FAR]
    parts = [vector.slice(low, high) for low, high in pairwise(bounds)]
    assert [part.indices.dtype for part in parts] == [np.int32] * 5  # each is shorter than 2³¹
    assert [part.indices.tolist() for part in parts] == [
        [5],
        [2**31 + 7 - bounds[1], 2**31 + 8 - bounds[1]],
        [2**32 + 1 - bounds[2]],
        [],
        [2**33 - 2 - bounds[4], 2**33 - 1 - bounds[4]],
    ]
    for name, value_bytes in (("fp32", 4), ("fp16", 2), ("bf16", 2)):
        codec = make_codec(name)
        sent = [codec.decode(codec.encode(part), part.size) for part in parts]
        assert entries_of(concatenate(sent)) == FAR_SUMS
        message = codec.encode(vector)
        assert len(message) == 6 * (8 + value_bytes)
        assert entries_of(codec.decode(message, FAR)) == FAR_SUMS
    assert entries_of(sum_sparse([vector, concatenate(parts)])) == {
        index: 2 * value for index, value in FAR_SUMS.items()
    }
    assert entries_of(vector.top_k(2).without(sparse(FAR, {2**33 - 1: 1.0}))) == {2**32 + 1: 12.0}


def test_the_cost_formulas_count_bytes_past_32_bits():
    """SparCML C-S5: counts of C ints and unsigned dimensions overflow at 2 GiB."""
    nodes = [[0], [1], [2], [3]]
    # 12 bytes an entry: a 64-bit index and a value
    assert bytes_sent("allgather", nodes, 0, FAR, density=0.01).inter == 3 * 12 * 85_899_346
    assert bytes_sent("dense", nodes, 0, FAR).inter == 2 * 3 * 2**31 * 4
    for name in REDUCERS:
        sent = bytes_sent(name, nodes, 0, FAR, **with_density(name, 0.02)).inter
        assert sent > 2**31
        assert isinstance(sent, int)


def test_what_was_applied_is_cleared_in_the_steps_that_find_the_threshold_anew():
    """Ok-Topk C-K2: the intersection of local and global indices is empty, and all is applied twice."""
    size, k = 500, 25
    options = {"density": k / size, "selector": "mstopk", "reevaluate_every": 1, "repartition_every": 1}

    def body(comm):
        reducer = make_reducer("oktopk", Topology(comm, ranks_per_node=1), size=size, **options)
        for step in range(6):
            gradient = heavy_tailed(size, comm.rank, step)
            expected = reducer.residual + gradient
            selected = np.argsort(-np.abs(expected))[:k]
            applied = np.flatnonzero(reducer.reduce(gradient))
            cleared = np.intersect1d(selected, applied)
            assert 0 < len(cleared) < k
            expected[cleared] = 0
            assert reducer.residual.tobytes() == expected.tobytes()

    simulated.run(body, 3)


@pytest.mark.parametrize("name", REDUCERS)
def test_one_rank_alone_applies_its_gradient_and_keeps_nothing(name):
    """Ok-Topk C-K3: world size 1 crashes, as no boundary is left between regions."""
    gradients = [heavy_tailed(100, step) for step in range(3)]

    def body(comm):
        reducer, means = train(comm, name, 100, gradients, **with_density(name, 0.1))
        return [mean.tobytes() for mean in means], reducer.residual.any()

    assert simulated.run(body, 1) == [([gradient.tobytes() for gradient in gradients], False)]


def test_a_stream_of_one_rank_alone_reduces_like_any_other():
    """Ok-Topk C-K3, where it can reach ours: one node, whose streams have a single rank."""
    gradients = [dense(40, {1: 8, 2: 2, 30: 4}), dense(40, {2: -8, 30: 8, 31: 2})]
    # shards 0–19 {1: 8, 2: −6} and 20–39 {30: 12, 31: 2}, one entry of each
    mean, residuals, _ = reduce_once("hioktopk", gradients, ranks_per_node=2, density=0.05)
    assert non_zeros(mean) == {1: 4, 30: 6}
    assert list(map(non_zeros, residuals)) == [{2: -6}, {31: 2}]


@pytest.mark.parametrize("name", SPARSE)
def test_fewer_selected_entries_than_ranks_reduce_to_what_they_are(name):
    """Ok-Topk C-K4: with fewer than P entries all boundaries are equal, with none it stops."""
    gradients = [dense(50, {7 + rank // 4: 8.0}) for rank in range(8)]
    mean, residuals, _ = reduce_once(name, gradients, density=1e-9)
    # Four ranks hold 8 at 7, four at 8. A top-k of the sum keeps one of them, ties by lowest index.
    is_top_k = name in ("gtopk", "oktopk", "hioktopk")
    assert non_zeros(mean) == ({7: 4} if is_top_k else {7: 4, 8: 4})
    assert sum(residuals).sum() == (4 * 8 if is_top_k else 0)


@pytest.mark.parametrize("name", SPARSE)
def test_a_step_without_any_non_zero_is_a_step(name):
    """Ok-Topk C-K4: an all-zero gradient selects nothing, and the lookup of boundaries raises."""

    def body(comm):
        nothing = np.zeros(100, np.float32)
        reducer, means = train(comm, name, 100, [nothing, nothing, np.eye(1, 100, 37, np.float32)[0]])
        return [non_zeros(mean) for mean in means], reducer.last.finite, reducer.residual.any()

    assert simulated.run(body, 5) == [([{}, {}, {37: 1.0}], True, False)] * 5


@pytest.mark.parametrize("name", SPARSE)
def test_tied_magnitudes_still_select_k(name, value=-3.0):
    """Ok-Topk C-K4, MSTopK C-M3: a strict threshold selects none of equal entries, a lax one all of them."""
    mean, residuals, reports = reduce_once(name, [np.full(100, value, np.float32)] * 3, density=0.05)
    assert non_zeros(mean) == dict.fromkeys(range(5), value)  # k = 5, by lowest index
    for residual, report in zip(residuals, reports, strict=True):
        assert report.selected == 5
        assert non_zeros(residual) == dict.fromkeys(range(5, 100), value)


@pytest.mark.parametrize("name", ["gtopk", "oktopk", "hioktopk"])
def test_ties_between_the_ranks_are_cut_off_at_k(name):
    """Ok-Topk C-K4: among sums of equal magnitude, too."""
    gradients = [dense(90, {10 * rank: 3.0, 10 * rank + 1: -3.0}) for rank in range(3)]
    mean, residuals, _ = reduce_once(name, gradients, density=2 / 90)
    assert non_zeros(mean) == {0: 1, 1: -1}
    assert non_zeros(sum(residuals)) == {10: 3, 11: -3, 20: 3, 21: -3}


def test_the_mean_of_boundaries_does_not_overflow():
    """Ok-Topk C-K5: int32 indices are added over ranks before they are divided."""
    size = 2**31 - 1

    def body(comm):
        reducer = lengthened(comm, "oktopk", size)
        held = {size - 1000 + 10 * place + comm.rank: 1.0 for place in range(5)}
        return reducer._repartition(sparse(size, held)).tolist()

    # Rank r's regions begin at its second, third, fourth and fifth entry; the mean of r is 2.
    inner = [size - 1000 + 10 * place + 2 for place in range(1, 5)]
    assert simulated.run(body, 5) == [[0, *inner, size]] * 5


def test_the_boundaries_of_a_vgg_16_on_150_ranks_are_means():
    """Ok-Topk C-K5: 14.7 million parameters times 147 ranks is where int32 ends."""
    size = 14_728_266

    def body(comm):
        reducer = lengthened(comm, "oktopk", size)
        # one entry a region, so that the r-th bound of every rank is its r-th entry
        held = {size - 300 + 2 * region + comm.rank % 2: 1.0 for region in range(comm.size)}
        return reducer._repartition(sparse(size, held)).tolist()

    # Half of the ranks are one beyond: the mean ends in .5 and is rounded down.
    inner = [size - 300 + 2 * region for region in range(1, 150)]
    assert simulated.run(body, 150) == [[0, *inner, size]] * 150


def test_the_first_step_is_sparse_and_any_period_has_thresholds_from_it_on():
    """Ok-Topk C-K6: hundreds of dense steps are hard-coded; with other numbers the thresholds are 0."""
    size, k = 3001, 60

    def body(comm):
        periods = {"reevaluate_every": 5, "repartition_every": 7}
        reducer = make_reducer("oktopk", Topology(comm), size=size, density=k / size, **periods)
        seen = []
        for step in range(16):
            reducer.reduce(heavy_tailed(size, comm.rank, step))
            seen.append((reducer.last.selected, reducer.last.applied, reducer.last.traffic.sent.intra))
        return seen

    for seen in simulated.run(body, 3):
        assert seen[0][:2] == (k, k)
        for selected, applied, sent in seen:
            assert k / 2 <= selected <= 2 * k
            assert k / 2 <= applied <= 2 * k
            assert sent < 4 * size  # a dense all-reduce sends 4/3 of the vector


def test_balancing_sends_the_results_of_a_crowded_region_from_all_ranks():
    """Ok-Topk C-K7: the balancing is commented out, and the owner of the region sends all to everybody."""
    size, k = 800, 40

    def body(comm):
        spread = dense(size, dict.fromkeys(range(0, size, 20), 2.0))
        crowd = dense(size, dict.fromkeys(range(k), 2.0))
        reducer, means = train(comm, "oktopk", size, [spread, crowd], density=k / size)
        assert (means[1] == crowd).all()
        return reducer.last.traffic.sent.inter

    # Eight regions of 100 entries, the thresholds reused. In the second step all ranks but 0 send 40 entries
    # to rank 0; that keeps 5 and hands 35 on; then all send 5 entries to seven others. Unbalanced, rank 0
    # would send 7 · 40 entries and the others none.
    assert simulated.run(body, 8) == [8 * (35 + 7 * 5)] + [8 * (40 + 7 * 5)] * 7


@pytest.mark.parametrize("leftovers", ["sender", "owner"])
def test_the_volume_stays_bounded_while_gradients_grow(leftovers):
    """Ok-Topk C-K8: thresholds drift by up to 3.6 % a step, and nothing bounds what they let through."""
    size, k, steps = 2000, 40, 200

    def body(comm):
        options = {"density": k / size, "leftovers": leftovers, "reevaluate_every": steps}
        topology = Topology(comm, ranks_per_node=1)
        reducer = make_reducer("oktopk", topology, size=size, **options)
        bound = bytes_sent("oktopk", topology.nodes, comm.rank, size, density=k / size).inter
        seen = []
        for step in range(steps):
            reducer.reduce(heavy_tailed(size, comm.rank, step) * np.float32(1.036) ** step)
            last = reducer.last
            seen.append((last.selected, last.applied, last.traffic.sent.inter, bound))
        return seen

    for seen in simulated.run(body, 3):
        for selected, applied, sent, bound in seen:
            assert k / 2 <= selected <= 2 * k
            assert k / 2 <= applied <= 2 * k
            assert sent <= bound
        assert max(sent for _, _, sent, _ in seen) > 0


@pytest.mark.parametrize("name", SPARSE)
def test_an_entry_that_was_not_finite_once_is_sent_when_it_is_finite_again(name, bad=np.inf):
    """Ok-Topk C-K9, gTop-k C-G5, DGC: such an entry passes no threshold, or makes its residual a NaN: frozen.

    The second step reuses thresholds where a reducer has such; the third holds more of them than k.
    """

    def body(comm):
        poisoned = heavy_tailed(100, comm.rank, 1)
        poisoned[37] = bad
        flooded = np.full(100, bad, np.float32)
        gradients = [heavy_tailed(100, comm.rank, 0), poisoned, flooded, dense(100, {37: 1e6})]
        reducer, means = train(comm, name, 100, gradients, density=0.05)
        return [bool(np.isnan(mean).all()) for mean in means], float(means[3][37]), reducer.residual

    for voided, applied, residual in simulated.run(body, 4):
        assert voided == [False, True, True, False]
        assert applied == pytest.approx(1e6, abs=100)  # what the first step left at 37 comes along
        assert np.isfinite(residual).all()


@pytest.mark.parametrize("name", SPARSE)
def test_the_kth_value_is_sent_or_kept_but_neither_lost_nor_doubled(name):
    """Ok-Topk C-K10 (TopkDSA): the residual of k entries is zeroed, and k − 1 pass a strict threshold."""
    values = {10: 9.0, 20: -7.0, 30: 5.0, 40: 3.0, 50: -2.0}
    mean, residuals, _ = reduce_once(name, [dense(60, values)] * 2, density=3 / 60)
    assert non_zeros(mean) == {10: 9, 20: -7, 30: 5}
    assert [non_zeros(residual) for residual in residuals] == [{40: 3, 50: -2}] * 2


@pytest.mark.parametrize("size", [1, 9, *more(2, 7, 8, 15, 83)])
@pytest.mark.parametrize("name", REDUCERS)
def test_sizes_that_eight_ranks_do_not_divide_lose_no_entry(name, size):
    """Ok-Topk C-K11: the remainder of the wrong division goes to the last rank; no entry at all if d < P."""
    gradients = [8 * np.random.default_rng([size, rank]).integers(-99, 99, size) for rank in range(8)]
    expected = sum(gradients) // 8  # whole numbers: exact in float32
    for ranks_per_node in (1, 4):
        mean, residuals, _ = reduce_once(name, gradients, ranks_per_node, **with_density(name, 1.0))
        np.testing.assert_array_equal(mean, expected)
        assert not np.any(residuals)


# Every option that a reducer takes, with the values that lead another way through the code.
OPTION_VALUES = {
    "density": [1e-9, 0.01, 0.3, 1.0],
    "selector": list(SELECTORS),
    "wire": list(CODECS),
    "repartition_every": [1, 2, 100],
    "reevaluate_every": [1, 2, 100],
    "leftovers": ["sender", "owner"],
    "sums": ["fp32", "fp16", "bf16", "qsgd8", "qsgd4", "qsgd2"],
}


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name in REDUCERS for option in reducer_options(name)]
)
def test_every_option_of_every_reducer_survives_its_second_step(name, option):
    """Ok-Topk C-K12: two of its baselines stop at their first or second step."""
    steps = 3
    for value in OPTION_VALUES[option]:

        def body(comm, value=value):
            gradients = [heavy_tailed(200, comm.rank, step) for step in range(steps)]
            options = {"density": 0.05, option: value}
            reducer, means = train(comm, name, 200, gradients, ranks_per_node=2, **options)
            return np.sum(means, axis=0, dtype=np.float64), reducer.residual

        seen = simulated.run(body, 4)
        gradients = [heavy_tailed(200, rank, step) for rank in range(4) for step in range(steps)]
        kept = np.sum([residual for _, residual in seen], axis=0, dtype=np.float64)
        lost = np.abs(4 * seen[0][0] + kept - np.sum(gradients, axis=0, dtype=np.float64))
        # Sums of twelve terms round by half an ulp each, and once more where a codec's error is taken back;
        # a codec's error may be that of a neighbour's size.
        assert lost.max() <= 12 * 2.0**-23 * np.sum(np.abs(gradients), axis=0).max()


class Broken(Exception):
    """What a rank raises in these tests."""


@pytest.mark.parametrize("name", REDUCERS)
def test_a_rank_that_raises_between_steps_ends_the_others(name):
    """Ok-Topk C-K14, gTop-k C-G2: one rank's exception leaves the others waiting for ever."""

    def body(comm):
        reducer, _ = train(comm, name, 100, [heavy_tailed(100, comm.rank)], ranks_per_node=2)
        if comm.rank == 2:
            raise Broken("rank 2 had enough")
        reducer.reduce(heavy_tailed(100, comm.rank, 1))

    with pytest.raises(Broken, match="rank 2 had enough"):
        simulated.run(body, 5)


@pytest.mark.parametrize("name", REDUCERS)
def test_a_gradient_of_the_wrong_shape_on_one_rank_ends_the_others(name):
    """Ok-Topk C-K14."""

    def body(comm):
        train(comm, name, 100, [np.zeros(99 if comm.rank == 1 else 100, np.float32)])

    with pytest.raises(InvalidArgument, match=r"gradient: expected shape \(100,\), got \(99,\)"):
        simulated.run(body, 3)


@pytest.mark.parametrize("name", REDUCERS)
def test_two_reducers_in_one_process_share_nothing(name):
    """Ok-Topk C-K15: residuals are attributes of a class, by parameter name: two models collide."""

    def body(comm):
        topology = Topology(comm, ranks_per_node=2)

        def make():
            return make_reducer(name, topology, size=300, **with_density(name, 0.05))

        def gradient(model, step):
            return (model + 1) * heavy_tailed(300, comm.rank, step, model)

        together, alone = (make(), make()), (make(), make())
        means = [[], []]
        for step in range(3):
            for model in (0, 1):
                means[model].append(together[model].reduce(gradient(model, step)).tobytes())
        for model in (0, 1):
            expected = [alone[model].reduce(gradient(model, step)).tobytes() for step in range(3)]
            assert means[model] == expected
            assert together[model].residual.tobytes() == alone[model].residual.tobytes()

    simulated.run(body, 4)


@pytest.mark.parametrize("name", REDUCERS)
def test_a_saved_state_is_a_copy_and_holds_the_residual(name):
    """Ok-Topk C-K15, DeepSpeed, DeMo: residuals are never saved, or thrown away when they are loaded."""

    def body(comm):
        first, _ = train(comm, name, 300, [heavy_tailed(300, comm.rank)], **with_density(name, 0.05))
        first.add_residual(np.ones(300, np.float32))
        held, state = first.residual, first.state_dict()
        first.reduce(heavy_tailed(300, comm.rank, 1))  # must not change what was saved
        second = make_reducer(name, first.topology, size=300, **with_density(name, 0.05))
        second.load_state_dict(state)
        for step in (2, 3):
            second.reduce(heavy_tailed(300, comm.rank, step))  # nor the use of what was loaded
        third = make_reducer(name, first.topology, size=300, **with_density(name, 0.05))
        third.load_state_dict(state)
        return held.any() and third.residual.tobytes() == held.tobytes() and third.steps == 1

    assert simulated.run(body, 3) == [True] * 3


# ------------------------------------------------------------- gTop-k


@pytest.mark.parametrize("world_size", [4, 8, 16])
def test_gtopk_loses_no_part_of_a_sum_that_was_cut_in_another_branch_of_the_tree(world_size):
    """gTop-k C-G1: 6 %, 17 % and 34 % of what is applied is lost at 4, 8 and 16 ranks.

    Its experiment: Gaussian gradients that correlate by 0.5 between ranks, k = 1 %, one step.
    """
    size = 10_000
    shared = np.random.default_rng(world_size).standard_normal(size)
    gradients = [
        np.float32(0.5**0.5) * (shared + np.random.default_rng([world_size, rank]).standard_normal(size))
        for rank in range(world_size)
    ]
    gradients = [gradient.astype(np.float32) for gradient in gradients]
    mean, residuals, _ = reduce_once("gtopk", gradients, density=0.01)
    applied = world_size * mean.astype(np.float64)
    kept = sum(residual.astype(np.float64) for residual in residuals)
    lost = np.abs(sum(gradient.astype(np.float64) for gradient in gradients) - applied - kept)
    # Each index is added to at most P times; the partial sums, and the quotient, round by half an ulp.
    magnitude = sum(np.abs(gradient) for gradient in gradients)
    assert (lost <= (world_size + 1) * 2.0**-24 * magnitude).all()
    assert lost.sum() <= 1e-6 * np.abs(applied).sum()


@pytest.mark.parametrize("world_size", [3, 5, 6, 7, 11])
def test_gtopk_finds_the_largest_on_any_number_of_ranks(world_size):
    """gTop-k C-G2: where P is no power of two, one rank raises and the rest hang."""
    k = 4
    magnitudes = np.random.default_rng(world_size).permutation(world_size * k) + 1
    # rank r holds the k entries from r·k on: no index twice, so that the tree finds the global top-k
    gradients = [np.zeros(100, np.float32) for _ in range(world_size)]
    for index, magnitude in enumerate(magnitudes.tolist()):
        gradients[index // k][index] = (-1) ** index * magnitude * world_size
    mean, residuals, _ = reduce_once("gtopk", gradients, density=k / 100)
    largest = {
        index: (-1.0) ** index * magnitude
        for index, magnitude in enumerate(magnitudes.tolist())
        if magnitude > world_size * k - k
    }
    assert non_zeros(mean) == largest
    assert (sum(residuals) + world_size * mean == sum(gradients)).all()


def test_an_entry_of_gtopk_takes_eight_bytes():
    """gTop-k C-G3: int64 and float32 were joined to float64, 16 bytes an entry."""
    gradients = [heavy_tailed(1000, rank) for rank in range(4)]
    _, _, reports = reduce_once("gtopk", gradients, density=0.01)
    # Up: 1 → 0, 3 → 2, 2 → 0. Down: 0 → 2, 0 → 1, 2 → 3. Ten entries each.
    assert [report.traffic.sent.inter for report in reports] == [160, 80, 160, 80]
    assert [report.traffic.received.inter for report in reports] == [160, 80, 160, 80]


@pytest.mark.parametrize("name", SPARSE)
def test_fewer_non_zeros_than_k_are_neither_repeated_nor_overwritten(name):
    """gTop-k C-G4: merged entries stay behind as zeros under the same index, and one may be written last."""
    # k = 5: rank 1 fills up with the zeros at 0, 1, 2, 4, where rank 0 holds values, and so on
    gradients = [
        dense(100, {1: 6.0, 2: -6.0}),
        dense(100, {3: 3.0}),
        dense(100, {}),
        dense(100, {1: 3.0, 90: 9.0}),
    ]
    mean, residuals, _ = reduce_once(name, gradients, density=0.05)
    assert non_zeros(mean) == {1: 2.25, 2: -1.5, 3: 0.75, 90: 2.25}
    assert not np.any(residuals)


# ------------------------------------------------------------- SparCML


@pytest.mark.parametrize("scale", [2.0**-60, *more(2.0**-27, 2.0**30)])
@pytest.mark.parametrize("name", REDUCERS)
def test_means_and_residuals_scale_with_the_gradients(name, scale):
    """SparCML C-S2, BytePS: values up to 1e-8 are dropped; residuals are multiplied by rates from a file.

    A power of two multiplies without rounding: everything has to come out multiplied, to the bit.
    """

    def body(comm):
        gradients = [heavy_tailed(200, comm.rank, step) for step in range(3)]
        options = with_density(name, 0.3)  # past δ, too: sparse sums that turn dense
        scaled = [gradient * np.float32(scale) for gradient in gradients]
        reducer, means = train(comm, name, 200, gradients, **options)
        other, scaled_means = train(comm, name, 200, scaled, **options)
        for mean, scaled_mean in zip(means, scaled_means, strict=True):
            assert (mean * np.float32(scale)).tobytes() == scaled_mean.tobytes()
        assert (reducer.residual * np.float32(scale)).tobytes() == other.residual.tobytes()

    simulated.run(body, 3)


@pytest.mark.parametrize("name", REDUCERS)
def test_the_smallest_numbers_there_are_get_through(name):
    """SparCML C-S2."""
    tiny = np.float32(2.0**-149)
    gradients = [tiny * np.arange(rank, 50 + rank, dtype=np.float32) * 2 for rank in range(2)]
    mean, residuals, _ = reduce_once(name, gradients, **with_density(name, 0.2))
    applied = mean != 0
    assert applied.sum() == (10 if REDUCERS[name].sparse else 50)
    # the mean of 2·i and 2·(i + 1) is 2·i + 1
    np.testing.assert_array_equal(mean[applied] / tiny, 2 * np.flatnonzero(applied) + 1)
    np.testing.assert_array_equal(2 * mean + sum(residuals), sum(gradients))


def test_the_entries_of_a_dense_vector_are_those_that_are_not_zero():
    """SparCML C-S2: |v| ≤ 1e-8 is taken for zero when a dense part becomes sparse again."""
    values = {1: 1e-8, 2: -1e-9, 3: 1e-38, 5: 2.0**-149, 7: -(2.0**-149)}
    assert SparseVector.from_dense(dense(20, values)).indices.tolist() == [1, 2, 3, 5, 7]


class WatchedRequest(Request):
    """A request that runs ``check`` when it has been waited for, and counts that."""

    def __init__(self, request, check, started):
        self._request, self._check = request, check
        self._started = started
        self.waits = 0
        started.append(self)

    def wait(self):
        self._request.wait()
        if self.waits == 0:
            self._check()
        self.waits += 1


def watch(comm, started):
    """Make a communicator as unforgiving as MPI may be.

    What is sent must stay as it is until it was waited for; what is received is not there before.
    """

    def watched_send(send):
        def start(array, destination):
            before = array.tobytes()

            def check():
                assert array.tobytes() == before, "changed while it was under way"

            return WatchedRequest(send(array, destination), check, started)

        return start

    def watched_receive(receive):
        def start(array, source):
            arriving = np.empty_like(array)
            request = receive(arriving, source)
            array.reshape(-1).view(np.uint8)[...] = 0xFF  # NaN, or an index of −1

            def fill():
                array[...] = arriving

            return WatchedRequest(request, fill, started)

        return start

    comm.send, comm.send_header = watched_send(comm.send), watched_send(comm.send_header)
    comm.receive, comm.receive_header = watched_receive(comm.receive), watched_receive(comm.receive_header)


@pytest.mark.parametrize("wire", ["fp16", *more("fp32")])
@pytest.mark.parametrize("name", REDUCERS)
def test_every_message_is_waited_for_and_left_alone_until_then(name, wire):
    """SparCML C-S3: requests are never waited for, and their buffers are freed."""
    options = {"density": 0.05, "wire": wire} if REDUCERS[name].sparse else {}

    def body(comm):
        started = []
        topology = Topology(comm, ranks_per_node=2)
        plain = make_reducer(name, topology, size=300, **options)
        gradients = [heavy_tailed(300, comm.rank, step) for step in range(3)]
        expected = [plain.reduce(gradient).tobytes() for gradient in gradients]
        for each in (topology.world, topology.node, topology.stream):
            watch(each, started)
        watched = make_reducer(name, topology, size=300, **options)
        for gradient, mean in zip(gradients, expected, strict=True):
            assert watched.reduce(gradient).tobytes() == mean
            assert {request.waits for request in started} == {1}
        return len(started)

    assert min(simulated.run(body, 5)) > 0


@pytest.mark.parametrize("name", REDUCERS)
def test_two_halves_of_a_world_reduce_on_their_own(name):
    """SparCML C-S5: the communicator of all ranks is hard-coded."""

    def body(comm):
        half = comm.split(comm.rank % 2)
        options = with_density(name, 0.5)
        _, (mean,) = train(half, name, 4, [np.full(4, comm.rank + 1, np.float32)], **options)
        return sorted(non_zeros(mean).values())

    # ranks 0, 2, 4 hold 1, 3, 5; ranks 1, 3 hold 2, 4
    length = 2 if REDUCERS[name].sparse else 4
    assert simulated.run(body, 5) == [[3.0] * length] * 5


# ------------------------------------------------------------- HiTopKComm


@pytest.mark.parametrize("name", SPARSE)
def test_an_index_that_two_nodes_pick_is_added_up(name):
    """HiTopKComm (Espresso) C-H1: the second node's value overwrites the first's."""
    gradients = [
        dense(80, {9: 4.0, 60: 2.0}),
        dense(80, {60: 2.0}),
        dense(80, {9: 8.0}),
        dense(80, {60: 8.0}),
    ]
    mean, residuals, _ = reduce_once(name, gradients, ranks_per_node=2, density=2 / 80)
    assert non_zeros(mean) == {9: 3, 60: 3}
    assert not np.any(residuals)


@pytest.mark.parametrize("size", [1000, 1001, 1002, 1003])
def test_a_size_that_the_node_does_not_divide_is_still_sent_sparse(size):
    """HiTopKComm (Espresso) C-H1: where the local size does not divide the tensor, it is sent dense."""
    gradients = [heavy_tailed(size, rank) for rank in range(8)]
    mean, _, reports = reduce_once("hitopk", gradients, ranks_per_node=4, density=0.02)
    # four shards of 250 or 251 entries, five of each to the one other node
    assert [report.traffic.sent.inter for report in reports] == [5 * 8] * 8
    assert 4 * 5 <= np.count_nonzero(mean) <= 2 * 4 * 5


# ------------------------------------------------------------- others


@pytest.mark.parametrize("name", SPARSE)
def test_what_half_precision_rounds_away_is_kept_by_the_rank_that_rounded(name):
    """DGC: values are rounded to fp16 after the residual was taken: the error is fed back nowhere."""
    # fp16 has eleven bits: 2⁻¹² of 1 + 2⁻¹² does not fit.
    gradient = dense(60, {7: 1 + 2.0**-12, 50: -4.0})
    mean, residuals, _ = reduce_once(name, [gradient] * 2, density=2 / 60, wire="fp16")
    left = {7: 2 * (1 + 2.0**-12 - mean[7])}
    assert non_zeros(sum(residuals)) == left
    # In a tree of two ranks only one of them sends what it selected.
    assert left[7] == (1 if name == "gtopk" else 2) * 2.0**-12


@pytest.mark.parametrize("selector", SELECTORS)
def test_nobody_elses_random_numbers_are_touched(selector, name="oktopk"):
    """GRACE, ARC-TopK: the global generator is seeded again for every tensor."""

    def shared_state():
        _, keys, position, *_ = np.random.get_state()
        return keys.tobytes(), position, random.getstate()

    before = shared_state()

    def body(comm):
        gradients = [heavy_tailed(300, comm.rank, step) for step in range(2)]
        train(comm, name, 300, gradients, density=0.05, selector=selector)

    simulated.run(body, 2)
    assert shared_state() == before


@pytest.mark.parametrize("world_size", [7, *more(6, 9)])
@pytest.mark.parametrize("name", REDUCERS)
def test_the_cost_formulas_know_every_number_of_ranks(name, world_size):
    """GaussianK-SGD: a table of constants has P = 2, 4, 8 and 16 only."""
    options = with_density(name, 0.03)
    nodes = [[rank] for rank in range(world_size)]
    _, _, reports = reduce_once(name, [heavy_tailed(1000, rank) for rank in range(world_size)], **options)
    for rank, report in enumerate(reports):
        formula = bytes_sent(name, nodes, rank, 1000, **options).inter
        assert 0 < report.traffic.sent.inter <= formula
        if REDUCERS[name].cost.is_exact:
            assert report.traffic.sent.inter == formula


@pytest.mark.parametrize("density", [0.25, *more(0.004, 0.03)])
@pytest.mark.parametrize("name", SPARSE)
def test_the_density_asked_for_is_the_density_used(name, density):
    """ADTopk: its baseline sets 0.01 whatever is asked for."""
    gradients = [heavy_tailed(1000, rank) for rank in range(3)]
    mean, _, reports = reduce_once(name, gradients, density=density, selector="mstopk")
    k = round(density * 1000)
    assert [report.selected for report in reports] == [k] * 3
    assert k <= np.count_nonzero(mean) <= 3 * k


DTYPES = [np.float32, ml_dtypes.bfloat16, *more(np.float16, np.float64)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("name", REDUCERS)
def test_the_gradient_that_is_passed_in_is_never_written_to(name, dtype):
    """OmniReduce C-O1: the caller's tensor is edited. A block of NaN in it counts as zero, and becomes it."""

    def body(comm):
        gradients = [heavy_tailed(200, comm.rank, step).astype(dtype) for step in range(3)]
        gradients[1][64:128] = np.nan
        gradients[2].flags.writeable = False
        before = [gradient.tobytes() for gradient in gradients]
        options = {"density": 0.05, "wire": "fp16"} if REDUCERS[name].sparse else {}
        reducer, means = train(comm, name, 200, gradients, ranks_per_node=2, **options)
        assert [gradient.tobytes() for gradient in gradients] == before
        assert [bool(np.isnan(mean).all()) for mean in means] == [False, True, False]
        assert [mean.dtype for mean in means] == [np.float32] * 3

    simulated.run(body, 3)


@pytest.mark.parametrize("name", REDUCERS)
def test_a_reducer_keeps_no_hold_of_what_it_takes_and_gives(name):
    """OmniReduce C-O1: buffers are shared with the caller, who goes on using them."""

    def body(comm, careless):
        reducer = make_reducer(name, Topology(comm, ranks_per_node=2), size=200, **with_density(name, 0.05))
        seen = []
        for step in range(4):
            gradient, absorbed = heavy_tailed(200, comm.rank, step), heavy_tailed(200, comm.rank, step, 1)
            if step % 2:
                reducer.add_residual(absorbed)
            if careless:
                absorbed[...] = 7
            out = np.full(200, 5, np.float32) if careless else None
            mean, residual = reducer.reduce(gradient, out=out), reducer.residual
            assert not np.shares_memory(mean, gradient)
            seen.append((mean.tobytes(), residual.tobytes()))
            if careless:
                assert mean is out
                for array in (gradient, mean, residual):
                    array[...] = 7
        return seen

    for world_size in (1, 3):
        assert simulated.run(lambda comm: body(comm, True), world_size) == simulated.run(
            lambda comm: body(comm, False), world_size
        )


@pytest.mark.parametrize("other", [{"world_size": 2}, {"ranks_per_node": 2}], ids=str)
@pytest.mark.parametrize("name", ["allgather", "oktopk", "hitopk"])
def test_a_state_of_other_ranks_is_refused(name, other):
    """DeepSpeed: error buffers of another layout are thrown away in silence when they are loaded."""
    layout = {"world_size": 4, "ranks_per_node": 1}

    def make(comm, ranks_per_node):
        return make_reducer(name, Topology(comm, ranks_per_node=ranks_per_node), size=100, density=0.05)

    def save(comm):
        reducer = make(comm, layout["ranks_per_node"])
        reducer.reduce(heavy_tailed(100, comm.rank))
        return reducer.state_dict()

    states = simulated.run(save, layout["world_size"])
    resumed = layout | other

    def load(comm):
        reducer = make(comm, resumed["ranks_per_node"])
        with pytest.raises(InvalidArgument, match="state: "):
            reducer.load_state_dict(states[comm.rank % 4])
        return reducer.residual.any() or reducer.steps

    assert simulated.run(load, resumed["world_size"]) == [0] * resumed["world_size"]
