"""Which results of selectors on a GPU are timed."""

import numpy as np
import pytest

from benchmarks.gpu import _check, paper_search, paper_select
from tests.gpu.vectors import normal
from training.bench.record import WrongResult


@pytest.mark.parametrize("k", [1, 10, 500])
def test_the_paper_s_selection_is_what_its_search_says(k):
    vector = normal(20_000)
    indices = paper_select(vector, k, np)
    upper, lower, above_upper, _ = paper_search(vector, k)
    assert len(set(indices.tolist())) == k
    magnitudes = np.abs(vector[indices])
    assert np.count_nonzero(magnitudes >= upper) == above_upper or above_upper == 0
    assert magnitudes.min() >= lower


@pytest.mark.parametrize(
    ("name", "indices", "wrong"),
    [
        ("exact", [1, 3], None),
        ("exact", [3, 1], "ascending"),
        ("exact", [1], "expected 2 to 2 entries, got 1"),
        ("exact", [0, 3], "the largest"),
        ("gaussian", [1, 3, 4], None),
        ("bucketed", [0, 3], None),
    ],
)
def test_only_right_results_are_timed(name, indices, wrong):
    vector = np.array([1, 5, 0, -4, 3], np.float32)
    given = {"size": 5, "k": 2}, vector, np.array(indices), vector[indices], np
    if wrong is None:
        _check(name, *given)
        return
    with pytest.raises(WrongResult, match=wrong):
        _check(name, *given)
