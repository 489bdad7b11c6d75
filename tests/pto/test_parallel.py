"""An operation in parts: the same as on one rank, to the bit, on every rank."""

import ml_dtypes
import numpy as np
import pytest

import pto
from commlib import Link, Network, transport
from pto.comm import slowest

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32]


def layers(seed: int) -> list[np.ndarray]:
    """One to 30 tensors of 0 to 4 dimensions and mixed types, some of them empty."""
    generator = np.random.default_rng(seed)
    drawn = []
    for i in range(generator.integers(1, 31)):
        shape = generator.integers(0 if i % 7 == 6 else 1, 9, generator.integers(0, 5))
        drawn.append((10 * generator.standard_normal(shape)).astype(DTYPES[generator.integers(len(DTYPES))]))
    return drawn


def halves(tensor):
    """An operation whose results differ in shape and type from what they are made of, and from each other."""
    wide = np.asarray(tensor, np.float64).reshape(-1)
    if wide.size % 3 == 0:
        return wide.sum()
    if wide.size % 3 == 1:
        return np.stack([wide, wide * wide])
    return (tensor / np.asarray(2, tensor.dtype)).astype(tensor.dtype)


def same(ours, theirs) -> bool:
    """Equal to the bit, with shape and dtype."""
    return [(each.shape, each.dtype, each.tobytes()) for each in ours] == [
        (each.shape, each.dtype, each.tobytes()) for each in map(np.asarray, theirs)
    ]


@pytest.mark.parametrize("how", ["auto", "parts", "local"])
@pytest.mark.parametrize("check", [False, True], ids=["", "check"])
def test_results_are_those_of_one_rank_on_every_rank(ranks, how, check):
    for seed in range(4):
        tensors = layers(seed)
        expected = [halves(tensor) for tensor in tensors]

        def body(comm):
            planned = pto.parallel(halves, tensors, comm, how=how, check=check)  # noqa: B023
            return [planned(tensors) for _ in range(2)]  # noqa: B023

        for calls in ranks.run(body):
            for results in calls:
                assert same(results, expected)


def test_items_of_several_arrays_are_arguments(ranks):
    pairs = [(np.arange(n, dtype=np.float32), np.full(n, 2.0, np.float32)) for n in (5, 1, 9)]
    for results in ranks.run(lambda comm: pto.parallel(np.dot, pairs, comm, how="parts")(pairs)):
        assert [float(each) for each in results] == [20, 0, 72]


@pytest.mark.parametrize("size", [0, 1, 2, 7, 1000])
@pytest.mark.parametrize("how", ["auto", "parts", "local"])
def test_one_vector_is_cut_into_slices_and_joined(ranks, size, how):
    vector = np.random.default_rng(size).standard_normal(size).astype(np.float32)

    def body(comm):
        planned = pto.parallel(np.negative, vector, comm, how=how, check=True)
        return planned(vector), planned(vector + 1)

    for ours, next_ours in ranks.run(body):
        assert same([ours, next_ours], [-vector, -(vector + 1)])


def test_slices_may_give_rows(ranks):
    vector = np.arange(11, dtype=ml_dtypes.bfloat16)

    def squares(part):
        return np.stack([part, part * part], axis=1)

    for result in ranks.run(lambda comm: pto.parallel(squares, vector, comm, how="parts")(vector)):
        assert same([result], [squares(vector)])


def test_results_are_new_arrays_and_nan_and_signed_zeros_arrive_as_they_are(ranks):
    tensors = [np.array([np.nan, -0.0, np.inf], np.float32), np.ones((2, 2)), np.array(-np.nan)]

    def body(comm):
        planned = pto.parallel(np.copy, tensors, comm, how="parts", check=True)
        results = planned(tensors)
        for result in results:
            result[...] = comm.rank
        return planned(tensors)

    for results in ranks.run(body):
        assert same(results, tensors)


def test_empty_lists_and_empty_tensors(ranks):
    def body(comm):
        nothing = pto.parallel(np.sum, [], comm, check=True)
        empty = pto.parallel(np.sum, [np.empty((0, 3)), np.empty(0)], comm, how="parts")
        return nothing([]), nothing.choice, empty([np.empty((0, 3)), np.empty(0)])

    for results, choice, sums in ranks.run(body):
        assert results == []
        assert not choice.in_parts
        assert [float(each) for each in sums] == [0, 0]


