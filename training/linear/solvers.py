"""The solvers of linear models, by name (SparCML, section 8.2).

``sgd``: mini-batch stochastic gradient descent on the rows of all ranks, SparCML's MPI-OPT. In a step every
rank takes a batch of its rows, and all apply the mean gradient of these batches. The model is the only dense
vector of its size: no step makes another.

``coordinate``: distributed random block coordinate descent over a sparse all-gather. The columns that any
rank has are divided into a slice for each rank. A step takes a block: ``coordinates`` random columns of every
slice. Each rank sends the derivatives of its rows' loss by the block's weights; all ranks move each weight to
the minimum of a quadratic bound of the objective (Richtárik and Takáč 2016).
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from scipy import sparse

from commlib import Reducer, SparseVector, Topology
from commlib.arrays import compiled
from commlib.vectors import Float32, Index, index_dtype, partition
from training.config.reducers import AUTO
from training.linear import kernels
from training.linear.config import LearningRate, Settings, make_lossless
from training.linear.kernels import CURVATURES, LOSSES, Float64, Int64, Matrix, value_and_slope
from training.linear.rows import Rows
from training.linear.solver import Diverged, Pass, Solver, Taken


class Rates:
    """The learning rates of the steps of a pass; ``adaptive`` ones follow the losses of passes."""

    def __init__(self, given: LearningRate) -> None:
        self._given, self._rate = given, given.rate
        self._before = float("inf")

    def of_pass(self, done: float, steps: int) -> Float64:
        """Return the learning rates of the next pass, after ``done`` passes."""
        if self._given.schedule == "power":
            epochs = done + np.arange(steps) / steps
            return np.asarray(self._given.rate / (1 + epochs) ** self._given.power, np.float64)
        return np.full(steps, self._rate)

    def adapt(self, loss: float) -> None:
        """Reduce an adaptive rate if the mean loss of a pass is not below that of the pass before."""
        if self._given.schedule == "adaptive" and not loss < self._before:
            self._rate *= self._given.factor
        self._before = loss


class Gradients:
    """Makes the gradients of batches of ``rows`` as ``SparseVector``: entries in the columns of the batch.

    The last entry is the intercept's, if there is one. It also holds 1.5 bits a feature: which columns the
    batch has, and how many of them are before each word.
    """

    def __init__(self, rows: Rows, *, intercept: bool) -> None:
        self._rows, self._intercept = rows, intercept
        self._size = rows.features + intercept
        words = -(-rows.features // 64)
        self._words = np.zeros(words, np.uint64)
        self._firsts = np.empty(words, np.int32)

    def of(self, numbers: Int64, slopes: Float64, factor: float) -> SparseVector:
        """Return ``factor·Σ slopeᵢ·xᵢ`` over rows ``numbers``; rows of slope 0 give no entry."""
        matrix, words, firsts = self._rows.matrix, self._words, self._firsts
        count = kernels.mark_columns(matrix, numbers, slopes, words, firsts)
        indices = np.empty(count + self._intercept, index_dtype(self._size))
        sums = np.zeros(count + self._intercept, np.float32)
        kernels.list_columns(words, indices)
        kernels.add_up(matrix, numbers, slopes, factor, words, firsts, sums)
        kernels.clear_words(words, indices[:count])
        if self._intercept:
            indices[count], sums[count] = self._rows.features, factor * slopes.sum()
        return SparseVector.trusted(self._size, indices, sums)


class SGD(Solver):
    """A pass takes each row once. A single rank exchanges nothing, and has no reducer."""

    def __init__(self, topology: Topology, rows: Rows, settings: Settings) -> None:
        super().__init__(topology, rows, settings)
        self.steps = -(-int(self.counts.max()) // settings.batch_size)
        self._bounds = [partition(int(count), self.steps) for count in self.counts]
        self._gradients = Gradients(rows, intercept=settings.intercept)
        self._rates = Rates(settings.learning_rate)
        if topology.world.size > 1:  # ``auto`` is chosen on gradients of a model of zeros
            self.reducer = self.make_reducer(self._gradient(each, 1.0)[0] for each, _ in self._batches())

    def run_pass(self) -> Pass:
        rates = self._rates.of_pass(self.passes, self.steps)
        done = self._run_alone(rates) if self.reducer is None else self._run_together(self.reducer, rates)
        if not np.isfinite(done.loss):
            raise Diverged(_too_fast(f"pass {self.passes + 1}", "a loss", done.rate))
        self.passes += 1
        self._rates.adapt(done.loss)
        return done

    def _run_alone(self, rates: Float64) -> Pass:
        world = self.topology.world
        start = world.now()
        loss = self.model.pass_alone(self.rows, self._order(), self._bounds[0], rates)
        return Pass(loss / len(self.rows), float(rates[-1]), self.steps, world.now() - start)

    def _run_together(self, reducer: Reducer, rates: Float64) -> Pass:
        world, taken, loss = self.topology.world, list[Taken](), 0.0
        start = world.now()
        for number, (numbers, factor) in enumerate(self._batches()):
            gradient, of_batch = self._gradient(numbers, factor)
            mean, step = Taken.by(reducer, gradient, world.now)
            if not step.report.finite:
                at = f"step {self.passes * self.steps + number + 1}"
                raise Diverged(_too_fast(at, "a gradient", rates[number]))
            self.model.step(mean, rates[number])
            taken.append(step)
            loss += of_batch
        seconds = world.now() - start
        return Pass.of(taken, loss=self.mean_of_all(loss), rate=float(rates[-1]), seconds=seconds)

    def _gradient(self, numbers: Int64, factor: float) -> tuple[SparseVector, float]:
        slopes = np.empty(len(numbers))
        loss = self.model.slopes(self.rows, numbers, slopes)
        return self._gradients.of(numbers, slopes, factor), loss

    def _order(self) -> Int64:
        rank = self.topology.world.rank
        return np.random.default_rng([self.settings.seed, self.passes, rank]).permutation(len(self.rows))

    def _batches(self) -> Iterator[tuple[Int64, float]]:
        """Yield this rank's rows of each step, and the factor that turns sums into means over all rows.

        Ranks with fewer rows have smaller batches.
        """
        world, order = self.topology.world, self._order()
        own, sizes = self._bounds[world.rank], np.sum([np.diff(each) for each in self._bounds], axis=0)
        for step in range(self.steps):
            yield order[own[step] : own[step + 1]], world.size / int(sizes[step])


def _too_fast(when: str, what: str, rate: float) -> str:
    return f"learning_rate: expected one that converges, got {what} that is not finite in {when} at {rate:g}"


@compiled
def derivatives_of(
    loss: int, columns: Matrix, labels: Float32, margins: Float64, numbers: Int64, found: Float32
) -> None:
    """Write the derivatives of the sum of the losses by the weights of columns ``numbers``."""
    for at in range(len(numbers)):
        total = 0.0
        for entry in range(columns.starts[numbers[at]], columns.starts[numbers[at] + 1]):
            row = columns.columns[entry]
            total += value_and_slope(loss, margins[row], labels[row])[1] * columns.values[entry]
        found[at] = total


@compiled
def move(columns: Matrix, margins: Float64, numbers: Int64, changes: Float64) -> None:
    """Add the columns ``numbers``, times the changes of their weights, to the margins."""
    for at in range(len(numbers)):
        for entry in range(columns.starts[numbers[at]], columns.starts[numbers[at] + 1]):
            margins[columns.columns[entry]] += changes[at] * columns.values[entry]


class CoordinateDescent(Solver):
    """A pass takes each column that any rank has once."""

    reducer: Reducer

    def __init__(self, topology: Topology, rows: Rows, settings: Settings) -> None:
        super().__init__(topology, rows, settings)
        self._own, self._columns = columns_of(rows, intercept=settings.intercept)
        name = settings.reducer.name or AUTO
        first = "allgather" if name == AUTO else name
        self.reducer = make_lossless(first, topology, self.model.size, settings.reducer.options)
        self._active, squares = self._sums_of_squares()
        self._features = len(self._active) - settings.intercept  # the intercept's column comes last
        self._slices = partition(len(self._active), topology.world.size)
        self.steps = -(-int(np.diff(self._slices).max()) // settings.coordinates)
        self._curvatures = self._bounds_of_curvature(squares)
        if name == AUTO and topology.world.size > 1 and self.steps:  # none without a column
            margins = self.model.margins(rows)  # of a model of zeros
            firsts = (self._derivatives(margins, self._active[each]) for each in self._blocks())
            self.reducer.close()
            self.reducer = self.make_reducer(firsts)

    def _sums_of_squares(self) -> tuple[Index, Float64]:
        """Return the columns that any rank has, ascending, and the sums of their squared values."""
        sums = np.add.reduceat(self._columns.values**2, self._columns.starts[:-1])
        mean = self.reducer.reduce(SparseVector(self.model.size, self._own, sums))
        is_there = np.flatnonzero(mean.values)
        found = mean.values[is_there].astype(np.float64) * self.topology.world.size
        return mean.indices_or_range[is_there], found

    def _bounds_of_curvature(self, squares: Float64) -> Float64:
        """Return a bound of each weight's second derivative when all weights of a block move.

        With ``τ`` of ``n`` columns in a block and at most ``ω`` entries in a row, it is
        ``1 + (ω − 1)(τ − 1)/(n − 1)`` times the bound of a weight that moves alone.
        """
        world, settings = self.topology.world, self.settings
        longest = int(np.diff(self.rows.matrix.starts).max()) + settings.intercept
        most = int(world.allgather_ints([longest]).max())
        block = min(len(squares), settings.coordinates * world.size)
        together = 1 + (most - 1) * (block - 1) / max(1, len(squares) - 1)
        bounds = CURVATURES[settings.loss] * together * squares / int(self.counts.sum())
        return np.asarray(bounds + self._penalties(self._active, settings.l2), np.float64)

    def _penalties(self, places: Index, factor: float) -> Float64:
        """Return ``factor`` for each of these columns, and 0 for the intercept's."""
        return np.where(places < self.rows.features, factor, 0.0)

    def run_pass(self) -> Pass:
        world, taken = self.topology.world, list[Taken]()
        loss, start = self.mean_loss(), world.now()
        margins, weights = self.model.margins(self.rows), self._weights()
        for block in self._blocks():
            derivatives = self._derivatives(margins, self._active[block])
            mean, step = Taken.by(self.reducer, derivatives, world.now)
            if not step.report.finite:
                raise Diverged(f"data: expected finite derivatives, got others in pass {self.passes + 1}")
            self._move(margins, weights, block, mean)
            taken.append(step)
        self._set_weights(weights)
        self.passes += 1
        return Pass.of(taken, loss=loss, rate=1.0, seconds=world.now() - start)

    def _move(self, margins: Float64, weights: Float64, block: Int64, mean: SparseVector) -> None:
        """Move the weights of a block to the minimum of the bound, and update the margins."""
        places, bounds, before = self._active[block], self._curvatures[block], weights[block]
        l2, l1 = self._penalties(places, self.settings.l2), self._penalties(places, self.settings.l1)
        moved = before - (_at(mean, places) + l2 * before) / bounds
        weights[block] = np.sign(moved) * np.maximum(0, np.abs(moved) - l1 / bounds)
        numbers, is_own = self._numbers(places)
        move(self._columns, margins, numbers[is_own], (weights[block] - before)[is_own])

    def _weights(self) -> Float64:
        """Return the weights of the columns that any rank has; the intercept, if there is one, is last."""
        of_features = self.model.weights[self._active[: self._features]].astype(np.float64)
        return np.append(of_features, [self.model.intercept] * self.settings.intercept)

    def _set_weights(self, weights: Float64) -> None:
        own = self.model.weights
        own[self._active[: self._features]] = weights[: self._features]
        self.model.set_weights(own, float(weights[-1]) if self.settings.intercept else 0.0)

    def _blocks(self) -> Iterator[Int64]:
        """Yield the block of each step: places in ``_active``, ascending."""
        most, seed = self.settings.coordinates, [self.settings.seed, self.passes]
        bounds = zip(self._slices[:-1], self._slices[1:], strict=True)
        orders = [
            low + np.random.default_rng([*seed, part]).permutation(high - low)
            for part, (low, high) in enumerate(bounds)
        ]
        for low in range(0, self.steps * most, most):
            yield np.sort(np.concatenate([order[low : low + most] for order in orders]))

    def _derivatives(self, margins: Float64, places: Index) -> SparseVector:
        """Return the derivatives by the weights in these places, for the columns that this rank has."""
        numbers, is_own = self._numbers(places)
        found = np.empty(int(is_own.sum()), np.float32)
        loss = LOSSES[self.settings.loss]
        derivatives_of(loss, self._columns, self.rows.labels, margins, numbers[is_own], found)
        found *= np.float32(self.topology.world.size / int(self.counts.sum()))
        return SparseVector.trusted(self.model.size, places[is_own], found)

    def _numbers(self, places: Index) -> tuple[Int64, npt.NDArray[np.bool_]]:
        """Return the places of columns among this rank's columns, and which of them it has."""
        numbers = np.searchsorted(self._own, places)
        is_own = numbers < len(self._own)
        is_own[is_own] = self._own[numbers[is_own]] == places[is_own]
        return numbers, is_own


