"""What sparse reducers make of one step of all ranks: how selections overlap, what is held back."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from commlib import Report, select
from commlib.density import entries
from commlib.vectors import Float32

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepSeen:
    """One step of all ranks.

    ``selected``: entries, mean over ranks; ``applied``: of the mean. ``residual``: norm of the sum of all
    residuals after it, over that of the mean gradient times ranks. Of the exact top-k of every rank's
    gradient plus residual: ``fill_in``, entries of their union over k; ``overlap``, the share of its entries
    that another rank selects, too, mean over pairs. ``xi``: Ok-Topk's ξ, section 4, assumption 1.
    """

    step: int
    target: int
    selected: float
    applied: int
    residual: float
    fill_in: float
    overlap: float
    xi: float

    @classmethod
    def of(
        cls,
        step: int,
        density: float,
        mean: Float32,
        reports: Sequence[Report],
        *,
        gradients: Sequence[Float32],
        before: Sequence[Float32],
        after: Sequence[Float32],
    ) -> "StepSeen":
        """Return what is seen of a step; ``before``, ``after``: the residuals, a vector for each rank."""
        count, k = len(gradients), entries(density, len(mean))
        given = [gradient + residual for gradient, residual in zip(gradients, before, strict=True)]
        times = sum((select("exact", vector, k).to_dense() != 0).astype(np.int64) for vector in given)
        pairs = float((times * (times - 1)).sum())
        gradient = np.mean(gradients, axis=0, dtype=np.float64)
        held_back = sum(np.asarray(residual, np.float64) for residual in after)
        return cls(
            step=step,
            target=k,
            selected=float(np.mean([each.selected for each in reports])),
            applied=reports[0].applied,
            residual=float(np.linalg.norm(held_back) / (count * np.linalg.norm(gradient))),
            fill_in=float(np.count_nonzero(times) / k),
            overlap=pairs / (k * count * max(1, count - 1)),
            xi=_xi(given, mean, gradient, k),
        )


def _xi(given: Sequence[Float32], mean: Float32, gradient: Float64, k: int) -> float:
    """Return ξ: the distance from the step to the top k of the exact mean, over the gradient's norm."""
    exact = np.mean(given, axis=0, dtype=np.float64)
    top = select("exact", exact.astype(np.float32), k).to_dense()
    return float(np.linalg.norm(top - mean) / np.linalg.norm(gradient))
