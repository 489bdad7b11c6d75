"""The promises of every reducer, stated once. A line in CASES buys the whole suite.

The same bodies run on the simulated transport at several world sizes, and under ``mpirun`` on real processes
(``mpirun -np 4 python -m pytest tests/reducers/test_promises.py``).
"""

import functools

import ml_dtypes
import numpy as np
import pytest

import commlib
from commlib import Topology, bytes_sent, make_reducer
from commlib.reducers import REDUCERS
from commlib.reducers.report import Forgotten
from tests.conftest import MPI_RANKS
from tests.extent import ALL, more

# Every reducer, with the settings that change its way through the code.
CASES = {
    "dense": ("dense", {}),
    "dense-hadamard4": ("dense", {"values": "hadamard4"}),
    "dense-hadamard8": ("dense", {"values": "hadamard8"}),
    "torus2d": ("torus2d", {}),
    "torus2d-qsgd4": ("torus2d", {"values": "qsgd4"}),
    "allgather": ("allgather", {"density": 0.05}),
    "allgather-past-delta": ("allgather", {"density": 0.3}),
    "gtopk": ("gtopk", {"density": 0.05}),
    "gtopk-one-entry": ("gtopk", {"density": 1e-9}),
    "gtopk-past-delta": ("gtopk", {"density": 0.7}),
    "ssar_doubling": ("ssar_doubling", {"density": 0.05}),
    "ssar_doubling-past-delta": ("ssar_doubling", {"density": 0.3}),
    "ssar_split": ("ssar_split", {"density": 0.05}),
    "ssar_split-past-delta": ("ssar_split", {"density": 0.3}),
    "dsar_split": ("dsar_split", {"density": 0.05}),
    "oktopk": ("oktopk", {"density": 0.05, "reevaluate_every": 2, "repartition_every": 3}),
    "oktopk-owner": ("oktopk", {"density": 0.05, "leftovers": "owner"}),
    "oktopk-one-entry": ("oktopk", {"density": 1e-9}),
    "oktopk-past-delta": ("oktopk", {"density": 0.7, "selector": "mstopk"}),
    "hitopk": ("hitopk", {"density": 0.05}),
    "hitopk-one-entry": ("hitopk", {"density": 1e-9}),
    "hitopk-past-delta": ("hitopk", {"density": 0.7}),
    "hitopk-all": ("hitopk", {"density": 1.0}),
    "hioktopk": ("hioktopk", {"density": 0.05, "reevaluate_every": 2, "repartition_every": 3}),
    "hioktopk-owner": ("hioktopk", {"density": 0.05, "leftovers": "owner"}),
    "hioktopk-past-delta": ("hioktopk", {"density": 0.7, "selector": "mstopk"}),
}
for _name, _options in list(CASES.values()):
    if _options == {"density": 0.05}:
        CASES[f"{_name}-fp16-decay"] = (_name, {**_options, "wire": "fp16", "decay": 0.75})
CASES["oktopk-bf16"] = ("oktopk", {"density": 0.05, "wire": "bf16"})
CASES["oktopk-owner-fp16-decay"] = (
    "oktopk",
    {"density": 0.05, "wire": "fp16", "decay": 0.75, "leftovers": "owner"},
)
CASES["hioktopk-bf16-decay"] = ("hioktopk", {"density": 0.05, "wire": "bf16", "decay": 0.75})
for _name, _wire in [
    ("allgather", "gap"),
    ("gtopk", "qsgd8"),
    ("ssar_doubling", "gap"),
    ("ssar_split", "gap+lloyd2"),
    ("dsar_split", "gap"),
    ("oktopk", "gap+fp16"),
    ("hitopk", "bitmap+qsgd4"),
    ("hitopk", "gap+lloyd1"),
    ("hioktopk", "gap+qsgd4"),
]:
    CASES[f"{_name}-{_wire}"] = (_name, {"density": 0.05, "wire": _wire})
for _name in ("allgather", "hioktopk"):
    for _selector in ("exact", "dgc", "gaussian", "reused", "bucketed"):
        CASES[f"{_name}-{_selector}"] = (_name, {"density": 0.05, "selector": _selector})
