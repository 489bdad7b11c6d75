"""Training on simulated ranks: one process and one model, with a reducer for each rank.

For questions of convergence. The gradients, and what reducers make of them, are those of so many ranks: each
computes its part of the global batch from the same weights, or with local steps from its own. Only
BatchNormalization differs, whose statistics are those of all ranks' batches, one after the other, and random
masks, which come from one generator. Time is not simulated: what is exchanged during a delay is exchanged at
its end.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import tensorflow as tf

from commlib import Communicator, LinkBytes, Report, Topology
from commlib.tensorflow import DistributedGradients
from commlib.topology import Traffic
from commlib.transport import simulated
from commlib.transport.mpi import world
from commlib.vectors import Float32
from datacache import Batch
from training.config.config import Config
from training.config.schema import ConfigurationError
from training.results import StepHyperparameters, Summary
from training.run.backward import Backward, assign
from training.run.build import Parts, build
from training.run.data import Data
from training.run.local_steps import LocalSteps
from training.run.step import TrainingStep, parts_of
from training.run.trainer import Trainer


@dataclass
class RankTotals:
    """What the reports of a rank add up to: exchanges, entries selected, bytes sent."""

    exchanges: int = 0
    selected: int = 0
    sent: LinkBytes = LinkBytes()


class Ranks:
    """What the threads of all ranks share: the next thing to do, and each one's gradients."""

    def __init__(self, layout: Sequence[int]) -> None:
        self.layout, self.count = layout, sum(layout)
        self.do: Callable[[int], Any] | None = None
        self.results: list[Any] = [None] * self.count
        self.topologies: list[Any] = [None] * self.count  # until a rank puts its own there, as in the next
        self.gradients: list[Any] = [None] * self.count
        self.totals = [RankTotals() for _ in range(self.count)]

    def all_do(self, do: Callable[[int], Any] | None) -> list[Any]:
        """Return what each rank does; rank 0 calls it, the others wait for it, and end with ``None``."""
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
            totals.exchanges += 1
            totals.selected += report.selected
            totals.sent += report.traffic.sent


@dataclass(frozen=True)
class Trained:
    """A run, its number of weights, and what each rank sent."""

    summary: Summary
    weights: int
    totals: Sequence[RankTotals]


