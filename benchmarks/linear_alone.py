"""Linear models in one process, against scikit-learn's solvers; see :mod:`benchmarks.linear`.

All compute on one core. Seconds are the processor's: what else it does meanwhile does not count.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from scipy import sparse

from benchmarks.linear import LinearCase
from commlib import Communicator, Topology
from training.bench.record import Record, Seconds
from training.linear.generated import SHAPES
from training.linear.model import Model
from training.linear.rows import Rows
from training.linear.settings import Settings, checked
from training.linear.sgd import SGD

L2, RATE, RUNS = 1e-6, 2.0, 7
Fitted = tuple[Any, float]  # weights and intercept
ONCE = ("LIBLINEAR",)  # it takes long
MOST_PASSES = 100  # to the objective of a peer


def measure(comm: Communicator, case: LinearCase, rows: int) -> Iterator[Record]:
    """Yield records against SGDClassifier, same passes, and to the objectives of it and of LIBLINEAR."""
    given = case.rows(0, rows)
    matrix = _as_scipy(given)
    same = {"loss": case.loss, "l2": L2, "batch_size": 1, "intercept": False}
    settings = checked({**same, "learning_rate": {"rate": RATE, "schedule": "constant"}})
    peers = {"SGDClassifier": _sgd(case, matrix, given), "LIBLINEAR": _liblinear(case, matrix, given)}
    own = _Own(Topology(comm), given, settings)
    own.fit(1)  # which compiles
    candidates: dict[str, Callable[[], Fitted]] = {"own": partial(own.fit, case.passes), **peers}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    found: dict[str, Fitted] = {}
    for number in range(RUNS):
        for name, fit in candidates.items():
            if number and name in ONCE:
                continue
            start = time.process_time()
            found[name] = fit()
            samples[name].append(time.process_time() - start)
    seconds = {name: Seconds.of(each) for name, each in samples.items()}
    values = {name: own.value(*found[name]) for name in peers}
    facts = {
        **{key: value for key, value in asdict(case).items() if key != "steps"},
        "rows": rows,
        "features": SHAPES[case.shape].features,
        "batch_size": 1,
        "passes": case.passes,
    }
    passes_more = {"objective": own.value(*found["own"]), "peer_objective": values["SGDClassifier"]}
    yield Record(
        "linear", facts | {"until": "passes"}, "one rank", seconds["own"], "SGDClassifier",
        seconds["SGDClassifier"], bytes=None, more=passes_more,
    )  # fmt: skip
    to_end = replace(own, settings=checked({**same, "learning_rate": RATE}))  # which adapts
    for name in peers:
        passes, reached, taken = to_end.until(values[name])
        yield Record(
            "linear", facts | {"until": "objective", "passes": passes}, "one rank", taken, name,
            seconds[name], bytes=None, more={"objective": reached, "peer_objective": values[name]},
        )  # fmt: skip


def _as_scipy(rows: Rows) -> Any:
    """Return the matrix as scikit-learn takes it: float32, which it does not copy, and 32-bit indices."""
    own = rows.matrix
    starts = own.starts.astype(np.int32)
    return sparse.csr_matrix((own.values, own.columns, starts), shape=(len(rows), rows.features))


def _sgd(case: LinearCase, matrix: Any, rows: Rows) -> Callable[[], Fitted]:
    from sklearn.linear_model import SGDClassifier

    def fit() -> Fitted:
        peer = SGDClassifier(
            loss="log_loss" if case.loss == "logistic" else case.loss,
            alpha=L2,
            learning_rate="constant",
            eta0=RATE,
            max_iter=case.passes,
            tol=None,
            fit_intercept=False,
            random_state=1,
        ).fit(matrix, rows.labels)
        return peer.coef_[0], 0.0

    return fit


def _liblinear(case: LinearCase, matrix: Any, rows: Rows) -> Callable[[], Fitted]:
    """Return how LIBLINEAR trains; it would regularize an intercept, so none of the solvers has one."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.svm import LinearSVC

    strength = 1 / (L2 * len(rows))

    def fit() -> Fitted:
        if case.loss == "logistic":
            peer = LogisticRegression(solver="liblinear", C=strength, fit_intercept=False, tol=1e-2)
        else:
            peer = LinearSVC(loss=case.loss, C=strength, fit_intercept=False, tol=1e-1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.simplefilter("ignore", FutureWarning)
            peer.fit(matrix, rows.labels)
        return peer.coef_[0], 0.0

    return fit


@dataclass
class _Own:
    """One rank of this project on some rows."""

    topology: Topology
    rows: Rows
    settings: Settings

    def fit(self, passes: int) -> Fitted:
        solver = self._solver()
        for _ in range(passes):
            solver.run_pass()
        return solver.model.weights, solver.model.intercept

    def until(self, value: float) -> tuple[int, float, Seconds]:
        """Return after how many passes an objective is reached, what it is then, and the seconds of them."""
        start = time.process_time()
        solver = self._solver()
        taken = time.process_time() - start
        reached = solver.value()
        while reached > value and solver.passes < MOST_PASSES:
            start = time.process_time()
            solver.run_pass()
            taken += time.process_time() - start
            reached = solver.value()
        return solver.passes, reached, Seconds.of([taken])

    def value(self, weights: Any, intercept: float) -> float:
        """Return the objective of any weights."""
        solver = self._solver()
        solver.model = Model(self.settings.objective, self.rows.features)
        solver.model.set_weights(np.asarray(weights, np.float32), intercept)
        return solver.value()

    def _solver(self) -> SGD:
        return SGD(self.topology, self.rows, self.settings)