CASES["oktopk-one-entry-lloyd4"] = ("oktopk", {"density": 1e-9, "wire": "lloyd4"})
CASES["hioktopk-bucketed"][1]["selector"] = {"name": "bucketed", "bucket": 100}
for _name in ("allgather", "gtopk", "ssar_doubling", "ssar_split", "dsar_split", "oktopk"):
    CASES[f"{_name}-all"] = (_name, {"density": 1.0, "selector": "all"})
CASES |= {
    "exdyna": ("exdyna", {"density": 0.05}),
    "exdyna-gap-decay": ("exdyna", {"density": 0.05, "indices": "gap", "decay": 0.75}),
    "exdyna-bitmap-unbalanced": ("exdyna", {"density": 0.05, "indices": "bitmap", "balance": False}),
    "exdyna-one-entry": ("exdyna", {"density": 1e-9}),
    "exdyna-past-delta": ("exdyna", {"density": 0.7}),
    "spardl": ("spardl", {"density": 0.05}),
    "spardl-fp16-decay": ("spardl", {"density": 0.05, "wire": "fp16", "decay": 0.75}),
    "spardl-gap+qsgd4": ("spardl", {"density": 0.05, "wire": "gap+qsgd4"}),
    "spardl-one-entry": ("spardl", {"density": 1e-9, "selector": "reused"}),
    "spardl-reused": ("spardl", {"density": 0.05, "selector": "reused"}),
    "spardl-past-delta": ("spardl", {"density": 0.7}),
    "arctopk": ("arctopk", {"density": 0.05, "row": 16, "sketch": 2}),
    "arctopk-one-row-decay": ("arctopk", {"density": 1e-9, "decay": 0.75}),
    "powersgd": ("powersgd", {"density": 0.1}),
    "powersgd-rank-decay": ("powersgd", {"density": 0.1, "matrix_rank": 1, "decay": 0.75}),
}
# The algorithms that have no hierarchical reducer of their own, between nodes.
for _name in (
    "gtopk",
    "ssar_doubling",
    "ssar_split",
    "dsar_split",
    "exdyna",
    "spardl",
    "arctopk",
    "powersgd",
):
    CASES[f"{_name}-hierarchical"] = (_name, {"density": 0.05, "hierarchical": True})
CASES["hitopk-dense-messages"] = ("hitopk", {"density": 0.4, "wire": "gap+qsgd2"})
CASES["ssar_doubling-dense-messages"] = ("ssar_doubling", {"density": 0.3, "wire": "fp16"})
for _sums in ("qsgd8", "qsgd4", "qsgd2"):
    CASES[f"dsar_split-{_sums}"] = ("dsar_split", {"density": 0.05, "sums": _sums})
# The cases that lead another way through a step, its state or a bad one; each reducer is one of them.
WAYS = [
    *REDUCERS,
    *("dense-hadamard4", "torus2d-qsgd4", "allgather-fp16-decay", "allgather-reused", "gtopk-past-delta"),
    *("oktopk-owner-fp16-decay", "oktopk-past-delta"),
    *("exdyna-past-delta", "exdyna-hierarchical", "spardl-gap+qsgd4", "spardl-reused"),
    "powersgd-hierarchical",
    *("hitopk-bitmap+qsgd4", "hioktopk-dgc", "dsar_split-qsgd4", "ssar_split-all", "oktopk-all"),
]
LEVELS = ("torus2d", "hitopk", "hioktopk", "hierarchical")  # what goes another way with more ranks a node


def is_met(ranks, case=None, way=None, size=1000, value=1, bad=np.nan, **others):
    """Return whether a test runs with these parameters where not all do.

    A reducer as it comes meets all numbers of ranks; its variants three, and those of two levels eight too.
    Real ranks meet the variants of which messages are of other types or lengths.
    """
    name = case or way
    if name in REDUCERS:
        return ranks.size == 3 or (value != 0 and not np.isinf(bad))
    if name is None or MPI_RANKS > 1:
        return name is None or (case in WAYS and size >= 1000)
    has_levels = any(each in name for each in LEVELS)
    return (ranks.size == 3 or (ranks.size == 8 and has_levels)) and value != 0 and np.isnan(bad)