def test_after_planning_each_call_is_one_exchange_of_the_results():
    tensors = [np.ones(n) for n in (5, 4, 3, 2, 1, 1, 1)]

    def body(comm):
        planned = pto.parallel(np.sum, tensors, comm, how="parts")
        before = int(comm.sent_bytes.sum())
        comm.allgather_ints = comm.allgather_objects = None  # neither is called any more
        planned(tensors)
        return int(comm.sent_bytes.sum()) - before

    # Round the ring every rank passes on all numbers but those of its right neighbour: 8 bytes each.
    assert sum(transport.simulated.run(body, 3)) == 2 * 8 * len(tensors)


@pytest.mark.parametrize(
    ("sizes", "cost", "expected"),
    [
        ((90, 50, 40, 30, 20), None, [[90, 30], [50, 40, 20]]),
        ((9, 3, 2, 1), lambda each: 1 / each.size, [[1], [9, 3, 2]]),
    ],
)
def test_ranks_only_compute_their_own_part_which_costs_decide(sizes, cost, expected):
    tensors = [np.ones(size) for size in sizes]

    def body(comm):
        called = []
        planned = pto.parallel(
            lambda tensor: called.append(tensor.size) or 0.0, tensors, comm, cost, how="parts"
        )
        called.clear()
        planned(tensors)
        return called

    assert transport.simulated.run(body, 2) == expected


@pytest.mark.parametrize(("alpha", "in_parts"), [(1e-9, True), (1.0, False)])
def test_it_runs_in_parts_where_that_is_faster(alpha, in_parts):
    network = Network(Link(alpha, 0.0), Link(alpha, 0.0))
    tensors = [np.ones(1_000_000, np.float32) for _ in range(4)]
    choice, *others = transport.simulated.run(
        lambda comm: pto.parallel(np.sort, tensors, comm).choice, 2, network=network, cores=2
    )
    assert others == [choice]
    assert choice.in_parts is in_parts
    assert (choice.seconds.part + choice.seconds.exchange < choice.seconds.whole) is in_parts
    assert choice.seconds.part < choice.seconds.whole
    assert choice.reason.startswith("sort in parts: " if in_parts else "sort locally: ")


def test_a_call_takes_as_long_as_its_slowest_rank_in_the_median_run():
    of_ranks = np.array([[1.0, 9.0, 2.0], [4.0, 1.0, 3.0]])
    assert slowest(of_ranks) == 4  # of 4, 9 and 3


def test_one_rank_computes_locally_and_sends_nothing():
    def body(comm):
        comm.allgather_ints = comm.allgather = comm.allgather_objects = None
        planned = pto.parallel(np.sum, [np.ones(3)], comm, how="parts", check=True)
        return planned([np.ones(3)]), planned.choice

    ((results, choice),) = transport.simulated.run(body, 1)
    assert same(results, [np.float64(3)])
    assert choice == pto.Choice(False, "sum locally: there is one rank")


@pytest.mark.parametrize("how", ["auto", "parts", "local"])
def test_the_checking_mode_names_the_tensor_and_the_ranks(how):
    tensors = [np.ones(4), np.ones(3), np.ones(2)]

    def body(comm):
        def leaning(tensor):
            return tensor.sum() + (comm.rank == 2) * (tensor.size == 3)

        planned = pto.parallel(leaning, tensors, comm, how=how, check=True)
        with pytest.raises(pto.DependsOnRank) as error:
            planned(tensors)
        return str(error.value)

    says = (
        "leaning: the result of tensor 1, computed on rank 1, is another on ranks [2]: "
        "the operation, or what it was given, depends on the rank or on the call"
    )
    assert transport.simulated.run(body, 3) == [says] * 3


