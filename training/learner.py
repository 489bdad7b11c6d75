"""A model that learns on all ranks together: what one step of training does, and what lies between phases."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from commlib import REDUCERS, Report, Topology
from commlib.profile import Profile
from commlib.tensorflow import DistributedGradients
from commlib.vectors import Float32
from datacache import Batch
from pto.keras import LossScale
from pto.norms import Norms, ShardNorms, sum_of_squares
from pto.sharded import ShardedUpdate, restore, state_of
from training.choices import choose_reducers, count_weights
from training.config import Config
from training.data import input_dtype
from training.datasets import Dataset
from training.models import MODELS
from training.optimizers import Lars, Optimizer
from training.records import Phase
from training.replicas import broadcast_weights
from training.steps import Average, Backward, Forward, Update

POLICIES = {"float32": "float32", "float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}


@dataclass(frozen=True)
class Pace:
    """What a step is taken with."""

    learning_rate: float
    momentum: float | None


class StepNorms:
    """The sums of squares of a step: those that the reducer brought along, else computed here."""

    def __init__(self, norms: Norms, brought: ShardNorms | None) -> None:
        self.norms, self.brought = norms, brought

    def squares(self, *lists: Any) -> npt.NDArray[np.float64]:
        """See :meth:`pto.norms.Norms.squares`."""
        if self.brought is not None and self.brought.squares is not None:
            return self.brought.squares
        return self.norms.squares(*lists)

    def scale_gradients(self, factor: float) -> None:
        """Let what was brought be of gradients that were multiplied with ``factor`` since."""
        if self.brought is not None and self.brought.squares is not None:
            self.brought.squares[1] *= factor**2


class Learner:
    """Model, optimizer and reducer of one rank.

    ``config`` is the configuration with what was chosen from ``profile`` written out, ``choices`` why.
    """

    def __init__(self, config: Config, topology: Topology, dataset: Dataset, profile: Profile | None) -> None:
        self.topology = topology
        with _policy(POLICIES[config.precision]):
            builder = MODELS[config.model]
            self.model = builder(dataset.channels, dataset.classes, normalised=config.normalise is not None)
        self.variables = self.model.trainable_variables
        broadcast_weights(self.model)
        self.choices = choose_reducers(config, topology, profile, count_weights(self.model))
        self.config = config.with_choices(self.choices)
        first = self.config.phases[0]
        self.gradients = DistributedGradients(topology, self.variables, self.config.reducer_config(first))
        self.scale = LossScale() if config.precision == "float16" else None
        self.average = Average(self.variables, config.average) if config.average is not None else None
        self.norms = self._norms()
        self.optimizer: Any = None
        self._make_optimizer(sharded=self._shards(first))
        self._weights = tf.function(lambda: [variable.value.read_value() for variable in self.variables])
        self.forward = Forward(self.model)

    def _norms(self) -> StepNorms | None:
        """Return what computes norms on several ranks; one rank computes its own, in the graph."""
        settings = self.config.optimizer
        if not settings.adapts or self.topology.world.size == 1:
            return None
        sizes = [int(np.prod(variable.shape, dtype=np.int64)) for variable in self.variables]
        # The norms of LAMB are of its moments as well: they are not there before the mean is.
        brought = ShardNorms(sizes) if isinstance(settings, Lars) else None
        self.gradients.passenger = brought
        return StepNorms(Norms(sizes, self.topology.world, partition=getattr(settings, "norms")), brought)  # noqa: B009

    def how_norms_are_computed(self) -> list[str]:
        """Return a line for each way, where ranks could share that work."""
        if self.norms is None:
            return []
        numbered = list(enumerate(self.config.phases, 1))
        names = {number: REDUCERS[self.config.reducer_config(phase)["name"]] for number, phase in numbered}
        carried = [number for number, reducer in names.items() if self.norms.brought and reducer.carries]
        sharded = [number for number, phase in numbered if self._shards(phase)]
        lines = [f"norms travel with the mean gradient in phases {carried}"] if carried else []
        if sharded:
            lines.append(f"weights are updated in parts in phases {sharded}")
        if set(names) - set(carried) - set(sharded):
            lines.append(self.norms.norms.choice.reason)
        return lines

    def _shards(self, phase: Phase) -> bool:
        return self.config.optimizer.sharded and self.config.is_dense(phase) and self.topology.world.size > 1

    def _make_optimizer(self, *, sharded: bool) -> None:
        """Make the optimizer, with the state of the one before."""
        state = None if self.optimizer is None else self.optimizer_state()
        self.optimizer = _with_slots_for_momentum(self.config).make()
        if sharded:
            self.optimizer = ShardedUpdate(self.optimizer, self.topology.world)
        else:
            self.optimizer.norms = self.norms
        # Built before any step is traced: what is built inside a trace stays frozen in it.
        self.optimizer.build(self.variables)
        self._update = Update(self.variables, self.optimizer, self.average)
        if state is not None:
            self.restore_optimizer(state)

    def optimizer_state(self) -> Any:
        """Return iterations and slots by name, whole; where it is sharded all ranks call it together."""
        if isinstance(self.optimizer, ShardedUpdate):
            return self.optimizer.full_state()
        return state_of(self.optimizer, self.variables)

    def restore_optimizer(self, state: Any) -> None:
        """Give the optimizer what ``optimizer_state`` returned."""
        if isinstance(self.optimizer, ShardedUpdate):
            self.optimizer.load_full_state(state)
        else:
            restore(self.optimizer, self.variables, state)

    def backward_of(self, phase: Phase, channels: int) -> Backward:
        """Return what computes the gradients of a phase."""
        size = phase.input_size
        shape = (phase.batch_size // self.config.accumulate, size, size, channels)
        inputs = tf.TensorSpec(shape, input_dtype(self.config))
        scale = None if self.scale is None else self.scale.scale.value
        return Backward(self.model, inputs, smoothing=phase.label_smoothing, scale=scale)

    def begin(self, phase: Phase) -> float | None:
        """Take over what a phase has of its own; return the norm of the residual that changes the reducer.

        ``None`` where the reducer stays. All ranks call it together.
        """
        config, residual = self.config.reducer_config(phase), None
        if config != self.gradients.config:
            residual = float(np.linalg.norm(self.gradients.reducer.residual))
            self.gradients.switch(config)
        if self._shards(phase) != isinstance(self.optimizer, ShardedUpdate):
            self._make_optimizer(sharded=self._shards(phase))
        return residual

    def set_density(self, density: float) -> None:
        """Select another share of the gradient from the next step on."""
        reducer: Any = self.gradients.reducer
        if reducer.density != density:
            reducer.set_density(density)

    def step(self, backward: Backward, batch: Batch, pace: Pace) -> tuple[float, Report]:
        """Learn from one batch; return the loss of this rank's samples, and what the reducer did.

        A step in which any rank's gradient was not finite changes nothing but the loss scale, and the random
        states of the model.
        """
        images, *more = np.split(batch.images, self.config.accumulate)
        labels, *more_labels = np.split(batch.labels, self.config.accumulate)
        loss, gradient = backward(images, labels)
        found = backward.found
        if more:
            loss, gradient = _accumulated(backward, loss, gradient, list(zip(more, more_labels, strict=True)))
        mean, report = self._reduce(gradient)
        if report.finite:
            self._clip(mean)
            self._set(pace)
            self._update(mean)
        else:
            backward.put_back(found)
        if self.scale is not None:
            self.scale.update(report.finite)
        return loss, report

    def _reduce(self, gradient: Float32) -> tuple[Float32, Report]:
        """Return the mean over ranks; where LARS' norms can travel with it, they have."""
        brought = None if self.norms is None else self.norms.brought
        if brought is not None:
            brought.squares = None
            if self.gradients.carried:
                brought.look([np.asarray(weight) for weight in self._weights()])
        reducer = self.gradients.reducer
        mean = reducer.reduce(gradient)
        if brought is not None:
            brought.look([])  # TensorFlow copies a variable that it updates while somebody holds its memory
        assert reducer.last is not None
        return mean, reducer.last

    def _clip(self, mean: Float32) -> None:
        """Scale the mean down to ``clip_norm``, in place; ranks compute the same norm of the same mean."""
        if (most := self.config.clip_norm) is None:
            return
        norm = sum_of_squares(mean) ** 0.5
        if norm > most:
            mean *= np.float32(most / norm)
            if self.norms is not None:
                self.norms.scale_gradients(float(np.float32(most / norm)))

    def _set(self, pace: Pace) -> None:
        self.optimizer.learning_rate.assign(pace.learning_rate)
        if self.optimizer.momentum is not None and pace.momentum is not None:
            self.optimizer.momentum.assign(pace.momentum)

    def tested(self) -> AbstractContextManager[None]:
        """Let the model have the weights that are tested: their average, where one is kept."""
        return nullcontext() if self.average is None else self.average.in_place()


@contextmanager
def _policy(name: str) -> Iterator[None]:
    """Let layers that are made inside the block compute in this precision, and no others."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _with_slots_for_momentum(config: Config) -> Optimizer:
    """Return the optimizer's settings, with a momentum where any phase has one.

    Every step sets its own; but what is made with none has no room for a velocity.
    """
    settings = config.optimizer
    if getattr(settings, "momentum", None) == 0 and any(phase.momentum for phase in config.phases):
        return settings.model_copy(update={"momentum": 0.5})
    return settings


def _accumulated(
    backward: Backward, loss: float, gradient: Float32, more: list[tuple[Any, Any]]
) -> tuple[float, Float32]:
    """Return the mean loss and gradient of a part that is there and of those to come."""
    total = np.array(gradient)
    for images, labels in more:
        own_loss, own_gradient = backward(images, labels)
        loss += own_loss
        total += own_gradient
    parts = 1 + len(more)
    total /= np.float32(parts)
    return loss / parts, total
