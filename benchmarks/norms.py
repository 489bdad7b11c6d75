"""The candidates of ``cloudtrain bench pto``: norms in parts, against all of them on every rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.interleaved import raise_if_wrong
from benchmarks.shapes import Shape
from commlib import Communicator
from commlib.agreement import differing, digest
from commlib.tuning.gradients import SEED
from commlib.vectors import Float32
from pto import Norms

Float64 = npt.NDArray[np.float64]

BLOCK_ENTRIES = 1 << 20
EPSILON = 2.0**-53  # the relative error of one float64 operation
# Of a sum that NumPy adds in pairs of halves down to 128 entries, which it adds eight at a time.
REFERENCE_OPERATIONS = 40


@dataclass(frozen=True)
class Tensors:
    """Weights and gradients, float32, the same on all ranks."""

    weights: Sequence[Float32]
    gradients: Sequence[Float32]

    @classmethod
    def of(cls, shapes: Sequence[Shape]) -> "Tensors":
        """Draw them; each has a scale of its own."""
        generator = np.random.default_rng(SEED)
        block = generator.standard_normal(BLOCK_ENTRIES, np.float32)

        def drawn() -> list[Float32]:
            tensors = [np.resize(block, shape) for shape in shapes]
            for tensor in tensors:
                tensor *= np.float32(10 ** generator.uniform(-3, 0))
            return tensors

        return cls(drawn(), drawn())

    @property
    def sizes(self) -> list[int]:
        """Return the entries of each."""
        return [weight.size for weight in self.weights]

    def squares(self) -> Float64:
        """Return the sums of squares, independent of the candidates: float64 ``(2, tensors)``."""
        return np.array([[_sum_of_squares(each) for each in own] for own in (self.weights, self.gradients)])


def _sum_of_squares(tensor: Float32) -> float:
    flat = tensor.reshape(-1)
    blocks = (flat[low : low + BLOCK_ENTRIES] for low in range(0, flat.size, BLOCK_ENTRIES))
    return math.fsum(float(np.square(block, dtype=np.float64).sum()) for block in blocks)


def check_squares(comm: Communicator, candidates: dict[str, Norms], tensors: Tensors) -> None:
    """Raise ``WrongResult`` on all ranks where sums are wrong, or not the same on all ranks."""
    expected = tensors.squares() if comm.rank == 0 else None
    # The bound of the kernel, then a sum over ranks, and the error of the reference.
    operations = np.array(tensors.sizes) / 64 + 7 + comm.size + REFERENCE_OPERATIONS
    for name, norms in candidates.items():
        squares = norms.squares(tensors.weights, tensors.gradients)
        others = differing(comm.allgather_ints([digest([squares.tobytes()])])[:, 0])
        problem = f"ranks {others} hold other sums of squares than rank 0" if others else ""
        if expected is not None and not problem:
            is_right = np.abs(squares - expected) <= operations * EPSILON * expected
            wrong = np.count_nonzero(~is_right)  # ~: a NaN is wrong, too
            problem = f"{wrong} of {squares.size} sums of squares are wrong" if wrong else ""
        raise_if_wrong(comm, name, problem)
