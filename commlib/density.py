"""The number of entries that a density selects, and densities of warm-up epochs."""

from commlib.errors import InvalidArgument

# Of the first four epochs (gTop-k, section IV).
GTOPK_WARM_UP = (0.25, 0.0725, 0.015, 0.004)


def check_density(density: float | None, name: str = "density") -> float:
    """Return ``density`` as a float; raise ``InvalidArgument`` about ``name`` unless it lies in (0, 1]."""
    if not isinstance(density, (float, int)) or isinstance(density, bool) or not 0 < density <= 1:
        raise InvalidArgument(f"{name}: expected a number in (0, 1], got {density!r}")
    return float(density)


def entries(density: float, size: int) -> int:
    """Return ``k = max(1, round(ρ·d))``, and 0 of an empty vector.

    >>> entries(0.01, 25_557_032), entries(0.001, 7), entries(0.5, 0)
    (255570, 1, 0)
    """
    return min(size, max(1, round(density * size)))


def exponential(first: float, last: float, epochs: int) -> tuple[float, ...]:
    """Return ``epochs`` densities that fall from ``first`` towards ``last`` as a geometric series.

    DGC's warm-up (section 3.3) goes from 0.25 to 0.001 in four epochs.

    >>> [round(density, 4) for density in exponential(0.25, 0.001, 4)]
    [0.25, 0.0629, 0.0158, 0.004]
    """
    first, last = check_density(first), check_density(last)
    if epochs < 1:
        raise InvalidArgument(f"epochs: expected at least 1, got {epochs}")
    return tuple(first * (last / first) ** (epoch / epochs) for epoch in range(epochs))
