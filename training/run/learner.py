"""Data-parallel training of a model: one training step, and the change from one phase to the next."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib import Report, Topology
from commlib.arrays import to_host
from commlib.memory import zeros
from commlib.reducers.report import Stopwatch
from commlib.tensorflow import DistributedGradients, tensor_of
from commlib.topology import Traffic
from commlib.trace import Recorder
from commlib.tuning.profile import Profile
from datacache import Batch
from pto.keras import LossScale
from pto.norms import Norms
from pto.sharded import ShardedUpdate, restore, state_of
from training.config.config import Config
from training.config.optimizers import Lamb, Lars, Optimizer
from training.config.records import Phase
from training.config.schema import ConfigurationError
from training.results import LoopSeconds, StepHyperparameters
from training.run.autotune import choose_reducers, count_weights, with_buckets
from training.run.data import Data
from training.run.local_steps import LocalSteps, both
from training.run.norms import StepNorms, norm_of
from training.run.replicas import broadcast_weights
from training.run.steps import Array, Average, Backward, Update
from training.run.tables import Tables, find_tables

POLICIES = {"float32": "float32", "float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}


class Learner:
    """Model, optimizer and reducer of one rank, and the task of ``data``, which tells what a batch is.

    ``config`` has the choices made from ``profile`` written out, ``choices`` their reasons. ``stopwatch``
    adds up the time of steps until it is restarted. ``watchdog`` bounds how long a rank waits for others.
    """

    def __init__(self, config: Config, topology: Topology, data: Data, profile: Profile | None) -> None:
        self.topology, self.task, self.samples = topology, data.task, data.samples
        self.stopwatch = Stopwatch(topology.world.now, LoopSeconds)
        with _policy(POLICIES[config.precision]):
            self.model = self.task.make_model(config, data.dataset)
        self.variables = self.model.trainable_variables
        broadcast_weights(self.model, topology.world)
        self.tables = self._find_tables(config)
        size = count_weights(self.model) - self.tables.weights
        self.choices = choose_reducers(config, topology, profile, size)
        self.config = with_buckets(config.with_choices(self.choices), topology, profile, size)
        first = self.config.phases[0]
        self.gradients = DistributedGradients(
            topology,
            self.variables,
            self.config.reducer_config(first),
            bucket_bytes=self.config.bucket_bytes,
            overlap=self._overlaps(),
            tables=self.tables.sparse,
        )
        self.watchdog = topology.world.watchdog(self.config.stall_timeout)
        self.scale = LossScale() if config.precision == "float16" else None
        self.average = Average(self.variables, config.average) if config.average is not None else None
        self._step_norms = self._norms_of_steps()
        self._norms = self._norms_in_update()
        self.optimizer: Any = None
        self._make_optimizer(sharded=self._shards(first))
        self._norm_of: Callable[[Any], float] | None = None
        self.local: LocalSteps | None = None  # of a phase that has them
        self._set_local_steps(first)
        self.evaluation = self.task.evaluation(self.model, self.samples)
        self._backwards: dict[str, Backward] = {}

    def _find_tables(self, config: Config) -> Tables:
        """Return the tables whose gradients travel as rows: none, unless the configuration asks for them."""
        if not config.sparse_tables:
            return Tables()
        if self.topology.world.arrays is not np:
            expected = "expected false, or transport=mpi, where gradients stay on GPUs"
            raise ConfigurationError(f"sparse_tables: {expected}; got true")
        phase = config.phases[0]
        return find_tables(
            self.model,
            lambda arrays: self.task.losses(self.model, arrays, phase),
            self.task.specs(phase, self.samples),
        )

    def _norms_of_steps(self) -> StepNorms | None:
        """Return the object that computes LARS's norms on several ranks before its update."""
        settings = self.config.optimizer
        if self.topology.world.size == 1 or not isinstance(settings, Lars) or self._has_local_steps:
            return None
        return StepNorms(self.variables, self.gradients, settings.norms)

    def _norms_in_update(self) -> Norms | None:
        """Return the object that computes the norms of LAMB's moments, in host memory of several ranks.

        They are part of its update: a single rank, each GPU, and each rank of a run with local steps, whose
        weights are its own, computes its own in the graph.
        """
        settings, world = self.config.optimizer, self.topology.world
        if world.size == 1 or world.arrays is not np or not isinstance(settings, Lamb):
            return None
        if self._has_local_steps:
            return None
        return Norms(self.gradients.sizes, world, partition=settings.norms)

    def how_norms_are_computed(self) -> list[str]:
        """Return a line for each computation that ranks could share."""
        if self.topology.world.size == 1 or not self.config.optimizer.adapts:
            return []
        numbered = list(enumerate(self.config.phases, 1))
        sharded = [number for number, phase in numbered if self._shards(phase)]
        lines = [f"weights are updated in parts in phases {sharded}"] if sharded else []
        if len(sharded) < len(numbered):
            lines.append(self._how_all_norms_are_computed())
        return lines

    def _how_all_norms_are_computed(self) -> str:
        if self._step_norms is not None:
            return self._step_norms.reason
        norms = self._norms
        return "norms in the graph of each rank, in float32" if norms is None else norms.choice.reason

    def how_gradients_travel(self) -> list[str]:
        """Return a line on the buckets of the gradient, where it has several."""
        if (buckets := self.gradients.buckets - len(self.tables.sparse)) < 2:
            return []
        when = "while other layers still compute theirs"
        if not self.gradients.overlaps:
            why = "every phase has local steps" if self.config.overlap else "overlap is off"
            if self.config.accumulate > 1:
                why = f"accumulate is {self.config.accumulate}"
            when = f"when all of it is computed ({why})"
        most = f"{self.config.bucket_bytes / 2**20:.3g} MiB"
        return [f"the gradient travels in {buckets} buckets of about {most}, {when}"]

    @property
    def _has_local_steps(self) -> bool:
        return any(phase.local_steps for phase in self.config.phases)

    def _overlaps(self) -> bool:
        """Return whether any phase exchanges a gradient that is computed in one piece."""
        exchanges = any(phase.local_steps is None for phase in self.config.phases)
        return self.config.overlap and self.config.accumulate == 1 and exchanges

    def _shards(self, phase: Phase) -> bool:
        is_alone = self.topology.world.size == 1
        return self.config.optimizer.sharded and not self.config.is_sparse(phase) and not is_alone

    def _make_optimizer(self, *, sharded: bool) -> None:
        """Create the optimizer, with the state of the previous one."""
        state = None if self.optimizer is None else self.optimizer_state()
        self.optimizer = _with_slots_for_momentum(self.config).make()
        if sharded:
            self.optimizer = ShardedUpdate(self.optimizer, self.topology.world)
        else:
            self.optimizer.norms = self._norms if self._step_norms is None else self._step_norms.given
        # Built before any step is traced: variables created inside a trace would be constants in it.
        self.optimizer.build(self.variables)
        self._update = Update(self.variables, self.optimizer, self.average)
        if state is not None:
            self.restore_optimizer(state)

    def optimizer_state(self) -> Any:
        """Return iterations and slots by name, in full; collective where the state is sharded."""
        if isinstance(self.optimizer, ShardedUpdate):
            return self.optimizer.full_state()
        return state_of(self.optimizer, self.variables)

    def restore_optimizer(self, state: Any) -> None:
        """Restore what ``optimizer_state`` returned."""
        if isinstance(self.optimizer, ShardedUpdate):
            self.optimizer.load_full_state(state)
        else:
            restore(self.optimizer, self.variables, state)

    def backward_of(self, phase: Phase) -> Backward:
        """Return the compiled gradient computation of a phase; phases of equal inputs share it."""
        task, parts = self.task, self.config.accumulate
        overlaps = self.gradients.overlaps and phase.local_steps is None
        if (key := f"{phase.own_keys} {overlaps}") not in self._backwards:
            self._backwards[key] = Backward(
                self.model,
                lambda arrays: task.losses(self.model, arrays, phase),
                [_part_of(spec, parts) for spec in task.specs(phase, self.samples)],
                self.gradients,
                carried=task.carried,
                scale=self.scale,
                overlaps=overlaps,
            )
        return self._backwards[key]

    def begin(self, phase: Phase) -> float | None:
        """Apply the settings of a phase; return the norm of the residual passed to its new reducer.

        ``None`` if the reducer does not change. Collective.
        """
        config, residual = self.config.reducer_config(phase), None
        if config != self.gradients.config:
            residual = self.residual_norm()
            self.gradients.switch(config)
        if self._shards(phase) != isinstance(self.optimizer, ShardedUpdate):
            self._make_optimizer(sharded=self._shards(phase))
        self._set_local_steps(phase)
        return residual

    def _set_local_steps(self, phase: Phase) -> None:
        before, self.local = self.local, None
        if before is not None:
            before.close()
        if phase.local_steps is not None:
            changed = [*self.model.non_trainable_weights, *self.task.carried]
            self.local = LocalSteps(phase, self.gradients, self.variables, self.optimizer, changed, before)

    def settle(self, hyperparameters: StepHyperparameters) -> Traffic:
        """Apply what the reducer holds back; return what that took. Collective, before ``begin``.

        For a change from differences of weights to gradients, or back: a residual is of one or the other. One
        dense exchange applies it as what it is. After local steps ranks also get one optimizer state.
        """
        self.gradients.switch({"name": "dense"})
        world, traffic = self.topology.world, Traffic()
        if any(world.allgather_objects(bool(self.gradients.reducer.residual.any()))):
            nothing = tensor_of(zeros(self.gradients.size, world.arrays))
            mean, report = self.gradients.reduce_flat(nothing)
            traffic = report.traffic
            if self.local is None:
                self._apply(mean, hyperparameters)
            else:
                self.local.apply(mean)
        return traffic if self.local is None else traffic + self.local.join()

    def restart_carried(self) -> None:
        """Set what the task carries over batches to zero, as at the beginning of an epoch."""
        for variable in self.task.carried:
            variable.assign(tf.zeros_like(variable))

    def residual_norm(self) -> float:
        """Return the norm of the residual of this rank's reducer."""
        return float(np.linalg.norm(to_host(self.gradients.reducer.residual)))

    def set_density(self, density: float) -> None:
        """Set the density from the next step on."""
        reducer: Any = self.gradients.reducer
        if reducer.density != density:
            reducer.set_density(density)

    def step(
        self, backward: Backward, batch: Batch, hyperparameters: StepHyperparameters
    ) -> tuple[float, Report]:
        """Train on one batch; return the loss of this rank's samples, and the reducer's report.

        A step with a non-finite gradient on any rank changes only the loss scale and the random states of
        the model; of local steps that holds for a round.
        """
        if self.local is not None:
            self.local.begin_step()
        with self.stopwatch.measure("forward_backward"):
            arrays, *more = parts_of(batch, self.config.accumulate)
            loss, gradient = backward(*arrays)
            found = backward.found
            if more:
                loss, gradient = _accumulated(backward, loss, gradient, more)
        if self.local is not None:
            put_back = partial(backward.put_back, found)
            return loss, self._local_step(self.local, gradient[0], hyperparameters, put_back)
        with self.stopwatch.measure("exchange_wait"):
            if self.gradients.overlaps:
                mean, report = self.gradients.collect()
            else:
                mean, report = self.gradients.reduce_flat(*gradient)
        if report.finite:
            self._apply(mean, hyperparameters)
        else:
            backward.put_back(found)
        if self.scale is not None:
            self.scale.update(report.finite)
        return loss, report

    def _local_step(
        self,
        local: LocalSteps,
        flat: Any,
        hyperparameters: StepHyperparameters,
        put_back: Callable[[], None],
    ) -> Report:
        """Update the weights of this replica, or put back what the forward pass changed; end the round."""
        with self.stopwatch.measure("exchange_wait"):
            own, report = local.replica_gradient(flat)
        if local.rounds.failed:
            put_back()  # a test within the round takes the mean of all ranks' statistics
        else:
            self._apply(own, hyperparameters)
        if not hyperparameters.round_steps:
            return report
        with self.stopwatch.measure("exchange_wait"):
            report = both(local.end_round(), report)
        if self.scale is not None:
            self.scale.update(report.finite)
        return report

    def _apply(self, mean: Any, hyperparameters: StepHyperparameters) -> None:
        """Update the weights by the mean, which may be changed."""
        with self.stopwatch.measure("norms"):
            self._clip(mean)
            if self._step_norms is not None and not isinstance(self.optimizer, ShardedUpdate):
                self._step_norms.give(mean)
        with self.stopwatch.measure("update"):
            self._set(hyperparameters)
            self._update(mean)

    def record(self, recorder: Recorder | None) -> None:
        """Give a span of each stage and bucket to ``recorder``, or to none; between two steps."""
        self.stopwatch.recorder = recorder
        self.gradients.record(recorder)

    def _clip(self, mean: Any) -> None:
        """Clip the norm of the mean to ``clip_norm``, in place, identically on all ranks."""
        if (most := self.config.clip_norm) is None:
            return
        if self._norm_of is None:
            self._norm_of = norm_of(self.gradients.size, self.topology.world.arrays)
        if (norm := self._norm_of(mean)) > most:
            mean *= np.float32(most / norm)

    def _set(self, hyperparameters: StepHyperparameters) -> None:
        self.optimizer.learning_rate.assign(hyperparameters.learning_rate)
        if self.optimizer.momentum is not None and hyperparameters.momentum is not None:
            self.optimizer.momentum.assign(hyperparameters.momentum)

    def common_weights(self) -> AbstractContextManager[None]:
        """Set the model to the weights that all ranks have: within a round, those that it began with."""
        return nullcontext() if self.local is None else self.local.common_weights()

    def tested(self) -> AbstractContextManager[None]:
        """Set the model to the weights that are tested: their moving average, if there is one."""
        return nullcontext() if self.average is None else self.average.in_place()


