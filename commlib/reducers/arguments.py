"""Checks of the arguments of reducers: gradients, residuals, and arrays for the mean."""

from types import ModuleType

import ml_dtypes
import numpy as np
import numpy.typing as npt

from commlib.arrays import Workspace, expect_module
from commlib.errors import InvalidArgument
from commlib.vectors import Float32, SparseVector, is_finite


def as_size(size: int) -> int:
    """Return a number of entries; raise ``InvalidArgument`` unless it is a whole number from 1."""
    if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 1:
        raise InvalidArgument(f"size: expected a whole number of entries from 1, got {size!r}")
    return int(size)


def as_gradient(
    gradient: npt.ArrayLike, size: int, arrays: ModuleType = np, workspace: Workspace | None = None
) -> Float32:
    """Return ``gradient`` as contiguous float32 of shape ``(size,)``, without a copy if it is that already.

    ``arrays``: the module whose array it must be, NumPy or CuPy; arrays of the other are refused. With a
    ``workspace`` it is converted in there, under the name "gradient".
    """
    expect_module("gradient", gradient, arrays)
    given = arrays.asarray(gradient)
    if given.dtype.kind not in "fiu" and given.dtype != ml_dtypes.bfloat16:
        raise InvalidArgument(f"gradient: expected real numbers, got {given.dtype}")
    if given.shape != (size,):
        raise InvalidArgument(f"gradient: expected shape ({size},), got {given.shape}")
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes an infinity, and skips the step
        if workspace is None or (given.dtype == np.float32 and given.flags.c_contiguous):
            return arrays.ascontiguousarray(given, np.float32)  # type: ignore[no-any-return]
        converted: Float32 = workspace.get("gradient", size)
        converted[...] = given
        return converted


def as_entries(vector: SparseVector, size: int, arrays: ModuleType = np) -> SparseVector:
    """Return a gradient that is a ``SparseVector`` of ``size`` with contiguous arrays of ``arrays``."""
    expect_module("gradient", vector.values, arrays)
    if vector.size != size:
        raise InvalidArgument(f"gradient: expected a SparseVector of size {size}, got one of {vector.size}")
    indices = None if vector.indices is None else arrays.ascontiguousarray(vector.indices)
    return SparseVector.trusted(size, indices, arrays.ascontiguousarray(vector.values))


def checked_out(out: Float32, gradient: Float32, arrays: ModuleType) -> Float32:
    """Return ``out``; raise ``InvalidArgument`` where the mean of ``gradient`` cannot be written to it."""
    size = len(gradient)
    expect_module("out", out, arrays)
    if out.dtype != np.float32 or out.shape != (size,):
        raise InvalidArgument(
            f"out: expected float32 of shape ({size},), got {out.dtype} of shape {out.shape}"
        )
    if not (out.flags.c_contiguous and getattr(out.flags, "writeable", True)):
        raise InvalidArgument("out: expected a contiguous array that may be written to, got another")
    if arrays is np and np.may_share_memory(out, gradient):
        raise InvalidArgument("out: expected memory apart from the gradient's, got the same")
    return out


def added_residual(carried: Float32 | None, residual: Float32, size: int, arrays: ModuleType) -> Float32:
    """Return the sum as a new float32 vector; raise ``InvalidArgument`` if the sum is not finite."""
    if residual.shape != (size,):
        raise InvalidArgument(f"residual: expected shape ({size},), got {residual.shape}")
    with np.errstate(over="ignore", invalid="ignore"):
        given = arrays.asarray(residual)
        total: Float32 = arrays.asarray(given if carried is None else given + carried, np.float32)
    if not is_finite(total):
        raise InvalidArgument("residual: expected what adds up to finite float32 values, got others")
    return total.copy() if total is residual else total
