"""The optimizer of a rank: clipping, work that ranks share, the loss scale, and the update."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from commlib import Communicator, Topology
from commlib.arrays import to_host
from commlib.gpu import SegmentSquares
from commlib.tensorflow import array_of, cut_up, tensor_of
from commlib.vectors import Float32
from pto import InvalidArgument, Norms
from pto.keras import GivenSquares, LossScale
from pto.norms import Float64, Way, sum_of_squares
from pto.sharded import ShardedUpdate, restore, state_of
from training.checkpoint.folders import Checkpoint
from training.config.config import Config
from training.config.optimizers import Lamb, Lars, Muon, Optimizer
from training.config.records import Phase
from training.config.schema import ConfigurationError
from training.results import StepHyperparameters
from training.run.model import Average, OtherRun, Part, PartState, assign_checked


class WeightUpdate(Part):
    """Updates ``variables`` by the mean gradient. ``scale``: the loss scale of float16.

    ``begin`` makes the optimizer of a phase, which some phases shard over ranks. ``average``: the moving
    average of the weights, which is updated with them.
    """

    def __init__(
        self, config: Config, topology: Topology, variables: Sequence[Any], average: Average | None
    ) -> None:
        self._config, self._topology, self._variables, self._average = config, topology, variables, average
        self.scale = LossScale() if config.precision == "float16" else None
        self.optimizer: Any = None
        sizes = [math.prod(variable.shape) for variable in variables]
        has_local_steps = any(phase.local_steps for phase in config.phases)
        self._squares: Callable[[Any], Float64] | None = None  # of each step, given to the optimizer
        self._norms: Any = None  # that the optimizer reads
        self._comm: Communicator | None = None  # of ranks that share the work of Muon
        self._how = "norms in the graph of each rank, in float32"
        if isinstance(config.optimizer, Muon):
            self._how = "matrices are orthogonalised in the graph of each rank"
        if topology.world.size > 1 and not has_local_steps:  # replicas have weights of their own
            if isinstance(config.optimizer, Lars):
                self._norms, way = GivenSquares(len(sizes)), config.optimizer.norms
                self._squares, self._how = squares_for(variables, sizes, topology, way)
            elif isinstance(config.optimizer, Lamb) and topology.world.arrays is np:
                # on a GPU the norms of LAMB's moments are computed in the graph of its update
                self._norms = Norms(sizes, topology.world, partition=config.optimizer.norms)
                self._how = self._norms.choice.reason
            elif isinstance(config.optimizer, Muon) and topology.world.arrays is np:
                self._comm = topology.world
        self._size = sum(sizes)
        self._plan: SegmentSquares | None = None  # of the norm to clip, on a GPU
        if config.clip_norm is not None and topology.world.arrays is not np:
            self._plan = SegmentSquares([self._size])
        self._make(sharded=self._shards(config.phases[0]))

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step, with float16."""
        return None if self.scale is None else float(self.scale.scale.numpy())

    @property
    def is_sharded(self) -> bool:
        """Whether each rank updates a part of the weights."""
        return isinstance(self.optimizer, ShardedUpdate)

    def begin(self, phase: Phase) -> None:
        """Make the optimizer of a phase, with the state of the one before; collective."""
        if self._shards(phase) != self.is_sharded:
            before = self._state()
            self._make(sharded=self._shards(phase))
            self._restore(before)

    def apply(self, mean: Any, hyperparameters: StepHyperparameters, measure: Callable[[str], Any]) -> bool:
        """Update the weights by a mean gradient, which clipping may overwrite; ``measure``: a stopwatch's.

        With ``clip_norm``, returns false and changes nothing if the gradient's norm is not finite.
        """
        with measure("norms"):
            if (mean := self._clipped(mean)) is None:
                return False
            if self._squares is not None and not self.is_sharded:
                self._norms.give(self._squares(mean))
        with measure("update"):
            self.set(hyperparameters)
            self._update(tensor_of(mean))
        return True

    def set(self, hyperparameters: StepHyperparameters) -> None:
        self.optimizer.learning_rate.assign(hyperparameters.learning_rate)
        if self.optimizer.momentum is not None and hyperparameters.momentum is not None:
            self.optimizer.momentum.assign(hyperparameters.momentum)

    def lines(self) -> list[str]:
        """Return a line for each computation that ranks could share."""
        if self._topology.world.size == 1 or not isinstance(self._config.optimizer, Lars | Lamb | Muon):
            return []
        numbered = list(enumerate(self._config.phases, 1))
        sharded = [number for number, phase in numbered if self._shards(phase)]
        lines = [f"weights are updated in parts in phases {sharded}"] if sharded else []
        return lines if len(sharded) == len(numbered) else [*lines, self._how]

    def state_dict(self) -> PartState:
        """Return iterations and slots by name, in full, and the loss scale; collective where sharded."""
        scale = None if self.scale is None else [each.numpy() for each in self.scale.variables]
        return PartState(shared={"optimizer": dict(self._state()), "loss_scale": scale})

    def load_state_dict(self, checkpoint: Checkpoint) -> list[str]:
        """Restore the optimizer and the loss scale; raises :class:`OtherRun`."""
        shared: Any = checkpoint.shared
        try:
            self._restore(shared["optimizer"])
        except ValueError as error:
            name = self._config.optimizer.name
            expected = f"the checkpoint is not of {name} and this model"
            raise OtherRun(f"optimizer: {expected}: {error}") from error
        if self.scale is None:
            return []
        if shared["loss_scale"] is None:
            return ["loss_scale: the checkpoint has none: it begins again"]
        assign_checked("loss_scale", self.scale.variables, shared["loss_scale"])
        return []

    def _state(self) -> Any:
        return self.optimizer.full_state() if self.is_sharded else state_of(self.optimizer, self._variables)

    def _restore(self, state: Any) -> None:
        if self.is_sharded:
            self.optimizer.load_full_state(state)
        else:
            restore(self.optimizer, self._variables, state)

    def _shards(self, phase: Phase) -> bool:
        is_alone = self._topology.world.size == 1
        return self._config.optimizer.sharded and not self._config.is_sparse(phase) and not is_alone

    def _make(self, *, sharded: bool) -> None:
        self.optimizer = _with_slots_for_momentum(self._config).make()
        if sharded:
            self.optimizer = ShardedUpdate(self.optimizer, self._topology.world)
        elif isinstance(self._config.optimizer, Muon):
            self.optimizer.comm = self._comm
        else:
            self.optimizer.norms = self._norms
        # Built before any step is traced: variables created inside a trace would be constants in it.
        try:
            self.optimizer.build(self._variables)
        except InvalidArgument as error:
            raise ConfigurationError(str(error), key="optimizer") from error
        if getattr(self.optimizer, "shared", None) is not None:
            self._how = self.optimizer.shared.choice.reason
        optimizer, shapes = self.optimizer, [tuple(variable.shape) for variable in self._variables]
        signature = [tf.TensorSpec([self._size], tf.float32)]

        @tf.function(input_signature=signature, autograph=False)  # type: ignore[untyped-decorator]
        def update(mean: Any) -> None:
            optimizer.apply(cut_up(mean, shapes), self._variables)
            if self._average is not None:
                self._average.follow()

        self._update = update

    def _clipped(self, mean: Any) -> Any:
        """Return the mean with a norm of ``clip_norm`` at most, identically on all ranks, or none."""
        if (most := self._config.clip_norm) is None:
            return mean
        squares = sum_of_squares(mean) if self._plan is None else to_host(self._plan.squares(mean))[0]
        if not math.isfinite(norm := float(squares**0.5)):
            return None
        if norm > most:
            is_ours = getattr(mean.flags, "writeable", False)  # a replica's own gradient is TensorFlow's
            return np.multiply(mean, np.float32(most / norm), out=mean if is_ours else None)
        return mean