pytestmark = pytest.mark.pairs.with_args(is_met)
ONE_OF_A_KIND = ["torus2d", "oktopk", "hitopk"]  # dense, flat and hierarchical: for what a base class does
SIZES = [3, 1000, *more(1, 4099)]  # below the number of ranks, not divisible by it, prime
STEPS = 5


def layouts(size: int) -> list:
    """Even and uneven nodes; with few ranks, a single node and one rank a node."""
    even_and_not = [2, [size - 1, 1] if size > 1 else [1]]
    one_or_each = [size, 1]
    return even_and_not + one_or_each if ALL else even_and_not if size > 3 else one_or_each


@functools.cache  # every case and every layout takes the same ones
def gradient(size: int, rank: int, step: int) -> np.ndarray:
    """Heavy-tailed, different on every rank and step, one third shared so that selections overlap."""
    own = np.random.default_rng([size, rank, step]).standard_t(2, size)
    shared = np.random.default_rng([size, step]).standard_t(2, size)
    drawn = (own + 2 * shared).astype(np.float32)
    drawn.flags.writeable = False  # it stays the caller's, and as it is
    return drawn


def train(comm, name, options, size, ranks_per_node, steps=STEPS):
    """Reduce ``steps`` gradients; return what this rank saw, and kept or was told to forget."""
    topology = Topology(comm, ranks_per_node=ranks_per_node)
    reducer = make_reducer(name, topology, size=size, **options)
    means, reports, forgotten = [], [], np.zeros(size)
    for step in range(steps):
        before = reducer.residual
        means.append(reducer.reduce(gradient(size, comm.rank, step)))
        reports.append(reducer.last)
        lacking = before - np.float32(options.get("decay", 1)) * before.astype(np.float64)
        forgotten += lacking
        found = reducer.last.forgotten.norm, reducer.last.forgotten.sum
        # β·e is rounded to float32: by 2⁻²⁴ of an entry, of which a quarter is forgotten
        rounding = 1e-6 + 2.0**-24 * float(np.abs(before).sum())
        assert found == pytest.approx((np.linalg.norm(lacking), lacking.sum()), rel=1e-5, abs=rounding)
    of_reducer = {option: value for option, value in options.items() if option != "wrappers"}
    formula = bytes_sent(name, topology.nodes, comm.rank, size, **of_reducer)
    return {"means": means, "kept": reducer.residual + forgotten, "reports": reports, "formula": formula}


def unrounded(options: dict) -> dict:
    """The same settings with values that travel as they are."""
    codecs = [option for option in options if option in ("wire", "sums", "values")]
    return options | dict.fromkeys(codecs, "fp32")


def complete(options: dict) -> dict:
    """The same settings with all entries sent as they are; ``gaussian`` would pick three quarters of them."""
    selector = {"selector": "mstopk"} if "selector" in options else {}
    return {**unrounded(options), **selector, "density": 1.0}


def clips(options: dict) -> bool:
    """Whether a value beyond 65,504 is sent as 65,504."""
    return "fp16" in options.get("wire", "")


def rotates(options: dict) -> bool:
    """Whether a value is an error of each other one of its 512, where these are rounded."""
    return "hadamard" in options.get("values", "")


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(params=WAYS)
def way(request):
    return CASES[request.param]


@pytest.fixture(params=ONE_OF_A_KIND)
def kind(request):
    return CASES[request.param]


def test_every_reducer_has_a_case_and_declares_what_it_costs():
    assert {name for name, _ in CASES.values()} == set(REDUCERS)
    assert all(reducer.cost for reducer in REDUCERS.values())


@pytest.mark.parametrize("size", SIZES)
def test_agreement_and_nothing_lost_unless_told_to_and_the_bytes_of_the_formula(ranks, case, size):
    name, options = case
    gradients = [gradient(size, rank, step) for rank in range(ranks.size) for step in range(STEPS)]
    given = np.sum(gradients, axis=0, dtype=np.float64)
    magnitude = np.abs(gradients).sum(axis=0)
    if rotates(options):
        magnitude = magnitude.max()
    varies = "gap" in options.get("wire", "") or options.get("selector") in ("gaussian", "reused")
    is_exact = REDUCERS[name].cost.is_exact and not varies and ranks.size > 1
    for ranks_per_node in layouts(ranks.size) if size >= 1000 else [2]:
        seen = ranks.run(lambda comm: train(comm, name, options, size, ranks_per_node))  # noqa: B023
        for other in seen[1:]:
            for mean, first in zip(other["means"], seen[0]["means"], strict=True):
                assert mean.tobytes() == first.tobytes()
        applied = ranks.size * np.sum(seen[0]["means"], axis=0, dtype=np.float64)
        kept = sum(each["kept"] for each in seen)
        # float32 sums of at most P·STEPS = 40 terms, each rounding by half an ulp of the partial sum
        np.testing.assert_array_less(np.abs(applied + kept - given), 40 * 2.0**-23 * magnitude + 1e-30)
        check_bytes(seen, size, is_exact and size >= 1000)


