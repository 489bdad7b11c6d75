"""What goes wrong in other implementations of selection, and must not here. Each test names one defect."""

import numpy as np
import pytest

from benchmarks.gpu import paper_search
from commlib import SELECTORS, NonFiniteInput, select
from commlib.selection import make_selector

SIZE = 100_003
EXACT_COUNT = [name for name in SELECTORS if name != "gaussian"]
LARGEST = ["exact", "mstopk", "dgc", "reused"]


@pytest.fixture(params=SELECTORS)
def name(request):
    return request.param


def normal(seed, size=SIZE):
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def largest(vector, k):
    return np.sort(np.argsort(-np.abs(vector.astype(np.float64)), kind="stable")[:k])


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


@pytest.mark.parametrize("selector", LARGEST)
def test_the_threshold_may_lie_below_the_mean(selector):
    vector = normal(1)
    k = SIZE // 2  # 42 % of a normal distribution lie above its mean magnitude
    np.testing.assert_array_equal(select(selector, vector, k).indices, largest(vector, k))


def test_one_outlier_does_not_spoil_the_selection(name):
    vector = normal(2)
    vector[SIZE // 2] = 1e9
    k = 1000
    if name == "bucketed":  # there, the outlier takes one entry of its bucket, and the others lose nothing
        without = vector.copy()
        without[SIZE // 2] = 0
        assert len(np.setdiff1d(select(name, vector, k).indices, select(name, without, k).indices)) == 1
    else:
        np.testing.assert_array_equal(select(name, vector, k).indices, largest(vector, k))


@pytest.mark.parametrize("value", [0.0, -0.0, 0.7, -1.0, 2.0**-149, 3e38])
def test_equal_magnitudes_do_not_select_everything(name, value):
    vector = np.full(SIZE, value, np.float32)
    count = select(name, vector, 1000).nnz
    assert count == (2000 if name == "gaussian" else 1000)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_number_neither_selects_everything_nor_stays_unseen(name, bad):
    vector = normal(3)
    vector[SIZE - 1] = bad
    with pytest.raises(NonFiniteInput):
        select(name, vector, 1000)


@pytest.mark.parametrize("selector", EXACT_COUNT)
def test_the_count_is_never_off_by_one(selector):
    for seed in range(20):
        vector = np.round(normal(seed, size=5003), 1)  # one decimal: ties at every threshold
        for k in (1, 49, 50, 51, 5001, 5002, 5003):
            assert select(selector, vector, k).nnz == k


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


def test_surplus_candidates_are_dropped_by_size_not_by_position():
    vector = normal(5)
    vector[-50:] = np.linspace(10, 11, 50)  # the largest come last
    assert np.isin(np.arange(SIZE - 50, SIZE), select("dgc", vector, 1000).indices).all()


@pytest.mark.parametrize("density", [0.0101, 0.02, 0.3, 0.999, 1.0, 1.5])
def test_a_density_above_that_of_the_sample_is_no_error(density):
    vector = normal(6)
    k = round(density * SIZE)
    np.testing.assert_array_equal(select("dgc", vector, k).indices, largest(vector, k))


@pytest.mark.parametrize("size", [1, 2, 8, 9, 10, 17, 73])
def test_a_vector_shorter_than_the_sample_is_no_error(size):
    vector = normal(7, size)
    for k in range(1, size + 2):
        np.testing.assert_array_equal(select("dgc", vector, k).indices, largest(vector, k))


# ------------------------------------------------------------- GaussianK, RedSync


FAMILIES = {
    "clusters": lambda rng: rng.choice([1.0, 1.0001, 1000.0], SIZE, p=[0.5, 0.4999, 0.0001]),
    "two_values": lambda rng: np.where(rng.random(SIZE) < 0.5, 1.0, -1.0),
    "one_entry": lambda rng: np.where(np.arange(SIZE) == rng.integers(SIZE), 1e30, 0.0),
    "denormals": lambda rng: rng.integers(-1, 2, SIZE) * 2.0**-149,
    "largest_numbers": lambda rng: rng.choice([-3.4e38, 3.4e38], SIZE),
    "zeros": lambda rng: np.zeros(SIZE),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [1, 100, 10_000, 90_000])
def test_the_adjusted_threshold_always_ends_and_its_count_is_bounded(family, k):
    vector = FAMILIES[family](np.random.default_rng(8)).astype(np.float32)
    count = select("gaussian", vector, k).nnz
    assert 0.75 * k <= count <= min(2 * k, SIZE)


# ------------------------------------------------------------- Ok-Topk, OmniReduce, BytePS


@pytest.mark.parametrize("selector", LARGEST)
def test_what_equals_the_threshold_is_selected_too(selector):
    # A strict comparison with the k-th magnitude selects k − 1 entries.
    vector = np.arange(1, 1025, dtype=np.float32)
    assert select(selector, vector, 16).values.tolist() == list(range(1009, 1025))


def test_indices_past_24_bits_are_not_rounded(name):
    size = 2**24 + 4099
    vector = np.zeros(size, np.float32)
    indices = [2**16 + 1, 2**24 + 1, 2**24 + 1027, size - 1]  # not all in float32 or uint16, one a bucket
    vector[indices] = [1, -2, 3, -4]
    selected = make_selector(name).select(vector, 40_000)
    at = np.searchsorted(selected.indices, indices)
    np.testing.assert_array_equal(selected.indices[at], indices)
    np.testing.assert_array_equal(selected.values[at], [1, -2, 3, -4])
