"""What solvers share: ranks, rows, model, the report of a pass, and the choice of ``reducer: auto``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

import numpy as np

from commlib import REDUCERS, InvalidArgument, LinkBytes, Reducer, Report, SparseVector, Topology
from commlib.reducers import SelectingReducer
from commlib.vectors import Float32
from training.config.reducers import AUTO
from training.linear import kernels
from training.linear.config import Settings, make_lossless
from training.linear.kernels import LOSSES, Float64, Int64, Matrix, Weights
from training.linear.rows import Rows
from training.process.job import all_or_raise

PROBED = 4  # gradients on which ``auto`` compares reducers
WARM_UP = 1  # of these, not timed
WIRES = ("fp32", "gap")  # the codecs without loss


class Model:
    """Weights of float32 and an intercept, which are 0 at first.

    The objective is ``(1/N)·Σ loss(yᵢ, w·xᵢ + b) + l2/2·‖w‖² + l1·‖w‖₁``: the intercept ``b`` is not
    regularized. A gradient has ``size`` entries, of which the last is that of the intercept, if there is one.
    A step costs as much as its gradient has entries, also with regularization.
    """

    def __init__(self, settings: Settings, features: int) -> None:
        self.settings = settings
        self.size = features + settings.intercept
        self._loss = LOSSES[settings.loss]
        seen = np.zeros(features if settings.l1 else 0)
        self._weights = Weights(np.zeros(features, np.float32), seen, 0.0, 1.0, 0.0)

    @property
    def intercept(self) -> float:
        return self._weights.intercept

    @property
    def weights(self) -> Float32:
        """Return the weights, an array of the model: the next step overwrites it."""
        kernels.settle(self._weights)
        self._weights = self._weights._replace(shrunk=0.0, scale=1.0)
        return self._weights.v

    def set_weights(self, weights: Float32, intercept: float) -> None:
        """Take other weights, which are copied."""
        self._weights.v[...] = weights
        self._weights.seen[...] = 0.0
        self._weights = self._weights._replace(shrunk=0.0, scale=1.0, intercept=intercept)

    def margins(self, rows: Rows) -> Float64:
        """Return ``w·x + b`` of each row."""
        return kernels.margins_of(rows.matrix, self._weights)

    def slopes(self, rows: Rows, numbers: Int64, slopes: Float64) -> float:
        """Write the derivatives of the losses of some rows by their margins; return the sum of the losses."""
        return kernels.slopes_of(self._loss, rows.matrix, rows.labels, numbers, self._weights, slopes)

    def step(self, gradient: SparseVector, rate: float) -> None:
        """Step against the gradient of the mean loss: ``w ← soft((1 − rate·l2)·w − rate·g, rate·l1)``.

        The last stored entry of the gradient is that of the intercept, if the model has one.
        """
        settings, count = self.settings, gradient.nnz - self.settings.intercept
        _, _, shrunk, scale, intercept = self._weights
        scale *= 1.0 - rate * settings.l2
        if gradient.indices is None:
            kernels.add_dense(gradient.values[:count], -rate / scale, self._weights)
        else:
            entries = Matrix(np.array([0, count]), gradient.indices, gradient.values)
            kernels.add_row(entries, 0, -rate / scale, self._weights)
        if settings.intercept:
            intercept -= rate * float(gradient.values[-1])
        shrunk += rate * settings.l1 / scale
        self._weights = self._weights._replace(shrunk=shrunk, scale=scale, intercept=intercept)
        if scale < kernels.SMALLEST_SCALE:
            _ = self.weights

    def pass_alone(self, rows: Rows, order: Int64, bounds: Int64, rates: Float64) -> float:
        """Take a step for each batch of ``order``, as a single rank; return the sum of the losses before."""
        settings = self.settings
        batches, penalties = (order, bounds, rates), (settings.l2, settings.l1)
        total, shrunk, scale, intercept = kernels.pass_of_one_rank(
            self._loss, rows.matrix, rows.labels, batches, self._weights, penalties, settings.intercept
        )
        self._weights = self._weights._replace(shrunk=shrunk, scale=scale, intercept=intercept)
        return total

    def penalty(self) -> float:
        """Return ``l2/2·‖w‖² + l1·‖w‖₁``."""
        squares, magnitudes = kernels.norms(self._weights)
        return self.settings.l2 / 2 * squares + self.settings.l1 * magnitudes


class Diverged(ValueError):
    """A gradient or a loss that is not finite; the message is one line."""


@dataclass(frozen=True)
class Pass:
    """One pass over the rows, or the columns.

    ``loss``: the mean over the rows of all ranks, with SGD of each row before its step, else before the pass.
    ``rate``: of the last step. ``seconds``: of this rank, of which the reducer took ``communication``.
    ``sent``: by this rank. ``entries``: of all gradients of this rank, and of all means.
    """

    loss: float
    rate: float
    steps: int
    seconds: float
    communication: float = 0.0
    sent: LinkBytes = LinkBytes()
    entries: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, taken: Sequence["Taken"], *, loss: float, rate: float, seconds: float) -> "Pass":
        """Return the report of a pass of these steps."""
        return cls(
            loss=loss,
            rate=rate,
            steps=len(taken),
            seconds=seconds,
            communication=sum(each.seconds for each in taken),
            sent=sum((each.report.traffic.sent for each in taken), LinkBytes()),
            entries=(sum(each.given for each in taken), sum(each.report.applied for each in taken)),
        )


@dataclass(frozen=True)
class Taken:
    """A step: the entries that this rank gave, how long the reducer took, and what it reports."""

    given: int
    seconds: float
    report: Report

    @classmethod
    def by(
        cls, reducer: Reducer, gradient: SparseVector, now: Callable[[], float]
    ) -> tuple[SparseVector, "Taken"]:
        """Return the mean of a gradient. A conversion for reducers of dense gradients is not timed."""
        given: Any = gradient if reducer.takes_entries else gradient.to_dense()
        start = now()
        mean = reducer.reduce(given)
        seconds = now() - start
        assert reducer.last is not None
        if not isinstance(mean, SparseVector):
            mean = SparseVector.trusted(gradient.size, None, mean)
        return mean, cls(gradient.nnz, seconds, reducer.last)


@dataclass(frozen=True)
class Choice:
    """A reducer, and the seconds of its steps and of those of ``dense``, on the slowest rank."""

    name: str
    options: dict[str, str]
    seconds: float
    dense_seconds: float

    def __str__(self) -> str:
        wire = f" with {self.options['wire']}" if self.options else ""
        times = f"{self.seconds * 1e3:.3g} ms a step, dense {self.dense_seconds * 1e3:.3g} ms"
        return f"reducer: {self.name}{wire}, {times}"


class Solver(ABC):
    """Trains ``model`` on the rows of all ranks of ``topology``; all calls are collective.

    ``counts``: the rows of each rank. ``steps``: of a pass. ``passes``: done so far. ``choice``: of ``auto``.
    """

    steps: int

    def __init__(self, topology: Topology, rows: Rows, settings: Settings) -> None:
        self.topology, self.rows, self.settings = topology, rows, settings
        self.counts = _counts(topology, rows)
        self.model = all_or_raise(topology.world, lambda: _model(settings, rows.features))
        self.reducer: Reducer | None = None
        self.passes = 0
        self.choice: Choice | None = None

    @abstractmethod
    def run_pass(self) -> Pass:
        """Take the steps of a pass; raise ``Diverged`` on all ranks."""

    def make_reducer(self, gradients: Iterable[SparseVector]) -> Reducer:
        """Return the reducer of the settings; for ``auto``, the fastest on the first of ``gradients``."""
        name, options = self.settings.reducer.name or AUTO, self.settings.reducer.options
        if name == AUTO:
            self.choice = choose(self.topology, gradients)
            name, options = self.choice.name, self.choice.options
        return make_lossless(name, self.topology, self.model.size, options)

    def close(self) -> None:
        if self.reducer is not None:
            self.reducer.close()

    def mean_loss(self) -> float:
        """Return the mean loss of the rows of all ranks."""
        slopes = np.empty(len(self.rows))
        return self.mean_of_all(self.model.slopes(self.rows, np.arange(len(self.rows)), slopes))

    def value(self) -> float:
        """Return the objective."""
        return self.mean_loss() + self.model.penalty()

    def mean_of_all(self, loss: float) -> float:
        """Return the mean over the rows of all ranks; ``loss``: the sum over this rank's rows."""
        losses: list[float] = self.topology.world.allgather_objects(loss)
        return sum(losses) / int(self.counts.sum())