def check_bytes(seen, size, is_exact):
    """Check that the bytes of every step are those of the formula, and that what is sent is received."""
    for each in seen:
        for report in each["reports"]:
            sent, formula = report.traffic.sent, each["formula"]
            assert sent.inter <= formula.inter
            assert sent.intra <= formula.intra
            assert sent.inter == formula.inter or not is_exact
            assert report.selected <= size
    for reports in zip(*(each["reports"] for each in seen), strict=True):
        for link in ("intra", "inter"):
            sent = sum(getattr(report.traffic.sent, link) for report in reports)
            assert sent == sum(getattr(report.traffic.received, link) for report in reports)


def test_dense_steps_equal_a_float64_reference(ranks, way):
    name, options = way
    options = complete(options) if REDUCERS[name].sparse else unrounded(options)
    seen = ranks.run(lambda comm: train(comm, name, options, 1000, 2, steps=1))
    reference = np.mean([gradient(1000, rank, 0).astype(np.float64) for rank in range(ranks.size)], axis=0)
    magnitude = np.mean([np.abs(gradient(1000, rank, 0)) for rank in range(ranks.size)], axis=0)
    # one rounding a term and one of the division
    tolerance = (ranks.size + 1) * 2.0**-23 * magnitude
    np.testing.assert_array_less(np.abs(seen[0]["means"][0] - reference), tolerance)


@pytest.mark.world_sizes(3)
def test_runs_repeat_bitwise(ranks, way):
    name, options = way
    first, second = (ranks.run(lambda comm: train(comm, name, options, 1000, 2)) for _ in range(2))
    assert [mean.tobytes() for mean in first[0]["means"]] == [mean.tobytes() for mean in second[0]["means"]]


@pytest.mark.parametrize("value", [0.0, -3.5])
def test_ties_agree(ranks, way, value):
    name, options = way

    def body(comm):
        reducer = make_reducer(name, Topology(comm, ranks_per_node=2), size=1000, **options)
        return [reducer.reduce(np.full(1000, value, np.float32)) for _ in range(3)], reducer.last

    seen = ranks.run(body)
    for means, report in seen:
        assert [mean.tobytes() for mean in means] == [mean.tobytes() for mean in seen[0][0]]
        tolerance = 1e-6 if name == "powersgd" else 0  # its factors are rounded
        if not rotates(options):
            assert np.isclose(means[0][means[0] != 0], value, rtol=tolerance, atol=0).all()
        assert report.finite


@pytest.mark.parametrize("bad", [np.nan, -np.inf], ids=str)
def test_a_bad_number_voids_the_step_on_every_rank_and_changes_nothing(ranks, way, bad):
    name, options = way

    def body(comm):
        topology = Topology(comm, ranks_per_node=2)
        reducer = make_reducer(name, topology, size=100, **options)
        twin = make_reducer(name, topology, size=100, **options)
        good = gradient(100, comm.rank, 0)
        reducer.reduce(good)
        twin.reduce(good)
        poisoned = good.copy()
        if comm.rank == comm.size - 1:
            poisoned[37] = bad
        voided = reducer.reduce(poisoned)
        report = reducer.last
        assert report.forgotten == Forgotten()
        unchanged = reducer.residual.tobytes() == twin.residual.tobytes()
        after = reducer.reduce(gradient(100, comm.rank, 1)), twin.reduce(gradient(100, comm.rank, 1))
        return np.isnan(voided).all(), report.finite, unchanged, after[0].tobytes() == after[1].tobytes()

    assert ranks.run(body) == [(True, False, True, True)] * ranks.size


