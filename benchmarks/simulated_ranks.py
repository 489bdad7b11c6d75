"""Training on simulated ranks: one process and one model, with a reducer for each rank.

For questions of convergence. The gradients, and what reducers make of them, are those of so many ranks: each
computes its part of the global batch from the same weights, or with local steps from its own. Only
BatchNormalization differs, whose statistics are those of all ranks' batches, one after the other, and random
masks, which come from one generator. Time is not simulated.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.rank_threads import Ranks, RankTotals
from benchmarks.step_seen import StepSeen
from commlib import Communicator, Report, Topology
from commlib.tensorflow import DistributedGradients
from commlib.topology import Traffic
from commlib.transport import simulated
from commlib.transport.mpi import world
from commlib.tuning.profile import Profile
from commlib.vectors import Float32
from datacache import Batch
from training.config.config import Config
from training.config.schema import ConfigurationError
from training.results import StepHyperparameters, Summary
from training.run.data import Data
from training.run.learner import Learner, parts_of
from training.run.local_steps import LocalSteps
from training.run.replicas import assign
from training.run.steps import Backward
from training.run.trainer import Trainer


@dataclass(frozen=True)
class Trained:
    """A run, the number of weights, the steps that were looked at, and what each rank sent."""

    summary: Summary
    weights: int
    seen: Sequence[StepSeen]
    totals: Sequence[RankTotals]


class RanksLearner(Learner):
    """Computes the gradients of all ranks one after the other; ``ranks`` reduce them."""

    ranks: Ranks  # of a subclass: the trainer makes its learner
    replicas: "Replicas | None" = None

    def __init__(self, config: Config, topology: Topology, data: Data, profile: Profile | None) -> None:
        if config.sparse_tables:
            raise ConfigurationError("sparse_tables: expected false on simulated ranks, got true")
        have = [phase.local_steps is not None for phase in config.phases]
        if have != sorted(have):
            expected = "expected in all phases after one that has them on simulated ranks"
            place = have.index(False, have.index(True))
            raise ConfigurationError(f"phases[{place}].local_steps: {expected}, got none")
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

    def settle(self, hyperparameters: StepHyperparameters) -> Traffic:
        """See :meth:`Learner.settle`; only from gradients to differences of weights."""
        self.ranks.all_do(lambda rank: self.ranks.gradients[rank].switch({"name": "dense"}))
        if not any(residual.any() for residual in self._residuals()):
            return Traffic()
        nothing = np.zeros(self.gradients.size, np.float32)
        results = self.ranks.all_do(lambda rank: self.ranks.gradients[rank].reduce_flat(nothing))
        mean, report = results[0]
        self._apply(mean, hyperparameters)
        traffic: Traffic = report.traffic
        return traffic

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
        looks = self._is_sparse and self._steps % self.ranks.look_every == 0
        before = self._residuals() if looks else []
        results = self.ranks.all_do(lambda rank: self.ranks.gradients[rank].reduce_flat(flats[rank]))
        reports = [each for _, each in results]
        self.ranks.count_exchange(reports)
        mean, report = results[0]
        if report.finite:
            if looks:
                density, after = self._reducer(0).density, self._residuals()
                vectors = {"gradients": flats, "before": before, "after": after}
                self.ranks.seen.append(StepSeen.of(self._steps, density, mean, reports, **vectors))
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
        losses, weights = [], []
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
                    weights.append(local.weights.read())
        if hyperparameters.round_steps:
            report = self._end_round(replicas, weights)
        return float(np.mean(losses)), report

    def _end_round(self, replicas: "Replicas", weights: Sequence[Float32]) -> Report:
        results = self.ranks.all_do(lambda rank: replicas.local_steps[rank].rounds.end(weights[rank]))
        replicas.finish_round(results)
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

    def _residuals(self) -> list[Float32]:
        return [self._reducer(rank).residual for rank in range(self.ranks.count)]


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
        self._weights = len(learner.variables)
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

    def finish_round(self, results: Sequence[tuple[Float32, Report]]) -> None:
        """Let each replica have what its exchange returned: where it is not skipped, the same weights."""
        for rank, (weights, report) in enumerate(results):
            if rank == 0 or not report.finite:
                with self.having_the_model(rank) as local:
                    local.finish_round(weights, report)
            else:
                self._values[rank][: self._weights] = self._values[0][: self._weights]


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
