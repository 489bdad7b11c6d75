"""Mini-batch stochastic gradient descent on the rows of all ranks (SparCML's MPI-OPT, section 8.2).

In a step every rank takes a batch of its rows, and all apply the mean gradient of these batches. The model is
the only dense vector of its size: no step makes another.
"""

from collections.abc import Iterator

import numpy as np

from commlib import Reducer, SparseVector, Topology
from commlib.vectors import index_dtype, partition
from training.config.reducers import AUTO
from training.linear import kernels
from training.linear.kernels import Float64, Int64
from training.linear.rows import Rows
from training.linear.settings import LearningRate, Settings, make_lossless
from training.linear.solver import Diverged, Pass, Solver, Taken, choose


class Rates:
    """The learning rates of the steps of a pass; ``adaptive`` ones follow the losses of passes."""

    def __init__(self, given: LearningRate) -> None:
        self._given, self._rate = given, given.rate
        self._before = float("inf")

    def of_pass(self, done: float, steps: int) -> Float64:
        """Return the rates of the next pass, when so many are done."""
        if self._given.schedule == "power":
            epochs = done + np.arange(steps) / steps
            return np.asarray(self._given.rate / (1 + epochs) ** self._given.power, np.float64)
        return np.full(steps, self._rate)

    def adapt(self, loss: float) -> None:
        """Follow the mean loss of a pass."""
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
        self.reducer = self._make_reducer()

    def _make_reducer(self) -> Reducer | None:
        if self.topology.world.size == 1:
            return None
        name, options = self.settings.reducer.name or AUTO, self.settings.reducer.options
        if name == AUTO:
            # of a model of zeros
            self.choice = choose(self.topology, (self._gradient(each, 1.0)[0] for each, _ in self._batches()))
            name, options = self.choice.name, dict(self.choice.options)
        return make_lossless(name, self.topology, self.model.size, options)

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
        mean_loss, rate = self.mean_of_all(loss), float(rates[-1])
        return Pass.of(taken, loss=mean_loss, rate=rate, seconds=seconds)

    def _gradient(self, numbers: Int64, factor: float) -> tuple[SparseVector, float]:
        slopes = np.empty(len(numbers))
        loss = self.model.slopes(self.rows, numbers, slopes)
        return self._gradients.of(numbers, slopes, factor), loss

    def _order(self) -> Int64:
        rank = self.topology.world.rank
        return np.random.default_rng([self.settings.seed, self.passes, rank]).permutation(len(self.rows))

    def _batches(self) -> Iterator[tuple[Int64, float]]:
        """Yield the rows of this rank in each step, and what makes of sums the mean over all ranks' rows.

        Ranks with fewer rows have smaller batches.
        """
        world, order = self.topology.world, self._order()
        own, sizes = self._bounds[world.rank], np.sum([np.diff(each) for each in self._bounds], axis=0)
        for step in range(self.steps):
            yield order[own[step] : own[step + 1]], world.size / int(sizes[step])


def _too_fast(when: str, what: str, rate: float) -> str:
    return f"learning_rate: expected one that converges, got {what} that is not finite in {when} at {rate:g}"