def test_finite_numbers_that_add_up_to_an_infinity_void_the_step(ranks, way):
    name, options = way

    def body(comm):
        reducer = make_reducer(name, Topology(comm, ranks_per_node=1), size=10, **options)
        mean = reducer.reduce(np.full(10, 3e38, np.float32))
        return reducer.last.finite, bool(np.isfinite(mean).all()), reducer.residual

    # One rank adds nothing up, and half precision sends 65,504 of each and keeps the rest.
    fits = ranks.size == 1 or clips(options)
    for is_finite, mean_is_finite, residual in ranks.run(body):
        assert (is_finite, mean_is_finite) == (fits, fits)
        assert np.isfinite(residual).all()
        assert fits or not residual.any()


def test_infinities_of_both_signs_that_meet_in_a_sum_void_the_step_and_leave_no_trace(ranks, way):
    name, options = way

    def body(comm):
        reducer = make_reducer(name, Topology(comm, ranks_per_node=1), size=16, **options)
        # One half of the ranks adds up to +∞ at the last index, the other to −∞: a NaN in all. A ring adds
        # the last part up from rank 0 on, as most add all; some begin with ranks half the world apart.
        is_halving = name in ("spardl", "exdyna", "arctopk")
        is_positive = comm.rank % 2 if is_halving else comm.rank < comm.size // 2
        gradient = np.ones(16, np.float32)
        gradient[-1] = 3e38 if is_positive else -3e38
        reducer.reduce(gradient)
        was_finite, residual = reducer.last.finite, reducer.residual
        reducer.reduce(np.ones(16, np.float32))
        return was_finite, bool(np.isfinite(residual).all()), reducer.last.finite

    seen = ranks.run(body)
    assert {finite for finite, _, _ in seen} == {seen[0][0]}
    # 3e38 alone is finite, and so is its difference from another. With four ranks or eight, whatever the
    # algorithm adds first has one sign; with six, ssar_doubling folds ranks of both signs together.
    assert not seen[0][0] or ranks.size not in (4, 8) or clips(options)
    assert all(clean and finite_after for _, clean, finite_after in seen)


def test_a_restored_reducer_continues_bitwise(ranks, way):
    name, options = way

    def body(comm):
        topology = Topology(comm, ranks_per_node=2)
        reducer = make_reducer(name, topology, size=1000, **options)
        reducer.reduce(gradient(1000, comm.rank, 0))
        reducer.add_residual(gradient(1000, comm.rank, 9))
        restored = make_reducer(name, topology, size=1000, **options)
        restored.load_state_dict(reducer.state_dict())
        later = [gradient(1000, comm.rank, step) for step in range(1, 4)]
        return all(reducer.reduce(each).tobytes() == restored.reduce(each).tobytes() for each in later)

    assert all(ranks.run(body))


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize(
    "bad",
    [np.full(10, np.nan), np.zeros(9), np.full(10, 3e38, np.float32), np.full(10, 1e39)],
    ids=["nan", "shape", "overflows-in-the-sum", "overflows"],
)
def test_a_residual_that_cannot_be_flushed_is_refused(ranks, kind, bad):
    name, options = kind

    def body(comm):
        reducer = make_reducer(name, Topology(comm), size=10, **options)
        reducer.add_residual(np.full(10, 3e38))  # float64 is taken, and becomes float32
        with pytest.raises(commlib.InvalidArgument, match="residual: expected"):
            reducer.add_residual(bad)
        return reducer.residual.dtype == np.float32 and bool((reducer.residual == np.float32(3e38)).all())

    assert all(ranks.run(body))


def test_a_residual_is_flushed_into_the_first_step_of_the_successor(ranks, kind):
    name, options = kind

    def body(comm):
        topology = Topology(comm, ranks_per_node=2)
        reducer = make_reducer(name, topology, size=1000, **options)
        mean = reducer.reduce(gradient(1000, comm.rank, 0))
        dense = make_reducer("dense", topology, size=1000)
        dense.add_residual(reducer.residual)
        poisoned = np.full(1000, np.nan, np.float32)
        dense.reduce(poisoned)  # a skipped step must not use it up
        return mean + dense.reduce(np.zeros(1000, np.float32)), dense.residual.any()

    total, left = ranks.run(body)[0]
    reference = np.mean([gradient(1000, rank, 0).astype(np.float64) for rank in range(ranks.size)], axis=0)
    magnitude = np.mean([np.abs(gradient(1000, rank, 0)) for rank in range(ranks.size)], axis=0)
    np.testing.assert_array_less(np.abs(total - reference), (ranks.size + 4) * 2.0**-23 * magnitude)
    assert not left


