"""GaussianK: a guessed threshold, lowered until three quarters of k reach it, and never more than 2k."""

import numpy as np
import pytest

from commlib import select
from commlib.selection.gaussian import LOWER, LOWERINGS, predicted_threshold
from tests.selection.test_selectors import reference

SIZE = 200_003


def normal(seed, mean=0.0, deviation=1.0, size=SIZE):
    return np.random.default_rng(seed).normal(mean, deviation, size).astype(np.float32)


@pytest.mark.parametrize(
    ("density", "z"),
    [(0.001, 3.290526731491926), (0.01, 2.575829303548901), (0.1, 1.6448536269514722), (1.0, 0.0)],
)
@pytest.mark.parametrize(("mean", "deviation"), [(0, 1), (-3, 0.5), (1e-30, 1e-32), (0, 1e37)])
def test_the_threshold_is_that_of_a_normal_distribution_with_this_mean_and_deviation(
    density, z, mean, deviation
):
    vector = normal(1, mean, deviation, size=100_000)
    wide = vector.astype(np.float64)
    expected = abs(wide.mean()) + z * wide.std()
    # 1e-9: the variance is a difference of sums of 1e5 products in float64, of which 1e4 times the variance
    # may cancel where the mean is a hundred times the deviation
    assert predicted_threshold(vector, round(density * 100_000)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("k", [200, 2000, 20_000])
def test_of_a_normal_distribution_about_k_are_selected(k):
    count = select("gaussian", normal(2, deviation=3e-5), k).nnz
    assert abs(count - k) <= 5 * k**0.5  # five standard deviations of a binomial count


@pytest.mark.parametrize("k", [150, 2000, 20_000])
@pytest.mark.parametrize("power", [1, 1.5, 3])
def test_all_that_reach_the_first_lowered_threshold_of_three_quarters_are_selected(k, power):
    vector = normal(3)
    vector *= np.abs(vector) ** (power - 1)
    selected = select("gaussian", vector, k)
    threshold = predicted_threshold(vector, k)
    while (np.abs(vector) >= np.float32(threshold)).sum() < 0.75 * k:
        threshold *= LOWER
    reached = np.flatnonzero(np.abs(vector) >= np.float32(threshold))
    expected = reached if len(reached) <= 2 * k else reference(vector, 2 * k)
    np.testing.assert_array_equal(selected.indices, expected)


def test_more_than_twice_k_are_cut_to_the_2k_largest():
    vector = np.full(10_007, 1e-3, np.float32)
    vector[5000:5100] = np.linspace(1, 2, 100)
    vector[5000:5200:2] *= -1
    # The deviation is about 0.15, the threshold for 40 about 0.45: all hundred reach it.
    np.testing.assert_array_equal(select("gaussian", vector, 40).indices, reference(vector, 80))


def test_where_an_outlier_has_made_the_deviation_the_k_largest_are_selected():
    vector = normal(4)
    vector[777] = 1e9
    assert predicted_threshold(vector, 200) * LOWER**LOWERINGS > np.sort(np.abs(vector))[-2]
    np.testing.assert_array_equal(select("gaussian", vector, 200).indices, reference(vector, 200))
