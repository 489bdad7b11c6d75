"""Losses of a margin ``z = w·x + b`` and a label ``y``, −1 or +1: their values and derivatives by ``z``."""

import math

from commlib.arrays import compiled

LOSSES = {"logistic": 0, "hinge": 1, "squared_hinge": 2}  # name -> what the kernels call it
LOGISTIC, HINGE, SQUARED_HINGE = LOSSES.values()
# The largest second derivative by the margin, where there is one: what coordinate descent divides by.
CURVATURES = {"logistic": 0.25, "squared_hinge": 2.0}


@compiled
def value_and_slope(loss: int, margin: float, label: float) -> tuple[float, float]:
    """Return ``log(1 + exp(−yz))``, ``max(0, 1 − yz)``, or the square of that, and the derivative by ``z``.

    The hinge's is 0 where it has none.
    """
    signed = label * margin
    if loss == LOGISTIC:
        small = math.exp(-abs(signed))
        return max(0.0, -signed) + math.log1p(small), -label * (small if signed > 0 else 1.0) / (1.0 + small)
    short = max(0.0, 1.0 - signed)
    if loss == HINGE:
        return short, -label if short > 0.0 else 0.0
    return short * short, -2.0 * label * short