def test_half_precision_is_added_in_float32(ranks, kind):
    name, options = kind
    options = unrounded(options)

    def body(comm):
        reducer = make_reducer(name, Topology(comm, ranks_per_node=2), size=100, **options)
        # 2048 + 1 is not a float16: a sum in half precision would drop the ones
        return reducer.reduce(np.full(100, 2048 if comm.rank == 0 else 1, np.float16))

    mean = ranks.run(body)[0]
    applied = mean[mean != 0]
    expected = np.float32(2048 + ranks.size - 1) / np.float32(ranks.size)
    assert mean.dtype == np.float32
    assert len(applied) > 0
    assert (applied == expected).all()


def test_ranks_with_different_settings_are_named(ranks):
    def body(comm):
        density = 0.5 if comm.rank == comm.size - 1 else 0.25
        try:
            make_reducer("hitopk", Topology(comm), size=10, density=density)
        except commlib.RanksDisagree as error:
            return str(error)
        return None

    messages = ranks.run(body)
    if ranks.size == 1:
        assert messages == [None]
    else:
        others, last = list(range(ranks.size - 1)), ranks.size - 1
        named = f"density is 0.25 on ranks {others}, 0.5 on ranks [{last}]"
        assert messages == [f"the reducer is not the same on all ranks: {named}"] * ranks.size


@pytest.mark.world_sizes(3)
def test_a_state_of_another_reducer_or_world_is_refused(ranks, kind):
    name, options = kind

    def body(comm):
        reducer = make_reducer(name, Topology(comm), size=10, **options)
        other = make_reducer("torus2d" if name == "dense" else "dense", Topology(comm), size=10)
        alone = make_reducer(name, Topology(comm.split(comm.rank)), size=10, **options)
        regrouped = make_reducer(name, Topology(comm, ranks_per_node=2), size=10, **options)
        longer = make_reducer(name, Topology(comm), size=11, **options)
        reducer.reduce(gradient(10, comm.rank, 0))
        before = reducer.residual.tobytes()
        for each in (other, longer, *([alone, regrouped] * (comm.size > 1))):
            with pytest.raises(commlib.InvalidArgument, match="state: "):
                reducer.load_state_dict(each.state_dict())
        return reducer.residual.tobytes() == before and reducer.steps == 1

    assert all(ranks.run(body))


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize(
    "bad",
    [np.zeros(9), np.ones(10, bool), np.ones(10, complex), np.array(["1"] * 10), np.array([None] * 10)],
    ids=str,
)
def test_a_wrong_shape_or_dtype_is_refused(ranks, kind, bad):
    name, options = kind

    def body(comm):
        reducer = make_reducer(name, Topology(comm), size=10, **options)
        expected = "real numbers" if len(bad) == reducer.size else "shape"
        with pytest.raises(commlib.InvalidArgument, match=f"gradient: expected {expected}"):
            reducer.reduce(bad)
        return reducer.steps

    assert ranks.run(body) == [0] * ranks.size


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int32])
def test_every_type_of_real_numbers_is_taken(ranks, kind, dtype):
    name, options = kind

    def body(comm):
        reducer = make_reducer(name, Topology(comm), size=10, **options)
        return reducer.reduce(np.full(10, 4, dtype)), reducer.residual

    for mean, residual in ranks.run(body):
        assert mean.dtype == residual.dtype == np.float32
        assert set(np.unique(mean)) <= {0.0, 4.0}
        assert mean.any()


@pytest.mark.world_sizes(2)
@pytest.mark.parametrize("size", [10.0, "10", True, None, 0, -1])
def test_a_size_that_is_none_is_refused(ranks, size):
    def body(comm):
        with pytest.raises(commlib.InvalidArgument, match="size: expected a whole number of entries from 1"):
            make_reducer("dense", Topology(comm), size=size)
        return True

    assert all(ranks.run(body))