def squares_for(
    variables: Sequence[Any], sizes: Sequence[int], topology: Topology, way: Way
) -> tuple[Callable[[Any], Float64], str]:
    """Return a function for the sums of squares of weights and a mean gradient, and how it computes them.

    In host memory all ranks share the work, as set by ``way`` (:class:`pto.Norms`): it is collective. A GPU
    reads its memory faster than ranks exchange messages: each computes all, with two kernels.
    """
    arrays = topology.world.arrays
    if arrays is np:
        norms, ends = Norms(sizes, topology.world, partition=way), np.cumsum(sizes)[:-1]
        read = tf.function(lambda: [each.value.read_value() for each in variables])

        def on_host(mean: Float32) -> Float64:
            return norms.squares([array_of(weight) for weight in read()], np.split(mean, ends))

        return on_host, norms.choice.reason
    plan = SegmentSquares(sizes)
    flat = tf.function(lambda: tf.concat([tf.reshape(each.value, [-1]) for each in variables], axis=0))

    def on_gpu(mean: Any) -> Float64:
        return np.stack([to_host(plan.squares(each)) for each in (array_of(flat(), arrays), mean)])

    return on_gpu, "norms on each GPU: all tensors at once"


def _with_slots_for_momentum(config: Config) -> Optimizer:
    """Return the optimizer's settings, with a momentum if any phase has one: else it would have no slots."""
    settings = config.optimizer
    if getattr(settings, "momentum", None) == 0 and any(phase.momentum for phase in config.phases):
        return settings.model_copy(update={"momentum": 0.5})
    return settings
