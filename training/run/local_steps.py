"""Local steps: replicas take steps from common weights, then exchange the differences of their weights.

The algorithm is in :mod:`commlib.rounds`.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import chain, pairwise
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from commlib import Exchange, Report, Topology, make_reducer
from commlib.arrays import empty, to_host
from commlib.reducers.report import StageSeconds, merged
from commlib.rounds import OuterSgd, Pace, Rounds, Weights, entries_in, fragment_bounds
from commlib.tensorflow import DistributedGradients, array_of, tensor_of
from commlib.topology import Traffic
from commlib.vectors import Float32, is_finite
from training.checkpoint.serialization import parsed
from training.config.records import Outer, Phase
from training.results import StepHyperparameters
from training.run.backward import assign

ALL = slice(None)
NOTHING_EXCHANGED = Report(finite=True, selected=0, applied=0, traffic=Traffic(), seconds=StageSeconds())


class FlatVariables:
    """Variables of float32 as one vector, in the memory of ``arrays``."""

    def __init__(self, variables: Sequence[Any], arrays: ModuleType) -> None:
        self._variables, self._arrays = tensorflows(variables), arrays
        self._sizes = [math.prod(variable.shape) for variable in variables]

    def read(self, part: slice = ALL) -> Float32:
        """Return a copy of the vector, or of a ``part``."""
        places, low = entries_in(part, self._sizes), 0
        vector = empty(sum(entries.stop - entries.start for _, entries in places), self._arrays)
        for number, entries in places:
            own = self._values(number)[entries]
            vector[low : low + len(own)] = own
            low += len(own)
        return vector

    def write(self, vector: Float32, part: slice = ALL) -> None:
        """Assign values, which are copied: TensorFlow keeps the memory that it is given."""
        low = 0
        for number, entries in entries_in(part, self._sizes):
            own, high = empty(self._sizes[number], self._arrays), low + entries.stop - entries.start
            if high - low < len(own):
                own[...] = self._values(number)
            own[entries] = vector[low:high]
            variable = self._variables[number]
            variable.assign(tensor_of(own.reshape(variable.shape)), read_value=False)
            low = high

    def _values(self, number: int) -> Float32:
        """Return the entries of a variable, for reading until it changes."""
        values: Float32 = array_of(value_of(self._variables[number]), self._arrays)
        return values.reshape(-1)


def tensorflows(variables: Sequence[Any]) -> list[tf.Variable]:
    """Return variables of TensorFlow, or those behind variables of Keras.

    Each round reads and assigns dozens of them: Keras' own operations take four times as long.
    """
    return [each if isinstance(each, tf.Variable) else each.value for each in variables]


def value_of(variable: tf.Variable) -> tf.Tensor:
    """Return the value as a tensor that shares the variable's memory; an update of it takes other memory."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


