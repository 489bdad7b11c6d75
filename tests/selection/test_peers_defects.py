"""What goes wrong in other implementations of selection, and must not here. Each test names one defect.

Wrong counts, ties, outliers, large densities and bad numbers are among the cases of test_selectors.py.
"""

import numpy as np
import pytest

from benchmarks.gpu import paper_search
from commlib import SELECTORS, select
from commlib.selection import make_selector
from tests.selection.test_selectors import reference

SIZE = 100_003


@pytest.fixture(params=SELECTORS)
def name(request):
    return request.param


def normal(seed, size=SIZE):
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


# ------------------------------------------------------------- MSTopK as published


@pytest.mark.parametrize("seed", range(5))
def test_exact_agrees_with_the_paper_where_its_search_ends(seed):
    vector, k = normal(seed), 300
    upper, lower, above_upper, _ = paper_search(vector, k)
    surely, maybe = (np.flatnonzero(np.abs(vector) >= threshold) for threshold in (upper, lower))
    assert len(surely) == above_upper <= k <= len(maybe)
    agreed = np.intersect1d(
        select("exact", vector, k).indices, [*surely, *np.setdiff1d(maybe, surely)[: k - above_upper]]
    )
    # thirty halvings bring the paper's thresholds within 1e-8 σ: they differ by ties at most
    assert len(agreed) >= 0.99 * k


def test_the_global_random_state_is_neither_read_nor_changed(name):
    vector = np.round(normal(4), 2)
    selections = []
    for seed in (1, 2):
        np.random.seed(seed)
        selections.append(select(name, vector, 1000).indices.tobytes())
        after = np.random.random()
        np.random.seed(seed)
        assert np.random.random() == after
    assert selections[0] == selections[1]


# ------------------------------------------------------------- DGC


@pytest.mark.parametrize("size", [1, 2, 8, 9, 10, 17, 73])
def test_a_vector_shorter_than_the_sample_is_no_error(size):
    vector = normal(7, size)
    for k in range(1, size + 2):
        np.testing.assert_array_equal(select("dgc", vector, k).indices, reference(vector, k))


# ------------------------------------------------------------- Ok-Topk, OmniReduce, BytePS


def test_indices_past_24_bits_are_not_rounded(name):
    size = 2**24 + 4099
    vector = np.zeros(size, np.float32)
    indices = [2**16 + 1, 2**24 + 1, 2**24 + 1027, size - 1]  # not all in float32 or uint16, one a bucket
    vector[indices] = [1, -2, 3, -4]
    selected = make_selector(name).select(vector, 40_000)
    at = np.searchsorted(selected.indices, indices)
    np.testing.assert_array_equal(selected.indices[at], indices)
    np.testing.assert_array_equal(selected.values[at], [1, -2, 3, -4])
