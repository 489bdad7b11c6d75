"""The promises of every selector, stated once. A line in CASES buys the whole suite."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib import SELECTORS, InvalidArgument, NonFiniteInput, select, vectors
from commlib.selection import base, exact, make_selector
from tests.extent import examples, more


def reference(vector, k):
    """The indices of the k largest magnitudes in float64, ties by lowest index, ascending."""
    order = np.argsort(-np.abs(vector.astype(np.float64)), kind="stable")
    return np.sort(order[:k])


def reference_of_buckets(vector, k, bucket=512):
    """The same for every bucket, the share of those that end at n being the whole part of n·k/d."""
    k, selected = min(k, len(vector)), []
    for first in range(0, len(vector), bucket):
        last = min(len(vector), first + bucket)
        share = last * k // len(vector) - first * k // len(vector)
        selected.extend(first + reference(vector[first:last], share))
    return np.array(selected, np.int64)


@dataclass(frozen=True)
class Case:
    """What a selector promises of a vector and k: the indices, or else bounds of the count, in units of k."""

    indices: Callable | None = reference
    fewest: float = 1
    most: float = 1


CASES = {
    "exact": Case(),
    "mstopk": Case(),
    "dgc": Case(),
    "gaussian": Case(indices=None, fewest=0.75, most=2),
    "reused": Case(),  # a new one begins with an exact call; the others are in test_reused.py
    "bucketed": Case(indices=reference_of_buckets),
}
DEFINED = [name for name, case in CASES.items() if case.indices]


@pytest.fixture(params=CASES)
def name(request):
    return request.param


def heavy_tails(rng, size):
    with np.errstate(over="ignore"):
        return np.clip(rng.standard_cauchy(size) ** 3, -3e38, 3e38)


def every_magnitude(rng, size):
    bits = rng.integers(0, 0x7F80_0000, size, dtype=np.uint32)  # below the first infinity
    return bits.view(np.float32) * rng.choice([-1, 1], size).astype(np.float32)


def scaled(rng, size, part, factor):
    """Normal entries, of which a part is multiplied."""
    vector = rng.standard_normal(size)
    vector[part] *= factor
    return vector


def from_anywhere(rng, size, length):
    first = rng.integers(size)
    return slice(first, first + length)


NINTH = slice(None, None, 9)  # where dgc looks in a short vector
FAMILIES = {
    "gaussian": lambda rng, size: rng.standard_normal(size),
    "heavy_tails": heavy_tails,
    "many_ties": lambda rng, size: rng.integers(-2, 3, size),
    "all_equal": lambda rng, size: np.full(size, rng.standard_normal()) * rng.choice([-1, 1], size),
    "all_zero": lambda rng, size: np.zeros(size),
    "mostly_zero": lambda rng, size: np.where(rng.random(size) < 0.006, rng.standard_normal(size), 0),
    "negative_zeros": lambda rng, size: np.where(rng.random(size) < 0.5, -0.0, rng.choice([0, 1.0], size)),
    "denormals": lambda rng, size: rng.integers(-1000, 1001, size) * 2.0**-149,
    "one_outlier": lambda rng, size: scaled(rng, size, from_anywhere(rng, size, 1), 1e9),
    "near_the_last_bit": lambda rng, size: 1.0 + rng.integers(0, 50, size) * 2.0**-23,
    "every_magnitude": every_magnitude,
    "ascending": lambda rng, size: np.sort(rng.standard_normal(size)),
    # many more than k reach the k-th largest of the maxima of blocks
    "crowded": lambda rng, size: scaled(rng, size, from_anywhere(rng, size, size // 10 + 1), 1000),
    "every_ninth": lambda rng, size: scaled(rng, size, NINTH, 1000),
    "none_of_every_ninth": lambda rng, size: scaled(rng, size, NINTH, 0),
}


def draw(family, seed, size):
    return FAMILIES[family](np.random.default_rng([seed, size]), size).astype(np.float32)


def test_every_selector_has_a_case():
    assert set(CASES) == set(SELECTORS)


@pytest.mark.parametrize("name", [name for name in CASES if not make_selector(name).state_dict()])
def test_what_was_selected_before_changes_no_selection(name):
    selector = make_selector(name)
    for seed, (family, k) in enumerate(product(FAMILIES, (3, 40, 41))):
        vector = draw(family, seed, 1025)
        for factor in (1, 1, 0.96, 0.5, 3):
            each = np.clip(np.float64(factor) * vector, -3e38, 3e38).astype(np.float32)
            assert selector.select(each, k).indices.tolist() == select(name, each, k).indices.tolist()


def test_exact_selections_mostly_begin_with_what_fits(monkeypatch):
    searches = Mock(side_effect=exact.select_exactly)
    monkeypatch.setattr(exact, "select_exactly", searches)
    selector, residual = make_selector("exact"), np.zeros(65_539, np.float32)
    for step in range(40):
        residual += np.random.default_rng(step).standard_normal(len(residual), np.float32)
        residual[selector.select(residual, 66).indices] = 0
    assert searches.call_count <= 20


@pytest.mark.filterwarnings("error")
def test_a_guess_is_no_larger_than_the_largest_number():
    vector = np.where(np.arange(300) % 50, 1, 1.01) * np.linspace(1, 0.999, 300)
    selector = make_selector("exact")
    for step in range(32):
        grown = (min(1e36 * 1.25**step, 3.3e38) * vector).astype(np.float32)
        assert (selector.select(grown, 3).indices == CASES["exact"].indices(grown, 3)).all()


# None, one, and sizes around the blocks of 64, the buckets of 512, and the histograms' 1,024 bins.
SIZES = [0, 1, 65, 1025, *more(2, 3, 4, 5, 7, 63, 64, 511, 513, 1023)]


@pytest.mark.parametrize("size", [1, 513, *more(0, *SIZES)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_count_is_the_smaller_of_k_and_size_or_within_the_bounds_of_the_case(name, family, size):
    vector = draw(family, 1, size) if size else np.zeros(0, np.float32)
    case = CASES[name]
    for k in {0, 1, 2, size // 3, size - 1, size, size + 1, 10 * size + 7}:
        if k >= 0:
            smaller = min(k, size)
            assert case.fewest * smaller <= select(name, vector, k).nnz <= min(size, case.most * smaller)


@pytest.mark.parametrize("family", FAMILIES)
def test_indices_are_sorted_and_unique_and_lead_to_the_values(name, family):
    vector = draw(family, 2, 4099)
    selected = select(name, vector, 411)
    assert selected.size == 4099
    assert selected.indices.dtype == np.int32
    assert (np.diff(selected.indices) > 0).all()
    assert 0 <= selected.indices[0] <= selected.indices[-1] < 4099
    assert selected.values.dtype == np.float32
    assert selected.values.tobytes() == vector[selected.indices].tobytes()  # the sign of zero, too


@pytest.mark.parametrize("name", DEFINED)
@settings(max_examples=examples(300))
@given(
    family=st.sampled_from(list(FAMILIES)),
    seed=st.integers(0, 2**32),
    size=st.integers(1, 20_000),
    share=st.one_of(st.floats(0, 1.1), st.floats(0, 0.02)),
)
def test_the_largest_are_selected_ties_by_lowest_index(name, family, seed, size, share):
    vector, k = draw(family, seed, size), round(share * size)
    np.testing.assert_array_equal(select(name, vector, k).indices, CASES[name].indices(vector, k))


@pytest.mark.parametrize("name", DEFINED)
@pytest.mark.parametrize("family", ["gaussian", *more("heavy_tails", "ascending")])
def test_the_largest_of_two_million_are_selected(name, family):
    vector = draw(family, 3, 2_000_003)
    for k in (1, 20_001, *more(2_000, 30_011, 200_003)):
        np.testing.assert_array_equal(select(name, vector, k).indices, CASES[name].indices(vector, k))


@pytest.mark.parametrize("k", [41, *more(1, 977, 4099)])
@pytest.mark.parametrize("family", FAMILIES)
def test_selecting_from_a_sum_is_adding_and_selecting_to_the_last_bit(name, family, k):
    gradient, residual = draw(family, 16, 4099), draw("gaussian", 17, 4099)
    selector, out = make_selector(name), np.full(4099, np.nan, np.float32)
    if name in ("exact", "mstopk"):  # the second selection begins with a guess from the first
        selector.select_sum(draw(family, 18, 4099), residual, k, out)
    selected = selector.select_sum(gradient, residual, k, out)
    added = select(name, gradient + residual, k)
    assert out.tobytes() == (gradient + residual).tobytes()
    assert [*selected.indices] == [*added.indices] and selected.values.tobytes() == added.values.tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_of_any_size_is_selected_from(name, size):
    gradient, residual = np.arange(size, dtype=np.float32), np.full(size, -1000.5, np.float32)
    out, selector = np.empty(size, np.float32), make_selector(name)
    for _ in range(2):  # the second time by a guess
        selected = selector.select_sum(gradient, residual, size, out)
    np.testing.assert_array_equal(out, gradient - np.float32(1000.5))
    np.testing.assert_array_equal(selected.values, out[selected.indices])


@pytest.mark.parametrize("position", [0, 64, 4096, 4098])  # 4098 lies in the block that is not whole
def test_finite_parts_whose_sum_is_not_are_refused_and_left_as_they_were(name, position):
    gradient, residual = draw("gaussian", 18, 4099), draw("gaussian", 19, 4099)
    gradient[position] = residual[position] = 3e38
    before = residual.copy()
    with pytest.raises(NonFiniteInput):
        make_selector(name).select_sum(gradient, residual, 41, np.empty(4099, np.float32))
    assert residual.tobytes() == before.tobytes()


@pytest.mark.parametrize("bad", [np.nan, -np.inf, *more(-np.nan, np.inf)], ids=str)
@pytest.mark.parametrize("size", [1, 4099, *more(2, 3, 4)])
def test_a_bad_number_anywhere_is_refused_whatever_k(name, bad, size):
    for position in {0, size // 2, size - 1}:
        vector = draw("gaussian", 4, size)
        vector[position] = bad
        for k in (0, 1, size):
            with pytest.raises(NonFiniteInput, match="a NaN or an infinity"):
                select(name, vector, k)


def test_a_nan_of_any_bit_pattern_is_refused(name):
    for bits in (0x7F80_0001, 0x7FC0_0000, 0x7FFF_FFFF, 0xFF80_0001, 0xFFFF_FFFF):
        vector = np.array([1, 2, 3], np.float32)
        vector.view(np.uint32)[1] = bits
        with pytest.raises(NonFiniteInput):
            select(name, vector, 1)


def test_the_largest_finite_number_is_not_refused(name):
    vector = np.array([1, -np.finfo(np.float32).max, 3], np.float32)
    np.testing.assert_array_equal(select(name, vector, 1).values, vector[1:2])


def test_a_read_only_input_is_accepted_and_the_result_shares_nothing_with_it(name):
    vector = draw("gaussian", 7, 1001)
    before = vector.copy()
    vector.flags.writeable = False
    for k in (0, 10, 1001, 2000):
        select(name, vector, k).values[:] = np.inf
        assert vector.tobytes() == before.tobytes()


def test_indices_past_31_bits_are_int64_and_the_selection_is_the_same(name, monkeypatch):
    """A vector that needs them has 8 GiB: here the type is changed, and the code that uses it is the same."""
    narrow = select(name, draw("gaussian", 9, 4099), 41)
    for module in (vectors, base, sys.modules[SELECTORS[name].__module__]):
        if hasattr(module, "index_dtype"):
            monkeypatch.setattr(module, "index_dtype", lambda size: np.dtype(np.int64))
    for k in (0, 41):
        assert select(name, draw("gaussian", 9, 4099), k).indices.dtype == np.int64
    np.testing.assert_array_equal(select(name, draw("gaussian", 9, 4099), 41).indices, narrow.indices)


@pytest.mark.parametrize(
    ("vector", "k", "message"),
    [
        ([1.0, 2.0], 1, "vector: expected a float32 array of one dimension, got list"),
        (np.zeros(3), 1, r"vector: expected a float32 array of one dimension, got float64 \(3,\)"),
        (np.zeros((3, 1), np.float32), 1, r"got float32 \(3, 1\)"),
        (np.zeros(3, np.float32), 1.5, "k: expected a whole number from 0, got 1.5"),
        (np.zeros(3, np.float32), -1, "k: expected a whole number from 0, got -1"),
    ],
    ids=["list", "float64", "matrix", "fraction", "negative"],
)
def test_what_cannot_be_selected_from_is_refused(vector, k, message):
    with pytest.raises(InvalidArgument, match=message):
        select("mstopk", vector, k)


def test_a_vector_with_gaps_in_memory_is_selected_from_as_it_reads():
    vector = np.arange(20, dtype=np.float32)[::-2]
    assert select("mstopk", vector, 3).values.tolist() == [19.0, 17.0, 15.0]


@pytest.mark.parametrize("bucket", [1, 100, 4096, 10**9])
def test_buckets_have_the_length_that_is_given(bucket):
    selector = make_selector({"name": "bucketed", "bucket": bucket})
    for family, size in (("many_ties", 9000), *(("gaussian", size) for size in (9000, 4096, 1, 0))):
        vector = draw(family, 5, size)
        for k in (0, size // 64, size):
            expected = reference_of_buckets(vector, k, bucket)
            np.testing.assert_array_equal(selector.select(vector, k).indices, expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "bucketed", "bucket": 0}, "bucket: expected a whole number of entries from 1, got 0"),
        ({"name": "bucketed", "bucket": 4.5}, "bucket: expected a whole number of entries from 1, got 4.5"),
        ({"name": "reused", "every": 0}, "every: expected a whole number of calls from 1, got 0"),
        ({"name": "reused", "every": "8"}, "every: expected a whole number of calls from 1, got '8'"),
        ({"name": "exact", "bucket": 4096}, "bucket: exact has no such option (its options: none)"),
        ({"bucket": 4096}, "selector: expected a name, or a record of one and options, got {'bucket': 4096}"),
    ],
)
def test_options_that_a_selector_does_not_take_are_refused(given, message):
    with pytest.raises(InvalidArgument) as caught:
        make_selector(given)
    assert str(caught.value) == message