def _model(settings: Settings, features: int) -> Model:
    try:
        return Model(settings, features)
    except MemoryError as error:
        raise InvalidArgument(f"features: expected memory for so many weights, got {features:,}") from error


def _counts(topology: Topology, rows: Rows) -> Int64:
    """Return how many rows each rank has.

    Raises ``InvalidArgument`` on all ranks if one has no row, or their features differ.
    """
    counts, features = topology.world.allgather_ints([len(rows), rows.features]).T
    if not counts.all():
        empty = int(np.argmin(counts))
        raise InvalidArgument(f"rows: expected one or more on each rank, got none on rank {empty}")
    if (features != features[0]).any():
        got = ", ".join(map(str, features))
        raise InvalidArgument(f"rows: expected as many features on each rank, got {got}")
    return np.asarray(counts, np.int64)


def choose(topology: Topology, gradients: Iterable[SparseVector]) -> Choice:
    """Return the fastest reducer that sends everything, measured on a run's first gradients; collective.

    The time to add sparse gradients depends on how many entries they share, which is not known beforehand
    (SparCML, section 5.3).
    """
    probed = list(islice(gradients, PROBED))
    probed += probed[-1:] * (PROBED - len(probed))  # equally many on each rank
    candidates = [
        (name, options)
        for name, reducer in REDUCERS.items()
        for options in ([{"wire": wire} for wire in WIRES] if reducer.sparse else [dict[str, str]()])
        if not reducer.sparse or issubclass(reducer, SelectingReducer)  # the others cannot send all entries
    ]
    seconds = [_seconds(topology, name, options, probed) for name, options in candidates]
    best = min(range(len(seconds)), key=seconds.__getitem__)
    dense = next(number for number, (name, _) in enumerate(candidates) if name == "dense")
    return Choice(*candidates[best], seconds[best], seconds[dense])


def _seconds(
    topology: Topology, name: str, options: dict[str, str], gradients: Sequence[SparseVector]
) -> float:
    """Return the median of the seconds of the timed steps, each on its slowest rank."""
    world, own = topology.world, list[float]()
    with make_lossless(name, topology, gradients[0].size, options) as reducer:
        for gradient in gradients:
            world.barrier()
            start = world.now()
            reducer.reduce(gradient)
            own.append(world.now() - start)
    everyone: list[list[float]] = world.allgather_objects(own)
    slowest: list[float] = [max(step) for step in zip(*everyone, strict=True)]
    return median(slowest[WARM_UP:])
