"""Training on simulated ranks: one process and one model, with a reducer for each rank.

For questions of convergence. The gradients, and what reducers make of them, are those of so many ranks: each
computes its part of the global batch from the same weights, or with local steps from its own. Only
BatchNormalization differs, whose statistics are those of all ranks' batches, one after the other, and random
masks, which come from one generator. Time is not simulated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import tensorflow as tf

from commlib import Communicator, LinkBytes, Report, Topology, select
from commlib.tensorflow import DistributedGradients
from commlib.transport import simulated
from commlib.transport.mpi import world
from commlib.tuning.profile import Profile
from commlib.vectors import Float32
from datacache import Batch
from training.config.config import Config
from training.config.schema import ConfigurationError
from training.run.data import Data
from training.run.learner import Learner, parts_of
from training.run.local_steps import LocalSteps
from training.run.replicas import assign
from training.run.stages import StepHyperparameters
from training.run.steps import Backward
from training.run.summary import Summary
from training.run.trainer import Trainer

Do = Callable[[int], Any]


@dataclass(frozen=True)
class StepSeen:
    """One step of all ranks.

    ``selected``: entries, mean over ranks; ``applied``: of the mean. ``residual``: norm of the sum of all
    residuals after it, over that of the mean gradient times ranks. Of the exact top-k of every rank's
    gradient plus residual: ``fill_in``, entries of their union over k; ``overlap``, the share of its entries
    that another rank selects, too, mean over pairs. ``xi``: Ok-Topk's ξ, section 4, assumption 1.
    """

    step: int
    target: int
    selected: float
    applied: int
    residual: float
    fill_in: float
    overlap: float
    xi: float


@dataclass
class RankTotals:
    """What the reports of a rank add up to: exchanges, entries selected, bytes sent."""

    exchanges: int = 0
    selected: int = 0
    sent: LinkBytes = LinkBytes()

    def add(self, report: Report) -> None:
        """Count an exchange."""
        self.exchanges += 1
        self.selected += report.selected
        self.sent += report.traffic.sent


@dataclass(frozen=True)
class Trained:
    """A run, the number of weights, the steps that were looked at, and what each rank sent."""

    summary: Summary
    weights: int
    seen: Sequence[StepSeen]
    totals: Sequence[RankTotals]


@dataclass
class Ranks:
    """What the threads of all ranks share: the next thing to do, and each one's gradients."""

    layout: Sequence[int]
    look_every: int
    do: Do | None = None
    results: list[Any] = field(default_factory=list)
    topologies: list[Topology] = field(default_factory=list)
    gradients: list[DistributedGradients] = field(default_factory=list)
    seen: list[StepSeen] = field(default_factory=list)
    totals: list[RankTotals] = field(default_factory=list)

    def __post_init__(self) -> None:
        for each in (self.results, self.topologies, self.gradients):
            each.extend([None] * self.count)  # type: ignore[list-item]  # until a rank puts its own there
        self.totals.extend(RankTotals() for _ in range(self.count))

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(self.layout)

    def all_do(self, do: Do) -> list[Any]:
        """Let each rank do something, and return their results; rank 0 calls it, the others wait for it."""
        self.do = do
        self.take_part(self.topologies[0].world)
        return list(self.results)

    def take_part(self, comm: Communicator) -> bool:
        """Do the next thing; return whether there is another."""
        comm.barrier()
        if self.do is None:
            return False
        self.results[comm.rank] = self.do(comm.rank)
        comm.barrier()
        return True

    def count_exchange(self, reports: Sequence[Report]) -> None:
        """Add the reports of all ranks to their totals."""
        for totals, report in zip(self.totals, reports, strict=True):
            totals.add(report)

    def end(self) -> None:
        """Let the other ranks go."""
        self.do = None
        self.take_part(self.topologies[0].world)


