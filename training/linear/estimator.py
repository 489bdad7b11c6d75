"""Linear classifiers with scikit-learn's interface, on the rows of one process or of all ranks of a job.

>>> import numpy as np
>>> X, y = np.array([[1.0, 0], [0, 1], [2, 1], [1, 3]]), np.array([1, 0, 1, 0])
>>> LinearClassifier(l2=0.01, epochs=50, batch_size=2).fit(X, y).score(X, y)
1.0
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import NotFittedError

from commlib import Communicator, InvalidArgument, Topology, transport
from training.linear.config import checked
from training.linear.rows import LARGEST_VALUE, Rows
from training.linear.solvers import make_solver


class LinearClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Logistic regression, or a linear support vector machine, for two classes.

    Under ``mpirun`` all ranks call ``fit``, ``partial_fit`` and ``score`` together, each with its own rows,
    and have the same model afterwards. Labels are any two values, the same on all ranks. The parameters are
    the keys of :class:`training.linear.config.Settings`; ``communicator``: of the ranks, by default those
    of ``mpirun``, or this process alone.

    ``coef_``, ``intercept_``, ``classes_`` and ``n_features_in_`` are as in scikit-learn; ``losses_``: the
    mean loss of each pass over the rows.
    """

    def __init__(
        self,
        loss: str = "logistic",
        *,
        l2: float = 1e-4,
        l1: float = 0.0,
        intercept: bool = True,
        solver: str = "sgd",
        epochs: int = 5,
        batch_size: int = 1000,
        coordinates: int = 100,
        learning_rate: Any = 1.0,
        reducer: Any = "auto",
        seed: int = 1,
        communicator: Communicator | None = None,
    ) -> None:
        self.loss = loss
        self.l2 = l2
        self.l1 = l1
        self.intercept = intercept
        self.solver = solver
        self.epochs = epochs
        self.batch_size = batch_size
        self.coordinates = coordinates
        self.learning_rate = learning_rate
        self.reducer = reducer
        self.seed = seed
        self.communicator = communicator

    classes_: npt.NDArray[Any]

    def fit(self, X: Any, y: npt.ArrayLike) -> "LinearClassifier":
        """Train a new model on the rows of all ranks."""
        return self._fit(X, y)

    def partial_fit(
        self, X: Any, y: npt.ArrayLike, classes: npt.ArrayLike | None = None
    ) -> "LinearClassifier":
        """Take one pass over the rows of all ranks, from the model of the calls before.

        ``classes``: both labels, needed if the first rows lack one. Each call starts at the initial rate.
        """
        before = (self.coef_[0], float(self.intercept_[0])) if hasattr(self, "coef_") else None
        return self._fit(X, y, 1, classes=classes, before=before)

    def _fit(
        self,
        X: Any,
        y: npt.ArrayLike,
        passes: int | None = None,
        *,
        classes: npt.ArrayLike | None = None,
        before: tuple[npt.NDArray[np.float32], float] | None = None,
    ) -> "LinearClassifier":
        # A search takes its values from arrays of NumPy.
        given = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in self.get_params().items()
            if name != "communicator"
        }
        settings, X = checked(given), _as_matrix(X)
        if np.shape(y) != X.shape[:1]:
            got = f"an array of shape {np.shape(y)}"
            raise InvalidArgument(f"y: expected a label for each of {X.shape[0]} rows, got {got}")
        with self._topology() as topology:
            known = self.classes_ if before is not None else classes
            found = np.unique(y) if known is None else np.unique(known)
            self.classes_ = _both(topology, found)
            if before is not None:
                _expect_features(X, len(before[0]))
            rows = Rows.of_matrix(X, _as_signs(y, self.classes_))
            solver = make_solver(topology, rows, settings)
            if before is not None:
                solver.model.set_weights(*before)
            self.losses_ = [solver.run_pass().loss for _ in range(passes or settings.epochs)]
            solver.close()
        self.coef_ = solver.model.weights.reshape(1, -1)
        self.intercept_ = np.array([solver.model.intercept])
        self.n_features_in_ = rows.features
        return self

    @contextmanager
    def _topology(self) -> Iterator[Topology]:
        """Give the ranks; close a communicator that was made for this, unless the block fails."""
        world = self.communicator or transport.mpi.world()
        with Topology(world) as topology:
            yield topology
        if self.communicator is None:
            world.close()

    def decision_function(self, X: Any) -> npt.NDArray[np.float64]:
        """Return ``w·x + b`` of each row: above 0 for the second class."""
        if not hasattr(self, "coef_"):
            raise NotFittedError("this LinearClassifier has no model yet: call fit or partial_fit first")
        X = _as_matrix(X)
        _expect_features(X, self.n_features_in_)
        return np.asarray(X @ self.coef_[0] + self.intercept_[0], np.float64)

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """Return the class of each row."""
        is_second = self.decision_function(X) > 0
        return np.asarray(self.classes_[is_second.astype(int)])

    def score(self, X: Any, y: npt.ArrayLike, sample_weight: Any = None) -> float:
        """Return the share of the rows of all ranks, by weight, whose class is predicted."""
        is_right = self.predict(X) == np.asarray(y)
        weights = np.ones(len(is_right)) if sample_weight is None else np.asarray(sample_weight, np.float64)
        with self._topology() as topology:
            sums = topology.world.allgather_objects((float(weights[is_right].sum()), float(weights.sum())))
        right, all_rows = np.sum(sums, axis=0)
        return float(right / all_rows)


def _both(topology: Topology, found: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the two classes of all ranks, sorted."""
    classes: npt.NDArray[Any] = np.unique(np.concatenate(topology.world.allgather_objects(found)))
    if len(classes) != 2:
        got = f"{len(classes)}: {', '.join(map(str, classes[:5]))}"
        raise InvalidArgument(f"y: expected two classes, got {got}")
    return classes


def _as_matrix(X: Any) -> Any:
    """Return rows as an array, sparse if they are; raise ``InvalidArgument`` unless all are finite."""
    matrix = sparse.csr_array(X) if sparse.issparse(X) else np.asarray(X)
    if matrix.ndim != 2:
        raise InvalidArgument(f"X: expected rows and columns, got an array of shape {matrix.shape}")
    values: Any = matrix.data if sparse.issparse(X) else matrix
    if not (is_finite := np.abs(values) <= LARGEST_VALUE).all():
        raise InvalidArgument(f"X: expected finite numbers of float32, got {values[~is_finite][0]}")
    return matrix


def _as_signs(y: npt.ArrayLike, classes: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    given = np.asarray(y)
    if not (is_known := np.isin(given, classes)).all():
        unknown = given[~is_known][0]
        raise InvalidArgument(f"y: expected {classes[0]} or {classes[1]}, got {unknown}")
    return np.where(given == classes[1], 1, -1).astype(np.int8)


def _expect_features(X: Any, features: int) -> None:
    if X.shape[1] != features:
        raise InvalidArgument(f"X: expected {features} features, got {X.shape[1]}")
