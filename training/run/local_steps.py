"""Local steps: replicas take steps from common weights, then exchange the differences of their weights.

The algorithm is in :mod:`commlib.rounds`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import chain
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from commlib import Exchange, Report, Topology, make_reducer
from commlib.arrays import copy_of, empty, to_host
from commlib.reducers.report import StageSeconds
from commlib.rounds import OuterSgd, Rounds
from commlib.tensorflow import DistributedGradients, array_of, cut_up, tensor_of
from commlib.topology import Traffic
from commlib.vectors import Float32, is_finite
from training.config.records import Outer, Phase
from training.run.backward import assign

NOTHING_EXCHANGED = Report(finite=True, selected=0, applied=0, traffic=Traffic(), seconds=StageSeconds())


class FlatVariables:
    """Variables of float32 as one vector, in the memory of ``arrays``."""

    def __init__(self, variables: Sequence[Any], arrays: ModuleType) -> None:
        self._variables, self._arrays = variables, arrays
        self._shapes = [tuple(variable.shape) for variable in variables]

    def read(self) -> Float32:
        flat = tf.concat([tf.reshape(variable, [-1]) for variable in self._variables], axis=0)
        return copy_of(array_of(flat, self._arrays))

    def write(self, vector: Float32) -> None:
        """Assign values, which are copied: TensorFlow keeps the memory that it is given."""
        parts = cut_up(tensor_of(copy_of(vector)), self._shapes)
        for variable, part in zip(self._variables, parts, strict=True):
            variable.assign(part)


class LocalSteps(Exchange):
    """The exchange of a phase with local steps: within a round, ``wait`` returns the replica's own gradient.

    With ``local: node`` the ranks of a node are one replica: their gradients are averaged in every step.
    ``end_round`` exchanges the differences of weights through ``gradients``. A skipped round restores the
    state of ``optimizer``, and ``changed``: the variables that a forward pass changes. ``before``: the local
    steps of the phase before, whose outer velocity continues.
    """

    rounds: Rounds

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
        self._before: list[Any] = []  # the values of ``_restored`` at the begin of the round
        self._submitted: dict[int, Any] = {}
        self.weights = FlatVariables(variables, self._arrays)
        velocity: Float32 | None = None if before is None else before.rounds.outer.velocity
        outer = phase.outer or Outer()
        update = OuterSgd(outer.rate, outer.momentum, nesterov=outer.nesterov, velocity=velocity)
        self.rounds = Rounds(update, self._reduce)
        self._node: Topology | None = None
        if phase.replica_is_node and topology.node.size > 1:
            self._node = Topology(topology.node)
            self._node_reducer = make_reducer("dense", self._node, gradients.size)

    def close(self) -> None:
        if self._node is not None:
            self._node_reducer.close()
            self._node.close()

    @property
    def in_round(self) -> bool:
        """Whether a round is under way: replicas have weights of their own."""
        return self.rounds.common is not None

    def begin_step(self) -> None:
        """Begin a round, unless one is under way; before the forward pass."""
        if not self.in_round:
            self.rounds.begin(self.weights.read())
            self._before = [variable.numpy() for variable in self._restored]

    def submit(self, bucket: int, gradient: Any) -> None:
        self._submitted[bucket] = gradient

    def submit_inputs(self, inputs: Sequence[Any]) -> None:
        """Submit the whole gradient, as :meth:`DistributedGradients.inputs` returns it."""
        for bucket, each in enumerate(inputs):
            self.submit(bucket, array_of(each, self._arrays))

    def wait(self) -> tuple[Float32, Report]:
        """Return the gradient of the replica, which the caller may change, and the report of its exchange.

        A gradient that is not finite fails the round. Collective in a node that is one replica.
        """
        parts = [self._submitted[bucket] for bucket in sorted(self._submitted)]
        self._submitted.clear()
        vector = parts[0] if len(parts) == 1 else self._arrays.concatenate(parts)
        if self._node is None:
            own, report = copy_of(vector), NOTHING_EXCHANGED
            self.rounds.failed |= not is_finite(own)
        else:
            with self._gradients.guard():
                own = self._node_reducer.reduce(vector, out=empty(len(vector), self._arrays))
            assert self._node_reducer.last is not None
            report = replace(self._node_reducer.last, selected=0, applied=0, flags=0)
            self.rounds.failed |= not report.finite
        return own, replace(report, finite=not self.rounds.failed)

    def end_round(self, within: Report) -> Report:
        """Exchange, and set the common weights; return a report that includes ``within``; collective."""
        weights, report = self.rounds.end(self.weights.read())
        self.finish_round(weights, report)
        seconds = {
            each.name: getattr(report.seconds, each.name) + getattr(within.seconds, each.name)
            for each in fields(StageSeconds)
        }
        return replace(report, traffic=report.traffic + within.traffic, seconds=StageSeconds(**seconds))

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
        """Set the model to the common weights, with which the round began, inside the block."""
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
        exchange = self._gradients.exchange
        for bucket, part in enumerate(exchange.slices):
            exchange.submit(bucket, difference[part])
        return self._gradients.wait()

    def apply(self, mean: Float32) -> None:
        """Update the common weights by a mean difference, which is changed."""
        self.weights.write(self.rounds.outer.apply(self.weights.read(), mean))

    def join(self) -> Traffic:
        """Set the optimizer of every rank to the mean of all, with a dense reducer; return the traffic."""
        traffic = Traffic()
        for slots in self._slots:
            values = FlatVariables(slots, self._arrays)
            mean, report = self._reduce(values.read())
            values.write(mean)
            traffic += report.traffic
        return traffic

    def shared_state(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks, besides the common weights."""
        velocity = self.rounds.outer.velocity
        return {"velocity": None if velocity is None else to_host(velocity), "in_round": self.in_round}

    def own_state(self) -> dict[str, Any]:
        """Return the state of this rank: of its optimizer, and of the round that is under way."""
        round_state = None
        if self.in_round:
            round_state = {
                "weights": to_host(self.weights.read()),
                "failed": self.rounds.failed,
                "before": list(self._before),
            }
        return {"optimizer": [variable.numpy() for variable in self._optimizer], "round": round_state}

    def restore_shared(self, state: Mapping[str, Any]) -> None:
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
