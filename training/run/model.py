"""The parts of a run that have state, and the first of them: the model of a rank."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib import Communicator, Topology
from commlib.keras import broadcast_variables
from commlib.tensorflow import DistributedGradients
from pto.keras import LossScale
from training.checkpoint.folders import Checkpoint
from training.config.config import Config
from training.config.records import Phase
from training.config.schema import ConfigurationError
from training.run.backward import Array, Backward, Tables, assign, find_tables
from training.run.data import Data

POLICIES = {"float32": "float32", "float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}


class OtherRun(ValueError):
    """A checkpoint is of another task, model or optimizer; one line names what was expected."""


@dataclass(frozen=True)
class PartState:
    """The state of a part, by name: ``shared`` is equal on all ranks, ``own`` is of this rank."""

    shared: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)


class Part(ABC):
    """A part of a run with state: the model, the optimizer, the exchange. A checkpoint has their states."""

    @abstractmethod
    def state_dict(self) -> PartState:
        """Return the state, whose names differ from those of other parts; collective."""

    def check_state(self, shared: Mapping[str, Any]) -> None:  # noqa: B027 - or while the state is loaded
        """Raise ``ValueError`` where the shared state of a checkpoint is of another run; change nothing."""

    @abstractmethod
    def load_state_dict(self, checkpoint: Checkpoint) -> list[str]:
        """Restore the part from a checkpoint; return a line for each difference.

        ``checkpoint.own`` is ``None`` where another number of ranks wrote the checkpoint.
        """


class Model(Part):
    """The Keras model of a rank and its task, with the weights of rank 0.

    ``variables``: its trainable weights. ``tables``: those whose gradients travel as rows. ``average``: their
    moving average, with which the model is tested, if there is one. ``evaluation``: the test of the task.
    """

    def __init__(self, config: Config, topology: Topology, data: Data) -> None:
        self.task, self._samples, self._config = data.task, data.samples, config
        self._topology = topology
        with _policy(POLICIES[config.precision]):
            self.keras = self.task.make_model(config, data.dataset)
        self.variables = self.keras.trainable_variables
        # Not all variables: the states of random generators must differ between ranks.
        broadcast_variables(self.keras.weights, topology)
        phase = config.phases[0]
        self.tables = Tables()
        if config.sparse_tables:
            if topology.world.arrays is not np:
                expected = "expected false, or transport=mpi, where gradients stay on GPUs"
                raise ConfigurationError(f"sparse_tables: {expected}; got true")
            specs = self.task.specs(phase, self._samples)
            self.tables = find_tables(
                self.keras, lambda arrays: self.task.losses(self.keras, arrays, phase), specs
            )
        self.average = Average(self.variables, config.average) if config.average is not None else None
        self.evaluation = self.task.evaluation(self.keras, self._samples)

    def backward(
        self, phase: Phase, gradients: DistributedGradients, scale: LossScale | None, *, overlaps: bool
    ) -> "Backward":
        """Return the compiled gradient computation of a phase."""
        parts = self._config.accumulate
        return Backward(
            self.keras,
            lambda arrays: self.task.losses(self.keras, arrays, phase),
            [_part_of(spec, parts) for spec in self.task.specs(phase, self._samples)],
            gradients,
            carried=self.task.carried,
            scale=scale,
            overlaps=overlaps,
        )

    def restart_carried(self) -> None:
        """Set what the task carries over batches to zero, as at the beginning of an epoch."""
        for variable in self.task.carried:
            variable.assign(tf.zeros_like(variable))

    def tested(self) -> AbstractContextManager[None]:
        """Set the model to the weights that are tested: their moving average, if there is one."""
        return nullcontext() if self.average is None else self.average.in_place()

    def state_dict(self) -> PartState:
        """Return the weights, and of this rank random states, statistics and the state carried over batches.

        Within a round of local steps the caller sets the model to its common weights first.
        """
        return PartState(
            shared={
                "task": self._identity(),
                "weights": {each.path: each.numpy() for each in self.keras.weights},
                "average": [each.numpy() for each in self.average.averages] if self.average else None,
                "world_size": self._topology.world.size,
            },
            own={
                "random": [each.numpy() for each in self._random_states()],
                # They differ between ranks until they are averaged at the end of an epoch.
                "statistics": [each.numpy() for each in self.keras.non_trainable_weights],
                "carried": [each.numpy() for each in self.task.carried],
            },
        )

    def check_state(self, shared: Mapping[str, Any]) -> None:
        """Raise :class:`OtherRun` where a checkpoint is of another task or model; changes nothing."""
        if shared["task"] != (expected := self._identity()):
            raise OtherRun(f"the checkpoint is of another task: expected {expected}, got {shared['task']}")
        saved = shared["weights"]
        if not isinstance(saved, dict):
            raise ValueError(f"weights: expected arrays by name, got {type(saved).__name__}")  # noqa: TRY004
        here = {variable.path: tuple(variable.shape) for variable in self.keras.weights}
        for path in [*here, *(path for path in saved if path not in here)]:
            own, there = here.get(path, "none"), tuple(saved[path].shape) if path in saved else "none"
            if own != there:
                raise OtherRun(f"the checkpoint is of another model: {path}: expected {own}, got {there}")

    def load_state_dict(self, checkpoint: Checkpoint) -> list[str]:
        shared: Any = checkpoint.shared
        weights = self.keras.weights
        assign_checked("weights", weights, [shared["weights"][each.path] for each in weights])
        lines = []
        if self.average is not None and shared["average"] is not None:
            assign_checked("average", self.average.averages, shared["average"])
        elif self.average is not None:
            lines.append("average: the checkpoint has none: it begins again")
            self.average.restart()
        own: Any = checkpoint.own
        if own is None:
            world = self._topology.world
            return [*lines, *load_carried(self.task.carried, checkpoint, world.rank, world.size)]
        assign_checked("statistics", self.keras.non_trainable_weights, own["statistics"])
        assign_checked("random", self._random_states(), own["random"])
        assign_checked("carried", self.task.carried, own["carried"])
        return lines

    def _random_states(self) -> list[Any]:
        """Return the states of random generators (dropout): variables of the model that are not weights."""
        weights = {id(each) for each in self.keras.weights}
        return [each for each in self.keras.variables if id(each) not in weights]

    def _identity(self) -> str:
        """Return the task of the weights, and what else they belong to."""
        return f"{self._config.task.name} {self.task.identity(self._samples.dataset)}".strip()


class Average:
    """The exponential moving average of the trainable weights, with which a model is tested.

    After each step ``a = momentum·a + (1 − momentum)·w``; it starts at the initial weights.
    """

    def __init__(self, variables: Sequence[Any], momentum: float) -> None:
        self._variables = [variable.value for variable in variables]
        self._momentum = momentum
        self.averages = [tf.Variable(variable, trainable=False) for variable in self._variables]

    def follow(self) -> None:
        """Update the average; part of a graph."""
        for average, variable in zip(self.averages, self._variables, strict=True):
            average.assign_sub((1 - self._momentum) * (average - variable))

    def restart(self) -> None:
        assign(self.averages, self._variables)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the averages as the model's weights inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for average, variable in zip(self.averages, self._variables, strict=True):
            before = variable.numpy()
            variable.assign(average)
            average.assign(before)


def assign_checked(name: str, variables: Sequence[Any], values: Sequence[Array]) -> None:
    """Assign values to variables; raise ``ValueError`` unless they are arrays of these shapes and dtypes."""
    if len(variables) != len(values):
        raise ValueError(f"{name}: expected {len(variables)} arrays, got {len(values)}")
    for number, (variable, value) in enumerate(zip(variables, values, strict=True)):
        expected, found = variable.numpy(), np.asarray(value)
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            raise ValueError(
                f"{name}[{number}]: expected {expected.dtype} of shape {expected.shape}, "
                f"got {found.dtype} of shape {found.shape}"
            )
        variable.assign(value)


def load_carried(carried: Sequence[Any], checkpoint: Checkpoint, rank: int, size: int) -> list[str]:
    """Assign this rank's rows of what another number of ranks carried over batches.

    Return a line for each variable that begins again, since its rows are of another shape.
    """
    if not carried:
        return []
    of_ranks: list[Any] = [checkpoint.own_of(each) for each in range(checkpoint.world_size)]
    lines = []
    for number, variable in enumerate(carried):
        rows = np.concatenate([own["carried"][number] for own in of_ranks])
        expected = (size * variable.shape[0], *variable.shape[1:])
        if rows.shape == expected:
            variable.assign(np.split(rows, size)[rank])
        else:
            lines.append(
                f"what is carried over batches begins again: expected the shape {expected} over all ranks, "
                f"got {rows.shape}"
            )
    return lines


def average_statistics(model: Any, comm: Communicator) -> None:
    """Average the BatchNormalization statistics over all ranks, in float64; collective."""
    statistics = model.non_trainable_weights
    if not statistics or comm.size == 1:
        return
    everywhere = comm.allgather_objects([variable.numpy() for variable in statistics])
    for variable, *values in zip(statistics, *everywhere, strict=True):
        variable.assign(np.mean(values, axis=0, dtype=np.float64).astype(variable.dtype))


@contextmanager
def _policy(name: str) -> Iterator[None]:
    """Let only layers created inside the block compute in this precision."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _part_of(spec: tf.TensorSpec, parts: int) -> tf.TensorSpec:
    """Return the spec of one of ``parts`` equal parts of an array."""
    rows = spec.shape[0]
    return tf.TensorSpec([rows and rows // parts, *spec.shape[1:]], spec.dtype)
