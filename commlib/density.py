"""How many entries a density selects."""

import math

from commlib.errors import InvalidArgument


def check_density(density: float) -> float:
    """Return ``density`` if it lies in (0, 1]; raise ``InvalidArgument`` otherwise."""
    if isinstance(density, bool) or not isinstance(density, (int, float)):
        raise InvalidArgument(f"density: expected a number in (0, 1], got {density!r}")
    if not 0 < density <= 1 or math.isnan(density):
        raise InvalidArgument(f"density: expected a number in (0, 1], got {density}")
    return float(density)


def entries(density: float, size: int) -> int:
    """Return ``k = max(1, round(ρ·d))``, and 0 of an empty vector.

    >>> entries(0.01, 25_557_032), entries(0.001, 7), entries(0.5, 0)
    (255570, 1, 0)
    """
    return min(size, max(1, round(density * size)))