class RanksStep(TrainingStep):
    """A step that computes the gradients of all ranks one after the other; ``ranks`` reduce them.

    ``replicas``: of a phase with local steps, else ``None``. The step has the interface of
    :class:`TrainingStep`, and the state of all ranks.
    """

    def __init__(self, ranks: Ranks, parts: Parts) -> None:
        super().__init__(parts.topology, parts.model, parts.exchange, parts.optimizer)
        self.ranks, self._config = ranks, parts.config
        self.replicas: Replicas | None = None
        self._carried: list[list[Any]] = []  # what the task carries over batches, of each rank
        self._begin_local_steps(self._config.phases[0])

    def begin(self, phase: Any) -> float | None:
        options, residual = self._config.reducer_config(phase), None
        if options != self.ranks.gradients[0].config:
            residual = self.exchange.residual_norm()
            self.ranks.all_do(lambda rank: self.ranks.gradients[rank].switch(options))
        self._begin_local_steps(phase)
        return residual

    def _begin_local_steps(self, phase: Any) -> None:
        before, self.replicas = self.replicas, None
        if phase.local_steps is not None:
            self.replicas = Replicas(self, phase, before)
        self.exchange.local = None if self.replicas is None else self.replicas.local_steps[0]

    def settle(self, hyperparameters: StepHyperparameters) -> Traffic:
        """See :meth:`TrainingStep.settle`; only from gradients to differences of weights."""
        self.ranks.all_do(lambda rank: self.ranks.gradients[rank].switch({"name": "dense"}))
        if not any(each.exchange.residual.any() for each in self.ranks.gradients):
            return Traffic()
        nothing = np.zeros(self.ranks.gradients[0].size, np.float32)
        mean, report = self.ranks.all_do(lambda rank: self._reduced(rank, nothing))[0]
        self._apply(mean, hyperparameters)
        traffic: Traffic = report.traffic
        return traffic

    def begin_epoch(self, density: float | None, *, is_new: bool) -> None:
        if density is not None and self.ranks.gradients[0].exchange.density != density:
            self.ranks.all_do(lambda rank: self.ranks.gradients[rank].exchange.set_density(density))
        if is_new:
            self.model.restart_carried()
            self._carried = [self._copies() for _ in range(self.ranks.count)]

    def take(
        self, backward: Backward, batch: Batch, hyperparameters: StepHyperparameters
    ) -> tuple[float, Report]:
        """See :meth:`TrainingStep.take`; the loss is the mean over all ranks."""
        if self.replicas is not None:
            return self._step_of(self.replicas, backward, batch, hyperparameters)
        losses, flats, before, carried = [], [], [], []
        for arrays, own in zip(parts_of(batch, self.ranks.count), self._carried, strict=True):
            assign(self.model.task.carried, own)
            loss, inputs = backward(*arrays)
            losses.append(loss)
            flats.append(np.concatenate(inputs))
            before.append(backward.before)
            carried.append(self._copies())
        results = self.ranks.all_do(lambda rank: self._reduced(rank, flats[rank]))
        reports = [each for _, each in results]
        self.ranks.count_exchange(reports)
        mean, report = results[0]
        if report.finite:
            self._apply(mean, hyperparameters)
            self._carried = carried
        else:
            backward.undo(before[0])
        if self.optimizer.scale is not None:
            self.optimizer.scale.update(report.finite)
        return float(np.mean(losses)), report

    def abandon_round(self) -> None:
        """See :meth:`TrainingStep.abandon_round`: what is under way is exchanged by all ranks."""
        if (replicas := self.replicas) is not None:
            self.ranks.all_do(lambda rank: replicas.local_steps[rank].rounds.finish())
        super().abandon_round()

    def _step_of(
        self, replicas: "Replicas", backward: Backward, batch: Batch, hyperparameters: StepHyperparameters
    ) -> tuple[float, Report]:
        """Let each replica take a step, and exchange what leaves or arrives after it."""
        losses, weights = list[float](), list[Vector]()
        exchanges = hyperparameters.round_steps or hyperparameters.leaving is not None
        for rank, arrays in enumerate(parts_of(batch, self.ranks.count)):
            with replicas.having_the_model(rank) as local:
                assign(self.model.task.carried, self._carried[rank])
                local.begin_step()
                loss, inputs = backward(*arrays)
                losses.append(loss)
                local.submit_inputs(inputs)
                own, report = local.wait()
                if report.finite:
                    self._apply(own, hyperparameters)
                self._carried[rank] = self._copies()
                if exchanges:
                    weights.append(Vector(local.weights.read()))
        if exchanges:
            reports = self.ranks.all_do(
                lambda rank: replicas.local_steps[rank].exchange(hyperparameters, weights[rank])
            )
            replicas.end_round(weights, reports)
            if reports[0] is not None:
                self.ranks.count_exchange(reports)
                report = reports[0]
        return float(np.mean(losses)), report

    def _reduced(self, rank: int, gradient: Float32) -> tuple[Float32, Report]:
        """Exchange the gradient of a rank, in the thread of that rank."""
        for bucket, part in enumerate(self.ranks.gradients[rank].exchange.slices):
            self.ranks.gradients[rank].submit(bucket, gradient[part])
        return self.ranks.gradients[rank].wait()

    def _copies(self) -> list[Any]:
        return [variable.numpy() for variable in self.model.task.carried]


