"""DGC: a threshold from a sample, lowered where too few reach it; the exact search where it is far off."""

import numpy as np
import pytest

from commlib import select
from commlib.selection import dgc

SIZE = 100_003
EVERY = 9  # entries of a vector so short: the sample takes one of each


def reference(vector, k):
    return np.sort(np.argsort(-np.abs(vector.astype(np.float64)), kind="stable")[:k])


def normal(seed):
    return np.random.default_rng(seed).standard_normal(SIZE, dtype=np.float32)


@pytest.fixture
def found(monkeypatch):
    """How many entries reached each threshold that was tried; None for far too many."""
    counts = []
    reaching = dgc.reaching

    def counted(*args, **settings):
        candidates = reaching(*args, **settings)
        counts.append(None if candidates is None else candidates.nnz)
        return candidates

    monkeypatch.setattr(dgc, "reaching", counted)
    return counts


@pytest.fixture
def exact_searches(monkeypatch):
    calls = []
    select_by_blocks = dgc.Exact.select_by_blocks

    def counted(self, vector, maxima, k):
        calls.append(k)
        return select_by_blocks(self, vector, maxima, k)

    monkeypatch.setattr(dgc.Exact, "select_by_blocks", counted)
    return calls


@pytest.mark.parametrize("k", [100, 1000, 10_000])
def test_a_sample_like_the_vector_gives_a_threshold_that_a_few_more_than_k_reach(k, found, exact_searches):
    vector = normal(1)
    np.testing.assert_array_equal(select("dgc", vector, k).indices, reference(vector, k))
    (count,) = found
    # Four standard deviations and four entries of the sample above the expected k/9: 42 for k = 100, and for
    # k = 10,000 1,250. So many times nine are expected to reach it, and four standard deviations more may.
    rank = k / EVERY + 4 * (k / EVERY) ** 0.5 + 5
    assert k <= count <= EVERY * (rank + 4 * rank**0.5)
    assert exact_searches == []


def test_where_too_few_reach_the_threshold_it_is_lowered(found, exact_searches):
    # A quarter larger where the sample looks: it expects a threshold that too few of the others reach.
    vector = normal(2)
    vector[::EVERY] *= 1.25
    np.testing.assert_array_equal(select("dgc", vector, 2000).indices, reference(vector, 2000))
    assert found[0] < 2000 <= found[-1]
    assert exact_searches == []


def test_where_two_lowerings_do_not_suffice_the_exact_search_finds_it(found, exact_searches):
    # A thousand times as large where the sample looks: no threshold of its own lets the others pass.
    vector = normal(3)
    vector[::EVERY] *= 1000
    np.testing.assert_array_equal(select("dgc", vector, 20_000).indices, reference(vector, 20_000))
    assert len(found) == 3
    assert max(found) < 20_000
    assert exact_searches == [20_000]


def test_where_far_too_many_reach_the_threshold_the_exact_search_finds_it(found, exact_searches):
    vector = normal(4)
    vector[::EVERY] = 0
    np.testing.assert_array_equal(select("dgc", vector, 1000).indices, reference(vector, 1000))
    assert found == [None]
    assert exact_searches == [1000]


def test_a_density_that_no_sample_can_tell_is_left_to_the_exact_search(found, exact_searches):
    vector = normal(5)
    for k in (SIZE - 1, SIZE):
        np.testing.assert_array_equal(select("dgc", vector, k).indices, reference(vector, k))
    assert found == []
    assert exact_searches == [SIZE - 1, SIZE]