class LocalSteps(Exchange):
    """The exchange of a phase with local steps: within a round, ``wait`` returns the replica's own gradient.

    With ``local: node`` the ranks of a node are one replica: their gradients are averaged in every step.
    ``end_step`` exchanges the differences of weights through ``gradients``, none of whose buckets has entries
    of two fragments. A skipped round restores the state of ``optimizer``, and ``changed``: the variables that
    a forward pass changes. ``before``: the previous phase's local steps, whose outer velocity is kept.
    ``checks_finite``: whether ``wait`` checks a rank's own gradient; if not, clipping checks its norm.

    ``pace``: how far the replica is; a step counts as one, since all ranks' batches are of one size.
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
        *,
        checks_finite: bool = True,
    ) -> None:
        topology = gradients.topology
        self._gradients, self._arrays = gradients, topology.world.arrays
        self._checks_finite, self._slots = checks_finite, optimizer.slots
        self._optimizer = [optimizer.iterations, *chain.from_iterable(self._slots)]
        self._restored = tensorflows([*self._optimizer, *changed])
        self._before: list[Any] = []  # the values of ``_restored`` at the begin of the round
        read = tf.function(lambda: [value_of(variable) for variable in self._restored], autograph=False)
        self._read = read.get_concrete_function()  # traced now, not in the first step
        self._gradient: Any = None  # of the step that is under way
        self.weights = FlatVariables(variables, self._arrays)
        velocity: Float32 | None = None if before is None else before.rounds.outer.velocity
        outer = phase.outer or Outer()
        update = OuterSgd(outer.rate, outer.momentum, nesterov=outer.nesterov, velocity=velocity)
        self._send, eager = gradients.exchange.submit_part, outer.update == "eager"
        self.pace = Pace(gradients.exchange.slices, phase.round_seconds)
        self.rounds = Rounds(update, self._leave, self._receive, mixing=outer.own_share, eager=eager)
        bounds = fragment_bounds(gradients.shapes, outer.fragments)
        # The last one is all of them, ALL_FRAGMENTS.
        self._fragments = [*(slice(*each) for each in pairwise(bounds)), slice(0, gradients.size)]
        self._node: Topology | None = None
        if phase.replica_is_node and topology.node.size > 1:
            self._node = Topology(topology.node)
            self._node_reducer = make_reducer("dense", self._node, gradients.size)
            self._mean = empty(gradients.size, self._arrays)

    def close(self) -> None:
        self.rounds.finish()
        if self._node is not None:
            self._node_reducer.close()
            self._node.close()

    @property
    def in_round(self) -> bool:
        """Whether a round is under way: replicas have weights of their own."""
        return self.rounds.common is not None

    def passes_over(self) -> bool:
        """Whether the next step is passed over; collective in a node that is one replica."""
        if self._node is None or self.pace.seconds is None:
            return self.pace.is_over
        with self._guard():  # each rank has measured its own seconds
            return bool(self._node.world.allgather_ints([self.pace.is_over]).any())

    def begin_step(self) -> None:
        """Begin a round, unless one is under way; before the forward pass."""
        if not self.in_round:
            self.rounds.begin(self.weights.read())
        if not self._before:
            self._before = self._read()

    def submit(self, bucket: int, gradient: Any) -> None:
        """Submit the whole gradient, as bucket 0."""
        self._gradient = gradient

    def submit_inputs(self, inputs: Sequence[Any]) -> None:
        """Submit the whole gradient, as :meth:`DistributedGradients.inputs` returns it."""
        (flat,) = inputs
        self.submit(0, array_of(flat, self._arrays))

    def wait(self) -> tuple[Float32, Report]:
        """Return the gradient of the replica, for reading only, and the report of its exchange.

        One that is not finite fails the round, where that is checked. Collective in a node that is a replica.
        """
        (own, self._gradient), report = (self._gradient, None), NOTHING_EXCHANGED
        if self._node is None:
            self.rounds.failed |= self._checks_finite and not is_finite(own)
        else:
            with self._guard():
                own = self._node_reducer.reduce(own, out=self._mean)
            assert self._node_reducer.last is not None
            report = replace(self._node_reducer.last, selected=0, applied=0, flags=0)
            self.rounds.failed |= not report.finite
        return own, replace(report, finite=not self.rounds.failed)

    def _guard(self) -> AbstractContextManager[Any]:
        """Return a context to wait in for the ranks of the node."""
        # A guard is of one thread at a time; the watchdog bounds what is outside of one, too.
        return self._gradients.guard() if self.rounds.leaving is None else nullcontext()

    def end_step(self, hyperparameters: StepHyperparameters, within: Report) -> Report:
        """Exchange as :meth:`commlib.rounds.Rounds.end_step`; return its report merged with ``within``.

        A skipped exchange restores weights, optimizer, statistics and carried state as the round began.
        """
        report = self.exchange(hyperparameters, self.weights)
        self.end_round(report)
        # Whether this rank's own steps were finite is known to all only when its next fragment arrives.
        return within if report is None else merged([replace(within, finite=True), report])

    def exchange(self, hyperparameters: StepHyperparameters, weights: Weights) -> Report | None:
        """Exchange fragments of the replica's ``weights`` after a step; return the report, if one arrived."""
        leaving = None if hyperparameters.leaving is None else self._fragments[hyperparameters.leaving]
        return self.rounds.end_step(weights, leaving, arrives=hyperparameters.round_steps > 0)

    def end_round(self, report: Report | None) -> None:
        """Restore everything but the weights if there was an exchange, with ``report``, that was skipped."""
        if report is not None:
            if not report.finite:
                assign(self._restored, self._before)
                self.pace.restart()
            self._before = []

    def abandon_round(self) -> None:
        """Return to the common weights if a run ends within a round; await and drop a pending exchange."""
        self.rounds.abandon(self.weights)

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

    def _leave(self, fragment: slice, difference: Float32) -> None:
        self._send(fragment, difference, self.pace.leaves(fragment))

    def _receive(self, fragment: slice) -> tuple[Float32, Report]:
        mean, report = self._gradients.wait()
        return mean[fragment], report

    def apply(self, mean: Float32, fragment: slice = ALL) -> None:
        """Update the common weights by a mean difference, which is changed."""
        weights = self.weights.read()
        self.rounds.outer.apply(weights, mean, fragment)
        self.weights.write(weights)

    def join(self) -> Traffic:
        """Set every rank's optimizer state to the mean over all ranks, sent dense; return the traffic.

        The number of iterations, which differs where steps were passed over, becomes the largest of any rank.
        """
        traffic, iterations = Traffic(), self._optimizer[0]
        of_ranks = self._gradients.topology.world.allgather_ints([int(iterations.numpy())])
        iterations.assign(of_ranks.max())
        for slots in self._slots:
            values = FlatVariables(slots, self._arrays)
            self._send(self._fragments[-1], values.read())
            mean, report = self._receive(self._fragments[-1])
            values.write(mean)
            traffic += report.traffic
        return traffic

    def shared_state(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks, besides the common weights.

        Arrays are copies. An exchange that is under way is waited for: what it brings is in the state.
        """
        self.rounds.finish()
        velocity, under_way = self.rounds.outer.velocity, None
        if (fragment := self.rounds.leaving) is not None and self.rounds.arrived is not None:
            mean, report = self.rounds.arrived
            under_way = {
                "entries": [fragment.start, fragment.stop],
                "mean": to_host(mean.copy()) if report.finite else None,
            }
        return {
            "velocity": None if velocity is None else to_host(velocity.copy()),
            "in_round": self.in_round,
            "under_way": under_way,
        }

    def own_state(self) -> dict[str, Any]:
        """Return the state of this rank: of its optimizer, and of the round that is under way."""
        round_state, rounds = None, self.rounds
        if self.in_round:
            report = rounds.arrived and replace(rounds.arrived[1], flags=0)  # SIGTERM is over
            round_state = {
                "weights": to_host(self.weights.read()),
                "failed": rounds.failed,
                "pace": self.pace.state_dict(),
                "before": [np.array(value) for value in self._before],
                "report": None if report is None else json.dumps(asdict(report), default=int),
                "ahead": None if rounds.ahead is None else to_host(rounds.ahead),
            }
        return {"optimizer": [variable.numpy() for variable in self._optimizer], "round": round_state}

    def restore_shared(self, state: Mapping[str, Any]) -> None:
        self.rounds.outer.velocity = self._vector(state["velocity"])

    def restore_own(self, shared: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Restore what ``shared_state`` and ``own_state`` returned; the model has the common weights."""
        rounds = self.rounds
        rounds.common, self._before = None, []
        assign(self._optimizer, state["optimizer"])
        if (found := state["round"]) is not None:
            rounds.begin(self.weights.read())
            rounds.failed, self._before = found["failed"], [*map(tf.constant, found["before"])]
            self.pace.load_state_dict(found["pace"])
            self.weights.write(self._vector(found["weights"]))
            rounds.ahead = self._vector(found["ahead"])
            if (under_way := shared["under_way"]) is not None:
                rounds.leaving = slice(*under_way["entries"])
                rounds.arrived = self._vector(under_way["mean"]), parsed(Report, found["report"])

    def restore_elsewhere(self, shared: Mapping[str, Any]) -> bool:
        """Apply the mean that was under way in a state of another number of ranks; return whether one was."""
        under_way = shared["under_way"]
        if under_way is None or under_way["mean"] is None:
            return False
        self.apply(self._vector(under_way["mean"]), slice(*under_way["entries"]))
        return True

    def _vector(self, values: Any) -> Any:
        """Return a vector of a checkpoint, if there is one, in the memory of gradients."""
        return None if values is None else self._arrays.array(values, np.float32)
