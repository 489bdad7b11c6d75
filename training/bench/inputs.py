"""What the benches feed in: drawn from a seed, so that a repeated run sees the same numbers."""

from collections.abc import Callable

import numpy as np

from commlib.tuning.gradients import SEED
from commlib.vectors import Float32

LAWS: dict[str, Callable[[np.random.Generator, int], "np.typing.NDArray[np.float64]"]] = {
    "gaussian": lambda generator, size: generator.standard_normal(size),
    "student-t, 2 degrees": lambda generator, size: generator.standard_t(2, size),
}


def draw(law: str, size: int) -> Float32:
    """Return ``size`` entries of one of the ``LAWS``, float32."""
    return LAWS[law](np.random.default_rng(SEED), size).astype(np.float32)