class Vector:
    """The weights of a replica while the model has those of another."""

    def __init__(self, values: Float32) -> None:
        self.values = values

    def read(self, fragment: slice) -> Float32:
        return self.values[fragment].copy()

    def write(self, vector: Float32, fragment: slice) -> None:
        self.values[fragment] = vector


class Replicas:
    """The local steps of each rank, of which one at a time has the model and the optimizer."""

    local_steps: list[LocalSteps]

    def __init__(self, step: RanksStep, phase: Any, before: "Replicas | None") -> None:
        ranks, optimizer, variables = step.ranks, step.optimizer.optimizer, step.model.variables
        if phase.replica_is_node and max(ranks.layout) > 1:
            raise ConfigurationError("local: expected rank, or one rank on each node, on simulated ranks")
        earlier = [None] * ranks.count if before is None else before.local_steps
        self.local_steps = [
            LocalSteps(phase, gradients, variables, optimizer, [], each)
            for gradients, each in zip(ranks.gradients, earlier, strict=True)
        ]
        self._variables = [*variables, optimizer.iterations, *chain.from_iterable(optimizer.slots)]
        self._read = tf.function(lambda: [tf.identity(variable) for variable in self._variables])
        self._write = tf.function(partial(assign, self._variables))
        self._values: list[Any] = [self._read()] * ranks.count if before is None else before._values

    @contextmanager
    def having_the_model(self, rank: int) -> Iterator[LocalSteps]:
        """Let a rank have the model inside the block."""
        self._write(self._values[rank])
        yield self.local_steps[rank]
        self._values[rank] = self._read()

    def end_round(self, weights: Sequence[Vector], reports: Sequence[Report | None]) -> None:
        """Let each replica have the weights that its exchange left, and all else where that is skipped."""
        for rank, (own, report) in enumerate(zip(weights, reports, strict=True)):
            with self.having_the_model(rank) as local:
                local.weights.write(own.values)
                local.end_round(report)


def build_ranks(ranks: Ranks, config: Config, topology: Topology, data: Data) -> Parts:
    """Return the parts of a run on one rank, whose step trains all of ``ranks``."""
    have = [phase.local_steps is not None for phase in config.phases]
    if have != sorted(have):
        expected = "expected in all phases after one that has them on simulated ranks"
        place = have.index(False, have.index(True))
        raise ConfigurationError(f"phases[{place}].local_steps: {expected}, got none")
    parts = build(config.model_copy(update={"accumulate": ranks.count}), topology, data)
    parts.model.task.carried = [  # it has the rows of all ranks
        tf.Variable(each[: each.shape[0] // ranks.count], trainable=False)
        for each in parts.model.task.carried
    ]
    variables, options = parts.model.variables, parts.exchange.gradients.config
    cuts = config.cuts(parts.exchange.gradients.shapes)
    parts.exchange.gradients.close()

    def make(rank: int) -> None:
        ranks.gradients[rank] = DistributedGradients(ranks.topologies[rank], variables, options, cuts=cuts)

    ranks.all_do(make)
    parts.exchange.gradients = ranks.gradients[0]
    parts.step = RanksStep(ranks, parts)
    return parts


def train(config: Config, layout: Sequence[int]) -> Trained:
    """Train with a reducer for each of the ranks of ``layout``; batches are those of all together."""
    ranks = Ranks(layout)
    task = config.task.make()
    if not getattr(task, "streams", False):  # streams have the rows of each rank; other batches are cut
        config = config.model_copy(update={"accumulate": ranks.count})
        task.check(config)

    def body(comm: Communicator) -> Summary | None:
        ranks.topologies[comm.rank] = Topology(comm)
        if comm.rank > 0:
            while ranks.take_part(comm):
                pass
            return None
        summary = Trainer(config, topology=Topology(world()), build=partial(build_ranks, ranks)).fit()
        ranks.all_do(None)
        return summary

    summary = simulated.run(body, ranks.count, list(layout))[0]
    return Trained(summary, ranks.gradients[0].size, ranks.totals)
