"""How many entries a density selects."""

from numbers import Real

from commlib.errors import InvalidArgument


def check_density(density: float) -> float:
    """Return ``density`` if it lies in (0, 1]; raise ``InvalidArgument`` otherwise."""
    is_number = isinstance(density, Real) and not isinstance(density, bool)
    if not is_number or not 0 < density <= 1:
        raise InvalidArgument(f"density: expected a number in (0, 1], got {density!r}")
    return float(density)


def entries(density: float, size: int) -> int:
    """Return ``k = max(1, round(ρ·d))``, and 0 of an empty vector.

    >>> entries(0.01, 25_557_032), entries(0.001, 7), entries(0.5, 0)
    (255570, 1, 0)
    """
    return min(size, max(1, round(density * size)))
