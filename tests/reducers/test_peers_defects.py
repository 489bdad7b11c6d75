"""Defects that were found in reference implementations: one test each, which fails where the defect is.

Each docstring names the implementation and what went wrong there. What is a selector's or a codec's own
affair is tested beside them (tests/selection, tests/wire); here is what reaches a reducer, a vector or a
transport.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from commlib import REDUCERS, SparseVector, Topology, bytes_sent, make_reducer
from commlib.reducers import SelectingReducer, reducer_options
from commlib.transport import Request, simulated
from commlib.vectors import concatenate, index_dtype, partition, sum_sparse
from commlib.wire import make_codec
from tests.extent import more

SPARSE = [name for name, reducer in REDUCERS.items() if reducer.sparse]
SELECTING = [name for name in SPARSE if issubclass(REDUCERS[name], SelectingReducer)]  # the k largest of each


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
    [("gtopk", {}), ("oktopk", {"leftovers": "owner"}), ("oktopk", {"leftovers": "sender", "wire": "fp16"})],
    ids=str,
)
def test_indices_past_32_bits_are_combined_and_dropped_where_they_belong(name, options):
    """SparCML C-S5, OmniReduce C-O1: 32-bit dimensions, counts and indices."""

    def body(comm):
        reducer, dropped = lengthened(comm, name, FAR, **options), []
        reducer.drop = lambda vector, at=0: dropped.append(entries_of(vector, at))
        reducer.take_off = lambda vector, at=0: dropped.append(
            {index: -value for index, value in entries_of(vector, at).items()}
        )
        combined = reducer._combine(sparse(FAR, FAR_ENTRIES[comm.rank]))
        return entries_of(combined), dropped

    seen = simulated.run(body, 3)
    combined = seen[0][0]
    assert all(each == combined for each, _ in seen)
    # the three largest sums
    assert combined == {index: FAR_SUMS[index] for index in (2**31 + 7, 2**32 + 1, 2**33 - 1)}
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
        sent = bytes_sent(name, nodes, 0, FAR, **with_density(name, 0.05)).inter
        assert sent > 2**31 or name == "powersgd"  # whose factors are short
        assert isinstance(sent, int)


@pytest.mark.parametrize("name", REDUCERS)
def test_one_rank_alone_applies_its_gradient_and_keeps_nothing(name):
    """Ok-Topk C-K3: world size 1 crashes, as no boundary is left between regions."""
    gradients = [heavy_tailed(100, step) for step in range(3)]

    def body(comm):
        reducer, means = train(comm, name, 100, gradients, **with_density(name, 0.1))
        return [mean.tobytes() for mean in means], reducer.residual.any()

    assert simulated.run(body, 1) == [([gradient.tobytes() for gradient in gradients], False)]


@pytest.mark.parametrize("name", SELECTING)
def test_fewer_selected_entries_than_ranks_reduce_to_what_they_are(name):
    """Ok-Topk C-K4: with fewer than P entries all boundaries are equal, with none it stops."""
    gradients = [dense(50, {7 + rank // 4: 8.0}) for rank in range(8)]
    mean, residuals, _ = reduce_once(name, gradients, density=1e-9)
    # Four ranks hold 8 at 7, four at 8. A top-k of the sum keeps one of them, ties by lowest index.
    is_top_k = name in ("gtopk", "oktopk", "hioktopk")
    assert non_zeros(mean) == ({7: 4} if is_top_k else {7: 4, 8: 4})
    assert sum(residuals).sum() == (4 * 8 if is_top_k else 0)


@pytest.mark.parametrize("name", SELECTING)
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
        reducer = make_reducer("oktopk", Topology(comm), size, selector="all", density=1.0)
        reducer.reduce(sparse(size, {size - 1000 + 10 * place + comm.rank: 1.0 for place in range(5)}))
        return reducer.state.regions.tolist()

    # Rank r's regions begin at its second, third, fourth and fifth entry; the mean of r is 2.
    inner = [size - 1000 + 10 * place + 2 for place in range(1, 5)]
    assert simulated.run(body, 5) == [[0, *inner, size]] * 5


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


@pytest.mark.parametrize("name", SELECTING)
def test_the_kth_value_is_sent_or_kept_but_neither_lost_nor_doubled(name):
    """Ok-Topk C-K10 (TopkDSA): the residual of k entries is zeroed, and k − 1 pass a strict threshold."""
    values = {10: 9.0, 20: -7.0, 30: 5.0, 40: 3.0, 50: -2.0}
    mean, residuals, _ = reduce_once(name, [dense(60, values)] * 2, density=3 / 60)
    assert non_zeros(mean) == {10: 9, 20: -7, 30: 5}
    assert [non_zeros(residual) for residual in residuals] == [{40: 3, 50: -2}] * 2


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


@pytest.mark.parametrize("name", SELECTING)
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
        def start(array, destination, **options):
            before = array.tobytes()

            def check():
                assert array.tobytes() == before, "changed while it was under way"

            return WatchedRequest(send(array, destination, **options), check, started)

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
    comm.send_message, comm._send_message = watched_send(comm.send_message), watched_send(comm._send_message)
    comm.receive, comm.receive_header = watched_receive(comm.receive), watched_receive(comm.receive_header)


@pytest.mark.parametrize("wire", ["fp16", *more("fp32")])
@pytest.mark.parametrize("name", REDUCERS)
def test_every_message_is_waited_for_and_left_alone_until_then(name, wire):
    """SparCML C-S3: requests are never waited for, and their buffers are freed."""
    given = {"density": 0.05, "wire": wire}
    options = {option: value for option, value in given.items() if option in reducer_options(name)}

    def body(comm):
        started = []
        topology = Topology(comm, ranks_per_node=2)
        plain = make_reducer(name, topology, size=300, **options)
        gradients = [heavy_tailed(300, comm.rank, step) for step in range(3)]
        expected = [plain.reduce(gradient).tobytes() for gradient in gradients]
        for each in (topology.world, topology.node, topology.stream):
            each.eager_bytes = 80
            watch(each, started)
        watched = make_reducer(name, topology, size=300, **options)
        for gradient, mean in zip(gradients, expected, strict=True):
            assert watched.reduce(gradient).tobytes() == mean
            assert {request.waits for request in started} == {1}
        return len(started)

    assert min(simulated.run(body, 5)) > 0


# ------------------------------------------------------------- HiTopKComm


@pytest.mark.parametrize("name", [name for name in SPARSE if name != "powersgd"])
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


# ------------------------------------------------------------- others


@pytest.mark.parametrize("name", SELECTING)
def test_what_half_precision_rounds_away_is_kept_by_the_rank_that_rounded(name):
    """DGC: values are rounded to fp16 after the residual was taken: the error is fed back nowhere."""
    # fp16 has eleven bits: 2⁻¹² of 1 + 2⁻¹² does not fit.
    gradient = dense(60, {7: 1 + 2.0**-12, 50: -4.0})
    mean, residuals, _ = reduce_once(name, [gradient] * 2, density=2 / 60, wire="fp16")
    left = {7: 2 * (1 + 2.0**-12 - mean[7])}
    assert non_zeros(sum(residuals)) == left
    # In a tree of two ranks only one of them sends what it selected.
    assert left[7] == (1 if name == "gtopk" else 2) * 2.0**-12


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
