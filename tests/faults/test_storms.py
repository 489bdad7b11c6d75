"""A storm of faults, shortened; ``python -m tests.faults.storm`` makes one of 20 minutes."""

import pytest

from tests.faults.storm import KINDS, plan, storm
from tests.test_cluster import skip_where_no_cluster_can_be_made


def test_a_storm_is_the_same_each_time_and_has_as_many_faults_as_its_means_say():
    assert plan(1200, 1) == plan(1200, 1) != plan(1200, 2)
    found = [kind for seed in range(100) for _, kind, _ in plan(1200, seed)]
    for kind, (mean, _) in KINDS.items():
        expected = 100 * 1200 / mean
        assert abs(found.count(kind) - expected) < 4 * expected**0.5  # standard deviations
    assert all(0 < at < 1200 for at, _, _ in plan(1200, 1))


@pytest.mark.faults
@pytest.mark.timeout(1500)
def test_a_storm_of_three_minutes_ends_with_the_weights_of_calm_weather_and_leaves_nothing(tmp_path):
    skip_where_no_cluster_can_be_made()
    found = storm(tmp_path, 180, seed=16)
    print(found)
    assert found["steps"] > 0
    assert sum(found["faults"].values()) > 0
