"""The promises of every selector, stated once. A line in CASES buys the whole suite."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from commlib import SELECTORS, InvalidArgument, NonFiniteInput, UnknownName, select, vectors
from commlib.selection import make_selector, mstopk

# Every selector, and whether it promises the k largest (the others promise the count and the shape only).
CASES = {"exact": True, "mstopk": True, "reused": True}  # a new `reused` begins with an exact call
WITHOUT_MEMORY = [name for name in CASES if not make_selector(name).state_dict()]
LARGEST = [name for name, is_largest in CASES.items() if is_largest]


@pytest.fixture(params=CASES)
def name(request):
    return request.param


def reference(vector, k):
    """The indices of the k largest magnitudes in float64, ties by lowest index, ascending."""
    order = np.argsort(-np.abs(vector.astype(np.float64)), kind="stable")
    return np.sort(order[:k])


def gaussian(rng, size):
    return rng.standard_normal(size)


def heavy_tails(rng, size):
    with np.errstate(over="ignore"):
        return np.clip(rng.standard_cauchy(size) ** 3, -3e38, 3e38)


def many_ties(rng, size):
    return rng.integers(-2, 3, size)


def all_equal(rng, size):
    return np.full(size, rng.standard_normal()) * rng.choice([-1, 1], size)


def all_zero(rng, size):
    return np.zeros(size)


def negative_zeros(rng, size):
    return np.where(rng.random(size) < 0.5, -0.0, rng.choice([0.0, 1.0], size))


def denormals(rng, size):
    return rng.integers(-1000, 1001, size) * 2.0**-149


def one_outlier(rng, size):
    vector = rng.standard_normal(size)
    vector[rng.integers(size)] = 1e9
    return vector


def near_the_last_bit(rng, size):
    return 1.0 + rng.integers(0, 50, size) * 2.0**-23


def every_magnitude(rng, size):
    bits = rng.integers(0, 0x7F80_0000, size, dtype=np.uint32)  # below the first infinity
    return bits.view(np.float32) * rng.choice([-1, 1], size).astype(np.float32)


FAMILIES = [
    gaussian,
    heavy_tails,
    many_ties,
    all_equal,
    all_zero,
    negative_zeros,
    denormals,
    one_outlier,
    near_the_last_bit,
    every_magnitude,
]


def draw(family, seed, size):
    return family(np.random.default_rng([seed, size]), size).astype(np.float32)


def test_every_selector_has_a_case():
    assert set(CASES) == set(SELECTORS)


# None, one, and sizes around the kernels' unrolling by four and their 1,024 bins a digit.
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7, 1023, 1025])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_the_count_is_exactly_the_smaller_of_k_and_size(name, family, size):
    vector = draw(family, 1, size) if size else np.zeros(0, np.float32)
    for k in {0, 1, 2, size // 3, size - 1, size, size + 1, 10 * size + 7}:
        if k >= 0:
            assert select(name, vector, k).entries == min(k, size)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_indices_are_sorted_and_unique_and_lead_to_the_values(name, family):
    vector = draw(family, 2, 4099)
    selected = select(name, vector, 411)
    assert selected.size == 4099
    assert selected.indices.dtype == np.int32
    assert (np.diff(selected.indices) > 0).all()
    assert selected.indices[0] >= 0
    assert selected.indices[-1] < 4099
    assert selected.values.dtype == np.float32
    assert selected.values.tobytes() == vector[selected.indices].tobytes()  # the sign of zero, too


def test_an_empty_vector_gives_an_empty_selection_of_the_right_types(name):
    selected = select(name, np.zeros(0, np.float32), 3)
    assert selected.size == 0
    assert (selected.indices.dtype, selected.values.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize("name", LARGEST)
@settings(deadline=None, max_examples=200)  # the first example waits for the compiler
@given(
    family=st.sampled_from(FAMILIES),
    seed=st.integers(0, 2**32),
    size=st.integers(1, 5000),
    share=st.floats(0, 1.1),
)
def test_the_largest_are_selected_ties_by_lowest_index(name, family, seed, size, share):
    vector = draw(family, seed, size)
    k = round(share * size)
    np.testing.assert_array_equal(select(name, vector, k).indices, reference(vector, k))


@pytest.mark.parametrize("name", LARGEST)
@settings(deadline=None, max_examples=200)
@given(
    vector=st_numpy.arrays(
        np.float32,
        st.integers(1, 40),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True),
    ),
    k=st.integers(0, 45),
)
def test_the_largest_of_any_few_floats_are_selected(name, vector, k):
    np.testing.assert_array_equal(select(name, vector, k).indices, reference(vector, k))


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_of_two_million_are_selected(name):
    vector = draw(gaussian, 3, 2_000_003)
    for k in (1, 2_000, 20_001):
        np.testing.assert_array_equal(select(name, vector, k).indices, reference(vector, k))


@pytest.mark.parametrize("name", LARGEST)
@pytest.mark.parametrize("k", [1, 7, 999, 1000])
def test_of_equal_magnitudes_the_first_are_selected_whatever_their_sign(name, k):
    vector = np.where(np.arange(1000) % 3, 2.5, -2.5).astype(np.float32)
    np.testing.assert_array_equal(select(name, vector, k).indices, np.arange(k))


@pytest.mark.parametrize("name", LARGEST)
def test_the_smallest_denormal_beats_both_zeros(name):
    vector = np.array([0.0, -0.0, -(2.0**-149), 0.0], np.float32)
    np.testing.assert_array_equal(select(name, vector, 1).indices, [2])
    np.testing.assert_array_equal(select(name, vector, 3).indices, [0, 1, 2])


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf], ids=["nan", "-nan", "inf", "-inf"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 4099])
def test_a_bad_number_anywhere_is_refused_whatever_k(name, bad, size):
    for position in {0, size // 2, size - 1}:
        vector = draw(gaussian, 4, size)
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


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_the_same_input_gives_the_same_selection_from_a_new_or_a_used_selector(name, family):
    vector = draw(family, 5, 4099)
    used = make_selector(name)
    used.select(draw(gaussian, 6, 777), 77)
    for k in (1, 41, 4000):
        first, second, third = select(name, vector, k), select(name, vector, k), used.select(vector, k)
        assert first.indices.tobytes() == second.indices.tobytes() == third.indices.tobytes()
        assert first.values.tobytes() == second.values.tobytes() == third.values.tobytes()


def test_the_input_is_not_changed_and_the_result_shares_nothing_with_it(name):
    vector = draw(gaussian, 7, 1001)
    before = vector.copy()
    for k in (0, 10, 1001, 2000):
        select(name, vector, k).values[:] = np.inf
        assert vector.tobytes() == before.tobytes()


def test_a_read_only_input_is_accepted(name):
    vector = draw(gaussian, 8, 1001)
    writable = select(name, vector, 10)
    vector.flags.writeable = False
    np.testing.assert_array_equal(select(name, vector, 10).indices, writable.indices)


def test_a_negative_k_is_refused_by_name_and_number(name):
    with pytest.raises(InvalidArgument, match="k: expected a whole number from 0, got -1"):
        select(name, np.ones(3, np.float32), -1)


def test_an_unknown_selector_lists_the_known_ones_and_suggests_the_nearest():
    with pytest.raises(UnknownName, match='unknown selector "mstopkk"') as caught:
        select("mstopkk", np.ones(3, np.float32), 1)
    assert f"(known: {', '.join(SELECTORS)})" in str(caught.value)
    assert str(caught.value).endswith(', did you mean "mstopk"?')


def test_an_unknown_selector_unlike_any_other_gets_no_suggestion():
    with pytest.raises(UnknownName, match=r"\)$"):
        select("zzz", np.ones(3, np.float32), 1)


def test_indices_past_31_bits_are_int64_and_the_selection_is_the_same(name, monkeypatch):
    """A vector that needs them has 8 GiB: here the type is changed, and the code that uses it is the same."""
    narrow = select(name, draw(gaussian, 9, 4099), 41)
    for module in (vectors, mstopk, sys.modules[SELECTORS[name].__module__]):
        monkeypatch.setattr(module, "index_dtype", lambda size: np.dtype(np.int64))
    for k in (0, 41):
        assert select(name, draw(gaussian, 9, 4099), k).indices.dtype == np.int64
    np.testing.assert_array_equal(select(name, draw(gaussian, 9, 4099), 41).indices, narrow.indices)


# ------------------------------------------------------------- mstopk and the search that it makes exact


def paper_selection(vector, k):
    """What the paper selects: all that reach its upper threshold, then a run of those between the two."""
    upper, lower, above_upper, _ = mstopk.paper_search(vector, k)
    magnitudes = np.abs(vector)
    # With no threshold found that k entries or fewer reach, the search leaves ``upper`` at 0 and counts none.
    surely = np.flatnonzero(magnitudes >= upper) if above_upper else np.empty(0, np.int64)
    between = np.setdiff1d(np.flatnonzero(magnitudes >= lower), surely)
    return np.concatenate([surely, between[: k - len(surely)]])


@pytest.mark.parametrize("seed", range(5))
def test_mstopk_agrees_with_the_paper_on_gaussian_input(seed):
    vector = draw(gaussian, seed, 300_007)
    k = 300  # 0.1 %
    agreed = np.intersect1d(select("mstopk", vector, k).indices, paper_selection(vector, k))
    # thirty halvings bring the paper's thresholds within 1e-8 σ: they differ by ties at most
    assert len(agreed) >= 0.99 * k


# The paper's search needs a mean: families whose float32 sum is an infinity are none of its business.
@pytest.mark.parametrize("family", [gaussian, many_ties, all_equal, all_zero, denormals, one_outlier])
def test_mstopk_selects_all_that_reach_the_papers_upper_threshold(family):
    vector = draw(family, 10, 30_011)
    for k in (30, 300, 3000):
        upper, _, above_upper, _ = mstopk.paper_search(vector, k)
        surely = np.flatnonzero(np.abs(vector) >= upper) if above_upper else np.empty(0, np.int64)
        assert len(surely) == above_upper <= k
        assert np.isin(surely, select("mstopk", vector, k).indices).all()


def test_the_papers_counts_are_those_of_its_thresholds_and_enclose_k():
    vector = draw(gaussian, 11, 30_011)
    magnitudes = np.abs(vector)
    upper, lower, above_upper, above_lower = mstopk.paper_search(vector, 300, samplings=5)
    assert lower < upper
    assert (above_upper, above_lower) == ((magnitudes >= upper).sum(), (magnitudes >= lower).sum())
    assert above_upper <= 300 < above_lower
    # with all thirty, the two enclose the gap between the 300th and the 301st, and nothing else
    assert mstopk.paper_search(vector, 300)[2:] == (300, 301)


def test_one_outlier_defeats_the_papers_search_but_not_mstopk():
    vector = draw(one_outlier, 12, 300_007)
    k = 3000
    largest = reference(vector, k)
    right = np.intersect1d(paper_selection(vector, k), largest)
    # Thirty halvings of 1e9 σ stop at about 0.9 σ, which 35 % of the entries reach. A run of k of these holds
    # its share of the largest 1 %: one in thirty-five is right.
    assert len(right) < 0.1 * k
    np.testing.assert_array_equal(select("mstopk", vector, k).indices, largest)


# ------------------------------------------------------------- the passes of mstopk, one by one


def reference_bins(vector):
    return (vector.view(np.uint32) & 0x7FFF_FFFF) >> mstopk.LEADING


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 4099])
@pytest.mark.parametrize("family", [gaussian, every_magnitude, negative_zeros])
def test_the_histogram_counts_every_magnitude_in_its_bin(family, size):
    vector = draw(family, 13, size)
    counts = mstopk._histogram(vector.view(np.uint32))
    np.testing.assert_array_equal(counts, np.bincount(reference_bins(vector), minlength=mstopk.BINS))


def test_the_non_finite_lie_in_bins_of_their_own():
    bad = np.array([np.nan, np.inf, -np.inf, -np.nan], np.float32)
    counts = mstopk._histogram(bad.view(np.uint32))
    assert counts[mstopk.FIRST_NON_FINITE_BIN :].sum() == 4
    largest = np.array([np.finfo(np.float32).max, 2.0**-149, 0], np.float32)
    assert mstopk._histogram(largest.view(np.uint32))[mstopk.FIRST_NON_FINITE_BIN :].sum() == 0


def test_the_second_pass_keeps_what_lies_in_the_bin_or_above():
    vector = draw(heavy_tails, 14, 4099)
    bins = reference_bins(vector)
    for threshold_bin in (int(np.median(bins)), int(bins.max())):
        expected = np.flatnonzero(bins >= threshold_bin)
        indices = np.empty(len(expected) + 1, np.int32)
        mstopk.compact(vector.view(np.uint32), np.uint32(threshold_bin << mstopk.LEADING), indices)
        np.testing.assert_array_equal(indices[:-1], expected)


def test_the_last_pass_tells_neighbours_in_one_bin_apart():
    vector = draw(near_the_last_bit, 15, 1001)
    candidates = np.arange(1001, dtype=np.int32)
    threshold_bin = int(reference_bins(vector)[0])
    assert (reference_bins(vector) == threshold_bin).all()
    for k in (1, 2, 500, 1001):
        kept = mstopk._keep_largest(vector.view(np.uint32), candidates, k, threshold_bin)
        np.testing.assert_array_equal(kept, reference(vector, k))


@pytest.mark.parametrize(
    ("vector", "k", "message"),
    [
        ([1.0, 2.0], 1, "vector: expected a float32 array of one dimension, got list"),
        (np.zeros(3), 1, r"vector: expected a float32 array of one dimension, got float64 \(3,\)"),
        (np.zeros((3, 1), np.float32), 1, r"got float32 \(3, 1\)"),
        (np.zeros(3, np.float32), 1.5, "k: expected a whole number from 0, got 1.5"),
    ],
    ids=["list", "float64", "matrix", "fraction"],
)
def test_what_cannot_be_selected_from_is_refused(vector, k, message):
    with pytest.raises(InvalidArgument, match=message):
        select("mstopk", vector, k)


def test_a_vector_with_gaps_in_memory_is_selected_from_as_it_reads():
    vector = np.arange(20, dtype=np.float32)[::-2]
    assert select("mstopk", vector, 3).values.tolist() == [19.0, 17.0, 15.0]
