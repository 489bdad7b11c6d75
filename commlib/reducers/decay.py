"""Residual decay, ``e ← β·e + g`` (SparseLoCo): what is left of a residual, and what is forgotten."""

import math

import numpy as np

from commlib.arrays import is_on_gpu
from commlib.compiled import compiled
from commlib.reducers.report import Forgotten
from commlib.vectors import Float32

LANES = 16  # sums that do not wait for each other


def decayed(residual: Float32, decay: float, out: Float32) -> Forgotten:
    """Write ``decay·residual`` to ``out``; return what the entries of the residual lack then."""
    np.multiply(residual, np.float32(decay), out=out)
    if is_on_gpu(residual):
        lacking = residual.astype(np.float64) - out
        total, squares = float(lacking.sum()), float((lacking * lacking).sum())
    else:
        total, squares = _sums(residual, out)
    return Forgotten(math.sqrt(squares), total)


@compiled
def _sums(residual: Float32, kept: Float32) -> tuple[float, float]:
    """Return the sum of ``residual - kept``, and that of its squares."""
    totals, squares = np.zeros(LANES), np.zeros(LANES)
    for first in range(0, len(residual), LANES):
        for i in range(first, min(first + LANES, len(residual))):
            lacking = np.float64(residual[i]) - np.float64(kept[i])
            totals[i - first] += lacking
            squares[i - first] += lacking * lacking
    return totals.sum(), squares.sum()
