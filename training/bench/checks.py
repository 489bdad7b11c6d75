"""Checks of results in float64: only right ones are timed."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from commlib import Communicator, Reducer, SparseVector
from commlib.agreement import differing, digest
from commlib.tuning.gradients import Gradients
from commlib.vectors import Float32

Order = npt.NDArray[np.int64]

FLOAT32_ROUNDING = 2.0**-24


class WrongResult(Exception):
    """A candidate has a wrong result; the message is one line."""


def ranking(vector: Float32, k: int) -> Order:
    """Return the indices of the ``k`` largest magnitudes, the largest first, ties by lowest index."""
    order: Order = np.argsort(-np.abs(vector.astype(np.float64)), kind="stable")[:k]
    return order.copy()


@dataclass(frozen=True)
class Promise:
    """The promise of a selector that is not exact: it selects ``least·k`` to ``most·k`` entries.

    Of every ``bucket`` entries, or of all, none that is left out is larger than one that is selected.
    """

    least: float
    most: float
    bucket: int | None = None


INEXACT = {"gaussian": Promise(0.75, 2), "reused": Promise(0.5, 2), "bucketed": Promise(1, 1, bucket=512)}


def check_selection(name: str, vector: Float32, largest: Order, selected: SparseVector) -> None:
    """Raise :class:`WrongResult` where ``selected`` breaks the promise of the selector ``name``.

    ``largest``: the ``ranking`` of ``vector``, ``k`` long, which exact selectors select.
    """
    if not np.array_equal(vector[selected.indices_or_range], selected.values):
        raise WrongResult(f"{name}: expected values of the vector at their indices, got others")
    if name in INEXACT:
        _check_inexact(name, INEXACT[name], vector, len(largest), selected)
    elif not np.array_equal(np.sort(largest), selected.indices_or_range):
        k, others = len(largest), len(np.setdiff1d(selected.indices_or_range, largest))
        found = f"{selected.nnz} entries, {others} of them others"
        raise WrongResult(f"{name}: expected the {k} largest entries, got {found}")


def _check_inexact(name: str, promise: Promise, vector: Float32, k: int, selected: SparseVector) -> None:
    least, most = promise.least * k, promise.most * k
    if not least <= selected.nnz <= most:
        raise WrongResult(f"{name}: expected {least:g} to {most:g} entries, got {selected.nnz}")
    bucket = promise.bucket or len(vector)
    magnitudes, starts = np.abs(vector), np.arange(0, len(vector), bucket)
    is_selected = np.zeros(len(vector), bool)
    is_selected[selected.indices_or_range] = True
    left_out = np.maximum.reduceat(np.where(is_selected, 0, magnitudes), starts)
    smallest = np.minimum.reduceat(np.where(is_selected, magnitudes, np.inf), starts)
    if wrong := int(np.count_nonzero(left_out > smallest)):
        text = f"expected the largest of every {bucket} entries, got smaller ones in {wrong} of {len(starts)}"
        raise WrongResult(f"{name}: {text}")


def check_first_step(
    name: str, comm: Communicator, reducer: Reducer, mean: Float32, gradients: Gradients
) -> None:
    """Raise :class:`WrongResult` on all ranks where step 0 lost something or the ranks disagree.

    ``P·mean + Σ residual = Σ gradients``, with no residual for dense reducers, is compared on rank 0.
    """
    disagreeing = differing(comm.allgather_ints([digest([mean.tobytes()])])[:, 0])
    problem = f"ranks {disagreeing} hold another mean than rank 0" if disagreeing else ""
    residuals = _sum_on_root(comm, reducer.residual)
    if residuals is not None and not problem:
        problem = _loss(residuals + comm.size * mean.astype(np.float64), comm.size, gradients)
    if problem := comm.allgather_objects(problem)[0]:
        raise WrongResult(f"{name}: {problem}")


def _sum_on_root(comm: Communicator, vector: Float32) -> npt.NDArray[np.float64] | None:
    """Return the sum over ranks in float64, on rank 0; nothing on the others."""
    if comm.rank != 0:
        comm.send(vector, 0).wait()
        return None
    total, arriving = vector.astype(np.float64), np.empty_like(vector)
    for source in range(1, comm.size):
        comm.receive(arriving, source).wait()
        total += arriving
    return total


def _loss(accounted: npt.NDArray[np.float64], world_size: int, gradients: Gradients) -> str:
    """Return the fault of ``P·mean + Σ residual`` of step 0, an empty text if there is none."""
    expected, magnitudes = gradients.sum_of(world_size)
    # Each entry is added P times, divided once and multiplied once, each time rounded to float32 of at most
    # the sum of the magnitudes.
    allowed = (world_size + 2) * FLOAT32_ROUNDING * magnitudes
    wrong = int(np.count_nonzero(~(np.abs(accounted - expected) <= allowed)))  # ~: a NaN is wrong, too
    if not wrong:
        return ""
    return f"P·mean + Σ residual differs from Σ gradients in {wrong} of {gradients.size} entries"
