"""How many entries a density selects."""

import math

import pytest

from commlib import InvalidArgument
from commlib.density import check_density, entries


@pytest.mark.parametrize(
    "density, size, k",
    [
        (0.01, 25_557_032, 255_570),  # ResNet-50
        (0.001, 1000, 1),
        (0.001, 1499, 1),
        (0.001, 1501, 2),
        (1e-9, 1000, 1),  # never none
        (0.3, 1, 1),
        (1.0, 4099, 4099),
        (0.5, 0, 0),
        (0.25, 2**40, 2**38),
    ],
)
def test_k_is_the_rounded_share_but_at_least_one(density, size, k):
    assert entries(density, size) == k


@pytest.mark.parametrize(
    "density", [0, -0.1, 1.0000001, math.inf, math.nan, "0.01", None, True, 0.5j], ids=repr
)
def test_a_density_outside_is_refused_with_its_value(density):
    with pytest.raises(InvalidArgument, match="^density: .*") as caught:
        check_density(density)
    assert str(caught.value).endswith(f"got {density!r}")
