"""The rows of a rank: features in the format of compressed sparse rows, and a label −1 or +1 for each."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib.errors import InvalidArgument
from commlib.vectors import Float32, index_dtype
from training.linear.kernels import Matrix

LABELS = "{-1, +1} or {0, 1}"
LARGEST_VALUE = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Rows:
    """Rows of ``features`` columns, and a label −1 or +1 for each."""

    matrix: Matrix
    labels: Float32
    features: int

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self.labels)

    @classmethod
    def of_matrix(cls, matrix: Any, labels: npt.ArrayLike, features: int | None = None) -> "Rows":
        """Return the rows of a NumPy or SciPy matrix; ``labels`` as in :data:`LABELS`.

        Arrays of the right type are shared.
        """
        from scipy import sparse

        compressed = sparse.csr_array(matrix)
        compressed.sum_duplicates()  # which sorts the columns of each row
        features = compressed.shape[1] if features is None else features
        own = Matrix(
            starts=compressed.indptr.astype(np.int64, copy=False),
            columns=compressed.indices.astype(index_dtype(features), copy=False),
            values=compressed.data.astype(np.float32, copy=False),
        )
        return cls(own, signs(labels), features)


def signs(labels: npt.ArrayLike) -> Float32:
    """Return labels of −1 and +1, or of 0 and 1, as −1 and +1.

    >>> signs([0, 1, 1])
    array([-1.,  1.,  1.], dtype=float32)
    """
    given = np.asarray(labels, np.float64)
    if (wrong := first_wrong_label(given)) is not None:
        raise InvalidArgument(f"labels: expected {LABELS}, got {given[wrong]:g} for row {wrong + 1}")
    return np.where(given > 0, 1, -1).astype(np.float32)


def first_wrong_label(labels: npt.NDArray[np.float64]) -> int | None:
    """Return the first row whose label does not fit the labels before it, if there is one."""
    is_wrong = ~np.isin(labels, (-1, 0, 1))
    both = np.flatnonzero(labels == 0), np.flatnonzero(labels == -1)
    if all(map(len, both)):  # 0 and −1 do not go together
        is_wrong[max(places[0] for places in both)] = True
    return int(np.argmax(is_wrong)) if is_wrong.any() else None
