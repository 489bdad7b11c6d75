"""What solvers share: the ranks, their rows, the model, and the report of a pass."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib import InvalidArgument, LinkBytes, Reducer, Report, SparseVector, Topology
from training.linear.kernels import Int64
from training.linear.model import Model, Objective
from training.linear.probe import Choice
from training.linear.rows import Rows
from training.linear.settings import Settings
from training.process.job import all_or_raise

PROBED = 4  # gradients on which ``auto`` compares reducers


class Diverged(ValueError):
    """A gradient or a loss that is not finite; the message is one line."""


@dataclass(frozen=True)
class Pass:
    """One pass over the rows, or the columns.

    ``loss``: the mean over the rows of all ranks; with SGD each before the step that it is part of, else
    before the pass. ``rate``: of the last step. ``seconds``: of this rank, and those of ``communication``
    among them: what the reducer took. ``sent``: by this rank. ``entries``: of all gradients that this rank
    gave, and of all means.
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
        """Return that of a pass of these steps."""
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
        """Return the mean of a gradient; what the reducer wants dense is made so before the time is taken."""
        given: Any = gradient if reducer.takes_entries else gradient.to_dense()
        start = now()
        mean = reducer.reduce(given)
        seconds = now() - start
        assert reducer.last is not None
        if not isinstance(mean, SparseVector):
            mean = SparseVector.trusted(gradient.size, None, mean)
        return mean, cls(gradient.nnz, seconds, reducer.last)


class Solver(ABC):
    """Trains ``model`` on the rows of all ranks of ``topology``; all of them make it and call it together.

    ``counts``: the rows of each rank. ``steps``: of a pass. ``passes``: those that are done. ``choice``: how
    ``auto`` has chosen the reducer, else none.
    """

    steps: int

    def __init__(self, topology: Topology, rows: Rows, settings: Settings) -> None:
        self.topology, self.rows, self.settings = topology, rows, settings
        self.counts = _counts(topology, rows)
        self.model = all_or_raise(topology.world, lambda: _model(settings.objective, rows.features))
        self.passes = 0
        self.choice: Choice | None = None

    @abstractmethod
    def run_pass(self) -> Pass:
        """Take the steps of a pass; raise ``Diverged`` on all ranks."""

    @abstractmethod
    def close(self) -> None:
        """Close the reducer."""

    def mean_loss(self) -> float:
        """Return the mean loss of the rows of all ranks; all call it together."""
        slopes = np.empty(len(self.rows))
        return self.mean_of_all(self.model.slopes(self.rows, np.arange(len(self.rows)), slopes))

    def value(self) -> float:
        """Return the objective; all call it together."""
        return self.mean_loss() + self.model.penalty()

    def mean_of_all(self, loss: float) -> float:
        """Return the mean over the rows of all ranks, of which ``loss`` is this rank's sum; collective."""
        losses: list[float] = self.topology.world.allgather_objects(loss)
        return sum(losses) / int(self.counts.sum())


def _model(objective: Objective, features: int) -> Model:
    try:
        return Model(objective, features)
    except MemoryError as error:
        raise InvalidArgument(f"features: expected memory for so many weights, got {features:,}") from error


def _counts(topology: Topology, rows: Rows) -> Int64:
    """Return how many rows each rank has; raise ``InvalidArgument`` on all ranks where one has none.

    Or where they have not the same number of features. All ranks call it together.
    """
    counts, features = topology.world.allgather_ints([len(rows), rows.features]).T
    if not counts.all():
        empty = int(np.argmin(counts))
        raise InvalidArgument(f"rows: expected one or more on each rank, got none on rank {empty}")
    if (features != features[0]).any():
        raise InvalidArgument(
            f"rows: expected as many features on each rank, got {', '.join(map(str, features))}"
        )
    return np.asarray(counts, np.int64)