class RanksLearner(Learner):
    """Computes the gradients of all ranks one after the other; ``ranks`` reduce them."""

    ranks: Ranks  # of a subclass: the trainer makes its learner
    replicas: "Replicas | None" = None

    def __init__(self, config: Config, topology: Topology, data: Data, profile: Profile | None) -> None:
        if config.sparse_tables:
            raise ConfigurationError("sparse_tables: expected false on simulated ranks, got true")
        if len({phase.local_steps is None for phase in config.phases}) > 1:
            raise ConfigurationError("local_steps: expected in all phases or in none on simulated ranks")
        super().__init__(config, topology, data, profile)
        self.config = self.config.model_copy(update={"accumulate": self.ranks.count})
        self.task.carried = [  # it has the rows of all ranks
            tf.Variable(each[: each.shape[0] // self.ranks.count], trainable=False)
            for each in self.task.carried
        ]
        self.gradients.close()
        self._carried: list[list[Any]] = []  # what the task carries over batches, of each rank
        options = self.gradients.config
        self._steps = 0

        def make(rank: int) -> None:
            topology = self.ranks.topologies[rank]
            self.ranks.gradients[rank] = DistributedGradients(topology, self.variables, options)

        self.ranks.all_do(make)
        self.gradients = self.ranks.gradients[0]
        self._set_local_steps(self.config.phases[0])

    def begin(self, phase: Any) -> float | None:
        """See :meth:`Learner.begin`."""
        options, residual = self.config.reducer_config(phase), None
        if options != self.gradients.config:
            residual = self.residual_norm()
            self.ranks.all_do(lambda rank: self.ranks.gradients[rank].switch(options))
        self._set_local_steps(phase)
        return residual

    def _set_local_steps(self, phase: Any) -> None:
        if self.ranks.gradients[0] is None:  # the ranks have no reducers yet
            return
        before = self.replicas
        self.replicas = None
        if phase.local_steps is not None:
            self.replicas = Replicas(self, phase, before)
        self.local = None if self.replicas is None else self.replicas.local_steps[0]

    def set_density(self, density: float) -> None:
        """See :meth:`Learner.set_density`."""
        reducer: Any = self.gradients.reducer
        if reducer.density != density:
            self.ranks.all_do(lambda rank: self._reducer(rank).set_density(density))

    def _reducer(self, rank: int) -> Any:
        return self.ranks.gradients[rank].reducer

    def step(
        self, backward: Backward, batch: Batch, hyperparameters: StepHyperparameters
    ) -> tuple[float, Report]:
        """See :meth:`Learner.step`; the loss is the mean over all ranks."""
        if self.replicas is not None:
            return self._step_of(self.replicas, backward, batch, hyperparameters)
        losses, flats, found, carried = [], [], [], []
        for arrays, own in zip(parts_of(batch, self.ranks.count), self._carried, strict=True):
            assign(self.task.carried, own)
            loss, (flat,) = backward(*arrays)
            losses.append(loss)
            flats.append(np.array(flat))
            found.append(backward.found)
            carried.append(self._copies())
        looks = self._steps % self.ranks.look_every == 0
        given = self._sums(flats) if looks else []
        results = self.ranks.all_do(lambda rank: self.ranks.gradients[rank].reduce_flat(flats[rank]))
        self.ranks.count_exchange([each for _, each in results])
        mean, report = results[0]
        if report.finite:
            if looks and self._is_sparse:
                self.ranks.seen.append(self._seen(given, flats, mean, [each for _, each in results]))
            self._apply(mean, hyperparameters)
            self._carried = carried
        else:
            backward.put_back(found[0])
        if self.scale is not None:
            self.scale.update(report.finite)
        self._steps += 1
        return float(np.mean(losses)), report

    def _step_of(
        self, replicas: "Replicas", backward: Backward, batch: Batch, hyperparameters: StepHyperparameters
    ) -> tuple[float, Report]:
        """Let each replica take a step, and end the round with its last one."""
        losses = []
        for rank, arrays in enumerate(parts_of(batch, self.ranks.count)):
            with replicas.having_the_model(rank) as local:
                assign(self.task.carried, self._carried[rank])
                local.begin_step()
                loss, (flat,) = backward(*arrays)
                losses.append(loss)
                own, report = local.replica_gradient(flat)
                if not local.rounds.failed:
                    self._apply(own, hyperparameters)
                self._carried[rank] = self._copies()
        if hyperparameters.round_steps:
            report = self._end_round(replicas)
        return float(np.mean(losses)), report

    def _end_round(self, replicas: "Replicas") -> Report:
        weights = []
        for rank in range(self.ranks.count):
            with replicas.having_the_model(rank) as local:
                weights.append(local.weights.read())
        results = self.ranks.all_do(lambda rank: replicas.local_steps[rank].rounds.end(weights[rank]))
        for rank, result in enumerate(results):
            with replicas.having_the_model(rank) as local:
                local.finish_round(*result)
        self.ranks.count_exchange([each for _, each in results])
        report: Report = results[0][1]
        return report

    def restart_carried(self) -> None:
        """See :meth:`Learner.restart_carried`."""
        super().restart_carried()
        self._carried = [self._copies() for _ in range(self.ranks.count)]

    def _copies(self) -> list[Any]:
        return [variable.numpy() for variable in self.task.carried]

    @property
    def _is_sparse(self) -> bool:
        return bool(getattr(self.gradients.reducer, "sparse", False))

    def _sums(self, flats: Sequence[Float32]) -> list[Float32]:
        """Return each rank's gradient plus residual, before the step."""
        return [flat + self._reducer(rank).residual for rank, flat in enumerate(flats)]

    def _seen(
        self, given: Sequence[Float32], flats: Sequence[Float32], mean: Float32, reports: Sequence[Report]
    ) -> StepSeen:
        count, size = self.ranks.count, self.gradients.size
        k = max(1, round(self._reducer(0).density * size))
        times = sum((select("exact", vector, k).to_dense() != 0).astype(np.int64) for vector in given)
        pairs = float((times * (times - 1)).sum())
        gradient = np.mean(flats, axis=0, dtype=np.float64)
        residual = sum(np.asarray(self._reducer(rank).residual, np.float64) for rank in range(count))
        return StepSeen(
            step=self._steps,
            target=k,
            selected=float(np.mean([each.selected for each in reports])),
            applied=reports[0].applied,
            residual=float(np.linalg.norm(residual) / (count * np.linalg.norm(gradient))),
            fill_in=float(np.count_nonzero(times) / k),
            overlap=pairs / (k * count * max(1, count - 1)),
            xi=_xi(given, mean, gradient, k),
        )


class Replicas:
    """The local steps of each rank, of which one at a time has the model and the optimizer."""

    local_steps: list[LocalSteps]

    def __init__(self, learner: RanksLearner, phase: Any, before: "Replicas | None") -> None:
        ranks, optimizer = learner.ranks, learner.optimizer
        if phase.replica_is_node and max(ranks.layout) > 1:
            raise ConfigurationError("local: expected rank, or one rank on each node, on simulated ranks")
        earlier = [None] * ranks.count if before is None else before.local_steps
        self.local_steps = [
            LocalSteps(phase, gradients, learner.variables, optimizer, [], each)
            for gradients, each in zip(ranks.gradients, earlier, strict=True)
        ]
        self._variables = [*learner.variables, optimizer.iterations, *chain.from_iterable(optimizer.slots)]
        self._read, self._write = tf.function(self._values_now), tf.function(partial(assign, self._variables))
        self._values: list[Any] = [self._read()] * ranks.count if before is None else before._values

    def _values_now(self) -> list[Any]:
        return [tf.identity(variable) for variable in self._variables]

    @contextmanager
    def having_the_model(self, rank: int) -> Iterator[LocalSteps]:
        """Let a rank have the model inside the block."""
        self._write(self._values[rank])
        yield self.local_steps[rank]
        self._values[rank] = self._read()


def _xi(given: Sequence[Float32], mean: Float32, gradient: Any, k: int) -> float:
    """Return ξ: the distance from the step to the top k of the exact mean, over the gradient's norm."""
    exact = np.mean(given, axis=0, dtype=np.float64)
    top = select("exact", exact.astype(np.float32), k).to_dense()
    return float(np.linalg.norm(top - mean) / np.linalg.norm(gradient))


def train(config: Config, layout: Sequence[int], *, look_every: int = 10) -> Trained:
    """Train with a reducer for each of the ranks of ``layout``, those of each node.

    ``config``: its batches are those of all ranks together. Every ``look_every``-th step of sparse reducers
    is looked at.
    """
    ranks = Ranks(layout, look_every)
    config = _in_parts(config, ranks.count)

    def body(comm: Communicator) -> Summary | None:
        ranks.topologies[comm.rank] = Topology(comm)
        if comm.rank > 0:
            while ranks.take_part(comm):
                pass
            return None
        learner = type("RanksLearner", (RanksLearner,), {"ranks": ranks})
        summary = Trainer(config, topology=Topology(world()), learner=learner).fit()
        ranks.end()
        return summary

    summary = simulated.run(body, ranks.count, list(layout))[0]
    assert summary is not None  # of rank 0
    return Trained(summary, ranks.gradients[0].size, ranks.seen, ranks.totals)


def _in_parts(config: Config, parts: int) -> Config:
    """Return the configuration for batches that are cut into parts, where its task accumulates parts.

    One that carries a state along its rows has those of each rank here.
    """
    task = config.task.make()
    if not task.accumulates:
        return config
    cut = config.model_copy(update={"accumulate": parts})
    task.check(cut)
    return cut
