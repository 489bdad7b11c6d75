"""The composition root: the parts of a run, made from its configuration, and what uses several of them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from commlib import Topology
from commlib.tuning.tuner import Choice
from datacache import Batch
from training.callbacks.callback import Callbacks, Event
from training.callbacks.digests import Digests, check_equal_weights
from training.callbacks.files import DawnBench, Metrics
from training.callbacks.stopping import SkippedSteps
from training.callbacks.tracing import Profiler
from training.callbacks.writers import Prometheus
from training.config.config import Config
from training.run import events
from training.run.autotune import choose_reducers, profile_for, with_buckets
from training.run.data import Data
from training.run.exchange import PhaseExchange
from training.run.model import Model, Part, average_statistics
from training.run.optimizer import WeightUpdate
from training.run.parts import check_reducers
from training.run.phases import PhaseRun
from training.run.provenance import Receipts
from training.run.step import TrainingStep
from training.tasks.task import Tested

NOT_TESTED = Tested({}, 0)


@dataclass
class Parts:
    """What a run on one rank is made of. ``config`` has the choices of ``auto`` written out.

    ``choices``: what ``auto`` chose for phases, by number. ``step``: takes training steps with the parts.
    """

    config: Config
    topology: Topology
    data: Data
    model: Model
    exchange: PhaseExchange
    optimizer: WeightUpdate
    step: TrainingStep
    choices: Mapping[int, Choice] = field(default_factory=dict)

    @property
    def stateful(self) -> dict[str, Part]:
        """Return the parts whose states are in a checkpoint, in the order in which they are restored."""
        return {"model": self.model, "optimizer": self.optimizer, "exchange": self.exchange}

    def phases(self) -> list[PhaseRun]:
        """Return the phases of the run; phases of equal inputs share a compiled gradient computation."""
        backwards: dict[str, Any] = {}
        phases = []
        for number, phase in enumerate(self.config.phases):
            overlaps = self.exchange.gradients.overlaps and phase.local_steps is None
            key = f"{phase.own_keys} {overlaps}"
            if key not in backwards:
                scale = self.optimizer.scale
                backwards[key] = self.model.backward(phase, self.exchange.gradients, scale, overlaps=overlaps)
            of_phase = (number, phase, self.config, self.data, backwards[key], self.choices.get(number))
            phases.append(PhaseRun(*of_phase, size=self.topology.world.size))
        return phases

    def callbacks(self) -> Callbacks:
        """Return the callbacks of the run, in the order in which they are called."""
        config = self.config
        profiler = [] if config.trace is None else [Profiler(config.trace)]
        digests = [Digests(config.digest_every)] if config.digest_every else []
        target = [] if config.target is None else [DawnBench()]
        served = [] if config.metrics_port is None else [Prometheus(config.metrics_port)]
        first = [*profiler, SkippedSteps(), *digests, events.StepReports(), *target, *served, Metrics()]
        given = [(each.name, each.make()) for each in config.callbacks]
        return Callbacks(first, given, [Receipts(self.data.fingerprints())])


Build = Callable[[Config, Topology, Data], Parts]


def build(config: Config, topology: Topology, data: Data) -> Parts:
    """Return the parts of a run; collective. Raises ``ValueError`` of one line where a run is impossible."""
    profile = profile_for(config, topology)
    model = Model(config, topology, data)
    size = sum(math.prod(variable.shape) for variable in model.variables) - model.tables.weights
    choices = choose_reducers(config, topology, profile, size)
    config = with_buckets(config.with_choices(choices), topology, profile, size)
    check_reducers(config, topology)
    exchange = PhaseExchange(config, topology, model)
    optimizer = WeightUpdate(config, topology, model.variables, model.average)
    exchange.begin(config.phases[0], optimizer.optimizer)
    step = TrainingStep(topology, model, exchange, optimizer, accumulate=config.accumulate)
    return Parts(config, topology, data, model, exchange, optimizer, step, choices)


def introduction(parts: Parts) -> str:
    """Return the first line of a run: data set, model and ranks."""
    config, topology, data = parts.config, parts.topology, parts.data
    nodes = [len(node) for node in topology.nodes]
    samples = f"{len(data.training):,} training and {len(data.test):,} test samples"
    begin = (
        f"{config.dataset.name}: {samples}; {config.model.name}: {parts.exchange.gradients.size:,} weights"
    )
    if topology.world.size == 1:
        return f"{begin}; one rank, so nothing is exchanged and no reducer is used"
    emulated = "emulated " if config.ranks_per_node else ""
    word = "node" if len(nodes) == 1 else "nodes"
    return f"{begin}; {topology.world.size} ranks on {len(nodes)} {emulated}{word} {nodes}"


def choices(parts: Parts, phases: Sequence[PhaseRun], why_not_on_gpus: str | None) -> Iterator[Event]:
    """Yield the choices that the configuration left open, and how its local steps go."""
    topology, config = parts.topology, parts.config
    if why_not_on_gpus is not None or topology.world.arrays is not np:
        yield events.on_gpus(topology.world.size, config.transport, why_not_on_gpus)
    yield from map(events.reducer_chosen, parts.choices.keys(), parts.choices.values())
    notes = {
        "tables": parts.model.tables.lines(),
        "buckets": parts.exchange.lines(),
        "norms": parts.optimizer.lines(),
        "variance": how_the_variance_is_frozen(config, [each.steps for each in phases]),
        "local_steps": [line for phase in phases if (line := phase.how_rounds_go()) is not None],
    }
    yield from (events.note(kind, line) for kind, lines in notes.items() for line in lines)


def how_the_variance_is_frozen(config: Config, steps: Sequence[int]) -> list[str]:
    """Return a line on ``freeze_variance``, if it is given; ``steps``: of the phases."""
    left = given = getattr(config.optimizer, "freeze_variance", None)
    if left is None:
        return []
    for number, own in enumerate(steps, 1):
        if left <= own:
            return [f"the second moment is frozen after {left:,} of the {own:,} steps of phase {number}"]
        left -= own
    return [f"optimizer.freeze_variance={given} has no effect: the run has {sum(steps)} steps"]


def evaluate(parts: Parts, batches: Iterable[Batch]) -> Tested:
    """Return the metrics on the test part, each sample counted once; collective.

    ``batches``: those of this rank. Afterwards all ranks have the same BatchNormalization statistics.
    """
    world = parts.topology.world
    average_statistics(parts.model.keras, world)
    with parts.exchange.common_weights():
        check_equal_weights(parts.model.keras, world, "before the test")
        with parts.model.tested():
            return parts.model.evaluation.evaluate(batches, world)
