"""ARC-Top-K: all ranks pick the same rows by a shared sketch, and all-reduce those without an index.

Xiong et al. 2025 (arXiv 2510.26709), with classic error feedback.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from commlib.cost import Cost, LinkSeconds, Step, allreduce_traffic
from commlib.density import entries
from commlib.entries import take_out
from commlib.errors import InvalidArgument
from commlib.products import add_and_multiply
from commlib.reducers.residual import ResidualOptions, ResidualReducer, State
from commlib.topology import LinkBytes, Topology
from commlib.vectors import Float32, Index, SparseVector, index_dtype, is_finite, non_finite
from commlib.work import Work

SEED = 0x41_52_43  # of the projections, on all ranks and in all runs
COLUMN = 0.05  # measured: the time to multiply by a column, of that to add two vectors


def _rows(step: Step) -> tuple[int, int]:
    """Return how many rows there are, and how many entries are sent."""
    rows = -(-step.size // step.options["row"])
    return rows, min(step.size, entries(step.density, rows) * step.options["row"])


def _sent(step: Step) -> int:
    return _rows(step)[1]


def _traffic(step: Step, rank: int) -> LinkBytes:
    """All-reduce ``r`` values a row, and the rows, of which the last may be shorter."""
    rows, sent = _rows(step)
    return allreduce_traffic(step.nodes, rank, rows * step.options["sketch"]) + allreduce_traffic(
        step.nodes, rank, sent
    )


def _seconds(step: Step) -> LinkSeconds:
    """``2·(P − 1)/P·(d·r/m + k)·β`` for rows of ``m`` entries, and the latencies of two all-reduces."""
    rows, sent = _rows(step)
    return step.on_slowest_link(step.allreduce(rows * step.options["sketch"]) + step.allreduce(sent))


def _work(step: Step) -> Work:
    """Accumulate, and multiply each row by ``r`` columns; take and add up the entries of the rows sent."""
    _, sent = _rows(step)
    passes = 1 + step.decays + COLUMN * step.options["sketch"]
    return Work(add=step.size * passes, entry=sent, messages=3) + step.placing(sent)


@dataclass(frozen=True)
class ARCTopKOptions(ResidualOptions):
    """Entries of a row, ``m``, and columns of the sketch, ``r``: see :class:`ARCTopK`."""

    row: int
    sketch: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.row) is not int or self.row < 1:
            raise InvalidArgument(f"row: expected a whole number from 1, got {self.row!r}")
        if type(self.sketch) is not int or not 1 <= self.sketch < self.row:
            most = f"{self.row - 1}, which is less than a row of {self.row} entries"
            raise InvalidArgument(f"sketch: expected a whole number from 1 to {most}, got {self.sketch!r}")


@dataclass(frozen=True)
class ARCTopKState(State):
    """``counted``: steps that were not skipped, which seed the projection."""

    counted: int


class ARCTopK(ResidualReducer):
    """The same rows on all ranks, so that their values can be all-reduced.

    The accumulated gradient is a matrix of rows of ``row`` entries (the authors take the rows of each layer;
    a bucket of several is one vector here). Its product with a random matrix of ``sketch`` columns, equal on
    all ranks and new in each step, is all-reduced: the sketch of the sum, whose rows have, on average, norms
    proportional to those of the sum. The share ``density`` of the rows whose norms are the largest is
    all-reduced and cleared on all ranks. A rank's residual may grow where ranks cancel each other out.
    """

    cost = Cost(_traffic, _seconds, _work, is_exact=False, applied=_sent, most=_sent)
    needs_entries = True
    approximates = True
    options: ARCTopKOptions
    state: ARCTopKState = ARCTopKState(0)

    def __init__(
        self, topology: Topology, size: int, *, row: int = 512, sketch: int = 4, **options: Any
    ) -> None:
        super().__init__(topology, size, **options)
        self.options = ARCTopKOptions(**asdict(self.options), row=row, sketch=sketch)

    def _exchange(self, collected: Float32) -> tuple[SparseVector, int]:
        residual = self._decayed()
        sketch = self.all_reduce(self._accumulate(collected, residual))
        if not is_finite(sketch):
            return non_finite(self.length, self.arrays), 0
        self.wait_for_comparison()  # the density says how long the next message is
        with self.measure("select"):
            indices = self._indices_of(self._largest_rows(sketch))
            values = take_out(self._spare, indices)
        total = self.all_reduce(values)
        self.state = ARCTopKState(self.state.counted + 1)
        return SparseVector.trusted(self.length, indices, total), len(indices)

    def _accumulate(self, collected: Float32, residual: Float32) -> Float32:
        """Write the accumulated gradient ``A`` to the next residual; return ``A·V``, row by row.

        ``V`` has normally distributed entries.
        """
        row, columns = self.options.row, self.options.sketch
        drawn = np.random.default_rng([SEED, self.state.counted]).standard_normal((columns, row), np.float32)
        sketch: Float32 = self.workspace.get("sketch", -(-self.length // row) * columns)
        with self.measure("select"):
            add_and_multiply(collected, residual, drawn, self._spare, sketch.reshape(-1, columns))
        return sketch

    def _largest_rows(self, sketch: Float32) -> Index:
        """Return the rows with the largest norms, in order, ties by lowest index.

        Squares are added up column by column: the same bits on processors of any kind.
        """
        columns = np.ascontiguousarray(sketch.reshape(-1, self.options.sketch).T, np.float64)
        norms = columns[0] * columns[0]
        for column in columns[1:]:
            norms += column * column
        scores = np.sqrt(norms).astype(np.float32)
        rows = SparseVector.trusted(len(scores), None, scores)
        return rows.top_k(entries(self.density, len(scores))).indices_or_range

    def _indices_of(self, rows: Index) -> Index:
        row, dtype = self.options.row, index_dtype(self.length)
        starts = rows.astype(dtype) * dtype.type(row)
        indices: Index = (starts[:, None] + np.arange(row, dtype=dtype)).ravel()
        return indices[: np.searchsorted(indices, self.length)]  # the last row may be shorter