@contextmanager
def _policy(name: str) -> Iterator[None]:
    """Let only layers created inside the block compute in this precision."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _with_slots_for_momentum(config: Config) -> Optimizer:
    """Return the optimizer's settings, with a momentum if any phase has one.

    Every step sets its own value, but an optimizer created without momentum has no velocity slots.
    """
    settings = config.optimizer
    if getattr(settings, "momentum", None) == 0 and any(phase.momentum for phase in config.phases):
        return settings.model_copy(update={"momentum": 0.5})
    return settings


def _part_of(spec: tf.TensorSpec, parts: int) -> tf.TensorSpec:
    """Return the spec of one of ``parts`` equal parts of an array."""
    rows = spec.shape[0]
    return tf.TensorSpec([rows and rows // parts, *spec.shape[1:]], spec.dtype)


def parts_of(batch: Batch, parts: int) -> list[tuple[Array, ...]]:
    """Return the arrays of each of ``parts`` equal parts of a batch."""
    return list(zip(*(np.split(array, parts) for array in batch.arrays), strict=True))


def _accumulated(
    backward: Backward, loss: float, gradient: list[Any], more: Sequence[Sequence[Array]]
) -> tuple[float, list[Any]]:
    """Return the mean loss and gradient of a part that is computed and of the remaining ones.

    Rows of tables follow each other: the reducer adds up those that are given twice.
    """
    flat, *tables = gradient
    for arrays in more:
        own_loss, (own_flat, *own_tables) = backward(*arrays)
        loss += own_loss
        flat += own_flat
        tables = [tf.concat(pair, axis=0) for pair in zip(tables, own_tables, strict=True)]
    parts = 1 + len(more)
    tables[1::2] = [values / parts for values in tables[1::2]]
    return loss / parts, [flat / parts, *tables]
