"""The exact selector: where its threshold comes from, and how it compares with the search of the paper."""

import numpy as np
import pytest

from benchmarks.gpu import paper_search
from commlib import select
from commlib.selection import exact

SIZE = 300_007
BLOCKS = 4688  # of 64


def normal(seed, size=SIZE):
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def largest(vector, k):
    return np.sort(np.argsort(-np.abs(vector.astype(np.float64)), kind="stable")[:k])


def with_an_outlier(seed):
    vector = normal(seed)
    vector[4321] = 1e9
    return vector


@pytest.fixture
def searched(monkeypatch):
    """The lengths of what the threshold is searched in."""
    lengths = []
    kth_largest = exact.kth_largest

    def noted(bits, k, spare):
        lengths.append(len(bits))
        return kth_largest(bits, k, spare)

    monkeypatch.setattr(exact, "kth_largest", noted)
    return lengths


@pytest.mark.parametrize("k", [1, 15, 300, 3000, 3750])
def test_the_threshold_is_searched_in_the_block_maxima(k, searched):
    for vector in (normal(1), with_an_outlier(2), np.full(SIZE, -0.7, np.float32)):
        np.testing.assert_array_equal(select("exact", vector, k).indices, largest(vector, k))
    assert searched == [BLOCKS] * 3


@pytest.mark.parametrize("k", [3751, 30_000, SIZE - 1, SIZE])  # more than four fifths of the blocks
def test_it_is_searched_in_all_entries_where_most_blocks_would_reach_it(k, searched):
    vector = normal(3)
    np.testing.assert_array_equal(select("exact", vector, k).indices, largest(vector, k))
    assert searched == [SIZE]


def test_it_is_searched_once_more_where_the_large_entries_crowd_in_few_blocks(searched):
    vector = np.sort(normal(4))
    np.testing.assert_array_equal(select("exact", vector, 300).indices, largest(vector, 300))
    assert searched == [BLOCKS, SIZE]


# ------------------------------------------------------------- the paper's search


def paper_selection(vector, k):
    """What the paper selects: all that reach its upper threshold, then a run of those between the two."""
    upper, lower, above_upper, _ = paper_search(vector, k)
    magnitudes = np.abs(vector)
    # With no threshold found that k entries or fewer reach, the search leaves ``upper`` at 0 and counts none.
    surely = np.flatnonzero(magnitudes >= upper) if above_upper else np.empty(0, np.int64)
    between = np.setdiff1d(np.flatnonzero(magnitudes >= lower), surely)
    return np.concatenate([surely, between[: k - len(surely)]])


@pytest.mark.parametrize("seed", range(5))
def test_exact_agrees_with_the_paper_on_gaussian_input(seed):
    vector = normal(seed)
    k = 300  # 0.1 %
    agreed = np.intersect1d(select("exact", vector, k).indices, paper_selection(vector, k))
    # thirty halvings bring the paper's thresholds within 1e-8 σ: they differ by ties at most
    assert len(agreed) >= 0.99 * k


@pytest.mark.parametrize(
    "vector",
    [
        normal(5),
        np.round(normal(6)),
        np.full(SIZE, 0.3, np.float32),
        np.zeros(SIZE, np.float32),
        np.round(normal(7) * 300) * np.float32(2.0**-149),
        with_an_outlier(8),
    ],
    ids=["gaussian", "ties", "equal", "zero", "denormal", "outlier"],
)
def test_exact_selects_all_that_reach_the_papers_upper_threshold(vector):
    for k in (30, 300, 3000):
        upper, _, above_upper, _ = paper_search(vector, k)
        surely = np.flatnonzero(np.abs(vector) >= upper) if above_upper else np.empty(0, np.int64)
        assert len(surely) == above_upper <= k
        assert np.isin(surely, select("exact", vector, k).indices).all()


def test_one_outlier_defeats_the_papers_search_but_not_exact():
    vector, k = with_an_outlier(10), 3000
    right = np.intersect1d(paper_selection(vector, k), largest(vector, k))
    # Thirty halvings of 1e9 σ stop at about 0.9 σ, which 35 % of the entries reach. A run of k of these holds
    # its share of the largest 1 %: one in thirty-five is right.
    assert len(right) < 0.1 * k
    np.testing.assert_array_equal(select("exact", vector, k).indices, largest(vector, k))


def test_half_of_all_entries_defeat_the_papers_search_but_not_exact():
    vector, k = normal(11), SIZE // 2
    right = np.intersect1d(paper_selection(vector, k), largest(vector, k))
    # Its thresholds stay above the mean, which 42 % reach; the other 8 % are a run of what does not reach it,
    # in which 8 of 58 are right.
    assert len(right) < 0.9 * k
    np.testing.assert_array_equal(select("exact", vector, k).indices, largest(vector, k))