def columns_of(rows: Rows, *, intercept: bool) -> tuple[Index, Matrix]:
    """Return the columns that have entries, ascending, and the rows and values of each.

    With an intercept the last column is one of ones.
    """
    matrix, count = rows.matrix, len(rows)
    own, numbers = np.unique(matrix.columns, return_inverse=True)
    compressed = sparse.csr_array((matrix.values, numbers, matrix.starts), shape=(count, len(own))).tocsc()
    starts, entries, values = compressed.indptr.astype(np.int64), compressed.indices, compressed.data
    if intercept:
        own = np.append(own, rows.features)
        starts = np.append(starts, starts[-1] + count)
        entries = np.append(entries, np.arange(count, dtype=entries.dtype))
        values = np.append(values, np.ones(count, np.float32))
    return own.astype(index_dtype(rows.features + 1)), Matrix(starts, entries, values)


def _at(mean: SparseVector, places: Index) -> Float64:
    """Return the values in places that are all stored."""
    if mean.indices is None:
        return mean.values[places].astype(np.float64)
    return mean.values[np.searchsorted(mean.indices, places)].astype(np.float64)


SOLVERS: dict[str, type[Solver]] = {"sgd": SGD, "coordinate": CoordinateDescent}


def make_solver(topology: Topology, rows: Rows, settings: Settings) -> Solver:
    """Return a new solver; all ranks of the topology call it together."""
    return SOLVERS[settings.solver](topology, rows, settings)