def test_the_checking_mode_sees_shapes_and_calls_too():
    def body(comm):
        def growing(tensor):
            return np.ones(tensor.size + comm.rank)

        with pytest.raises(
            pto.DependsOnRank, match=r"tensor 0, computed on rank 0, is another on ranks \[1\]"
        ):
            pto.parallel(growing, [np.ones(2)], comm, how="local", check=True)([np.ones(2)])
        calls = iter(range(100))
        with pytest.raises(
            pto.DependsOnRank, match=r"slice 0, computed on rank 0, is another on ranks \[0, 1\]"
        ):
            pto.parallel(lambda part: part + next(calls), np.ones(4), comm, how="parts", check=True)(
                np.ones(4)
            )
        return True

    assert transport.simulated.run(body, 2) == [True, True]


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (
            lambda rank: [np.ones(2), np.ones(2 + (rank == 1))],
            "tensor 1 is float64 (2,) on ranks [0, 2], float64 (3,)",
        ),
        (
            lambda rank: [np.ones(2, np.float32 if rank else np.float64)],
            "tensor 0 is float64 (2,) on ranks [0], float32",
        ),
        (
            lambda rank: [np.ones(2)] * (3 - rank // 2),
            "tensor 2 is float64 (2,) on ranks [0, 1], missing on ranks [2]",
        ),
        (
            lambda rank: [(np.ones(1),) * (1 + rank)],
            "tensor 0 is float64 (1,) on ranks [0], float64 (1,), float64 (1,)",
        ),
    ],
    ids=["shape", "dtype", "number", "arguments"],
)
def test_ranks_that_disagree_on_the_tensors_are_named(own, says):
    def body(comm):
        with pytest.raises(pto.RanksDisagree) as error:
            pto.parallel(np.sum, own(comm.rank), comm)
        return str(error.value)

    for message in transport.simulated.run(body, 3):
        assert message.startswith(f"tensors: {says}")


def test_ranks_that_disagree_on_costs_or_settings_are_named():
    def body(comm):
        tensors = [np.ones(2), np.ones(3)]
        with pytest.raises(pto.RanksDisagree) as costs:
            pto.parallel(np.sum, tensors, comm, lambda tensor: tensor.size + comm.rank * (tensor.size == 3))
        with pytest.raises(pto.RanksDisagree) as settings:
            pto.parallel(np.sum, tensors, comm, how=["auto", "parts"][comm.rank])
        return str(costs.value), str(settings.value)

    expected = (
        "tensors: the cost of tensor 1 is 3.0 on ranks [0], 4.0 on ranks [1]",
        "settings: how is auto on ranks [0], parts on ranks [1]",
    )
    assert transport.simulated.run(body, 2) == [expected] * 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([np.ones(2)], "tensors: expected 2 as planned, got 1"),
        ([np.ones(2), np.ones((3, 1))], "tensor 1: expected float64 (3,) as planned, got float64 (3, 1)"),
        (
            [np.ones(2, np.float16), np.ones(3)],
            "tensor 0: expected float64 (2,) as planned, got float16 (2,)",
        ),
    ],
)
def test_tensors_that_were_not_planned_are_refused(ranks, given, says):
    def body(comm):
        planned = pto.parallel(np.sum, [np.ones(2), np.ones(3)], comm, how="parts")
        with pytest.raises(pto.InvalidArgument) as error:
            planned(given)
        return str(error.value)

    assert ranks.run(body) == [says] * ranks.size


@pytest.mark.parametrize(
    ("operation", "tensors", "options", "says"),
    [
        (np.sum, [], {"how": "fast"}, 'how: expected one of auto, parts, local, got "fast"'),
        (
            *(np.sum, np.ones((2, 3)), {}),
            "one vector: expected an array of one dimension, got float64 (2, 3);"
            " several tensors are given as a list",
        ),
        (np.sum, np.ones(4), {"cost": np.size}, "cost: expected none for one vector, whose slices are equal"),
        (
            *(np.sum, np.ones(4), {"how": "parts"}),
            "sum: expected arrays of the slices that differ in their first dimension at most, got float64 ()",
        ),
        (str, [np.ones(1)], {"how": "parts"}, "str: the result of tensor 0: expected numbers, got <U4"),
        (np.sum, [np.array(["a"])], {}, "tensor 0: expected numbers, got <U1"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(operation, tensors, options, says):
    def body(comm):
        with pytest.raises(pto.InvalidArgument) as error:
            pto.parallel(operation, tensors, comm, **options)
        return str(error.value)

    assert transport.simulated.run(body, 2) == [says] * 2


def test_results_that_change_their_shape_are_refused():
    def body(comm):
        shapes = iter([1, 2])
        planned = pto.parallel(lambda tensor: np.ones(next(shapes)), [np.ones(3)], comm, how="parts")
        if comm.rank:
            return
        with pytest.raises(
            pto.InvalidArgument, match=r"expected float64 \(1,\) of tensor 0 .*, got float64 \(2,\)$"
        ):
            planned([np.ones(3)])

    transport.simulated.run(body, 2)
