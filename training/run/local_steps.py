"""Local steps of a model: a replica's gradient, the end of a round, and what a checkpoint holds of both."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import chain
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from commlib import Report, Topology, make_reducer
from commlib.arrays import to_host
from commlib.memory import copy_of, empty
from commlib.reducers.report import StageSeconds
from commlib.tensorflow import DistributedGradients, array_of, cut_up, tensor_of
from commlib.topology import Traffic
from commlib.vectors import Float32, is_finite
from training.checkpoint.serialization import Tree
from training.config.local_steps import Outer
from training.config.records import Phase
from training.run.replicas import assign
from training.run.rounds import OuterSgd, Rounds

NOTHING_EXCHANGED = Report(finite=True, selected=0, applied=0, traffic=Traffic(), seconds=StageSeconds())


class FlatVariables:
    """Variables of float32 as one vector, in the memory of ``arrays``."""

    def __init__(self, variables: Sequence[Any], arrays: ModuleType) -> None:
        self._variables, self._arrays = variables, arrays
        self._shapes = [tuple(variable.shape) for variable in variables]

    def read(self) -> Float32:
        """Return a copy of their values."""
        flat = tf.concat([tf.reshape(variable, [-1]) for variable in self._variables], axis=0)
        return copy_of(array_of(flat, self._arrays))

    def write(self, vector: Float32) -> None:
        """Assign values, which are copied: TensorFlow keeps the memory that it is given."""
        parts = cut_up(tensor_of(copy_of(vector)), self._shapes)
        for variable, part in zip(self._variables, parts, strict=True):
            variable.assign(part)


class LocalSteps:
    """The local steps of a phase. ``before``: those of the phase before, whose outer velocity goes on.

    A skipped round restores the state of the ``optimizer``, and ``changed``: what a forward pass changes.
    With ``local: node`` the ranks of a node are one replica: their gradients are averaged in every step.
    """

    def __init__(
        self,
        phase: Phase,
        gradients: DistributedGradients,
        variables: Sequence[Any],
        optimizer: Any,
        changed: Sequence[Any],
        before: "LocalSteps | None" = None,
    ) -> None:
        topology = gradients.topology
        self._gradients, self._arrays = gradients, topology.world.arrays
        self._slots = optimizer.slots
        self._optimizer = [optimizer.iterations, *chain.from_iterable(self._slots)]
        self._restored = [*self._optimizer, *changed]
        self._before: list[Any] = []  # the values of what is restored, from when the round began
        self.weights = FlatVariables(variables, self._arrays)
        velocity: Float32 | None = None if before is None else before.rounds.outer.velocity
        self.rounds: Rounds = Rounds(OuterSgd(phase.outer or Outer(), velocity), self._reduce)
        self._node: Topology | None = None
        if phase.replica_is_node and topology.node.size > 1:
            self._node = Topology(topology.node)
            self._node_reducer = make_reducer("dense", self._node, gradients.size)

    def close(self) -> None:
        """Free what was made for the node; all its ranks call it together."""
        if self._node is not None:
            self._node_reducer.close()
            self._node.close()

    # -------------------------------------------------------------------------------------- a step

    @property
    def in_round(self) -> bool:
        """Whether a round is under way: replicas have weights of their own."""
        return self.rounds.common is not None

    def begin_step(self) -> None:
        """Begin a round, unless one is under way; before the forward pass."""
        if not self.in_round:
            self.rounds.begin(self.weights.read())
            self._before = [variable.numpy() for variable in self._restored]

    def replica_gradient(self, flat: Any) -> tuple[Float32, Report]:
        """Return the gradient of the replica, which the caller may change, and what its exchange took.

        One that is not finite fails the round. Collective in a node that is one replica.
        """
        vector = array_of(flat, self._arrays)
        if self._node is None:
            own = copy_of(vector)
            self.rounds.failed |= not is_finite(own)
            return own, NOTHING_EXCHANGED
        with self._gradients.guard():
            own = self._node_reducer.reduce(vector, out=empty(len(vector), self._arrays))
        report = self._node_reducer.last
        assert report is not None
        self.rounds.failed |= not report.finite
        return own, replace(report, finite=True, selected=0, applied=0, flags=0)

    def end_round(self) -> Report:
        """Exchange, and set the new common weights. Collective."""
        weights, report = self.rounds.end(self.weights.read())
        self.finish_round(weights, report)
        return report

    def finish_round(self, weights: Float32, report: Report) -> None:
        """Set the new common weights; where the round is skipped restore all else."""
        self.weights.write(weights)
        if not report.finite:
            assign(self._restored, self._before)

    def abandon_round(self) -> None:
        """Return to the common weights without an exchange, where a run ends within a round."""
        if self.rounds.common is not None:
            self.weights.write(self.rounds.common)
            self.rounds.common = None

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """Let the model have the common weights, with which the round began, inside the block."""
        if self.rounds.common is None:
            yield
            return
        own = self.weights.read()
        self.weights.write(self.rounds.common)
        try:
            yield
        finally:
            self.weights.write(own)

    def _reduce(self, difference: Float32) -> tuple[Float32, Report]:
        return self._gradients.reduce_flat(tensor_of(difference))

    # ---------------------------------------------------------------------------------- between phases

    def apply(self, mean: Float32) -> None:
        """Update the common weights by a mean difference, which is changed."""
        self.weights.write(self.rounds.outer.apply(self.weights.read(), mean))

    def join(self) -> Traffic:
        """Let all ranks have the mean of their optimizers' states; return what that took. Collective.

        The reducer is dense.
        """
        traffic = Traffic()
        for slots in self._slots:
            values = FlatVariables(slots, self._arrays)
            mean, report = self._reduce(values.read())
            values.write(mean)
            traffic += report.traffic
        return traffic

    # ------------------------------------------------------------------------------------- checkpoints

    def shared_state(self) -> Tree:
        """Return the state that is equal on all ranks, besides the common weights."""
        velocity = self.rounds.outer.velocity
        return {"velocity": None if velocity is None else to_host(velocity), "in_round": self.in_round}

    def own_state(self) -> Tree:
        """Return the state of this rank: of its optimizer, and of the round that is under way."""
        round_state: Tree = None
        if self.in_round:
            round_state = {
                "weights": to_host(self.weights.read()),
                "failed": self.rounds.failed,
                "before": list(self._before),
            }
        return {"optimizer": [variable.numpy() for variable in self._optimizer], "round": round_state}

    def restore_shared(self, state: Mapping[str, Any]) -> None:
        """Restore what ``shared_state`` returned."""
        velocity = state["velocity"]
        self.rounds.outer.velocity = None if velocity is None else self._arrays.array(velocity, np.float32)

    def restore_own(self, state: Mapping[str, Any]) -> None:
        """Restore what ``own_state`` returned; the model has the common weights."""
        self.rounds.common = None
        assign(self._optimizer, state["optimizer"])
        if (found := state["round"]) is not None:
            self.rounds.begin(self.weights.read())
            self.rounds.failed, self._before = found["failed"], list(found["before"])
            self.weights.write(self._arrays.array(found["weights"], np.float32))


def both(exchange: Report, within: Report) -> Report:
    """Return the report of a step that ends a round: of its exchange, and of that within the replica."""
    seconds = {
        each.name: getattr(exchange.seconds, each.name) + getattr(within.seconds, each.name)
        for each in fields(StageSeconds)
    }
    traffic = exchange.traffic + within.traffic
    return replace(exchange, traffic=traffic, seconds=StageSeconds(**seconds))
