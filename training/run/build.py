"""The composition root: the parts of a run, made from its configuration."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from commlib import Topology
from commlib.tuning.tuner import Choice
from training.callbacks.calling import Callbacks
from training.callbacks.digests import Digests
from training.callbacks.files import DawnBench, Metrics
from training.callbacks.prometheus import Prometheus
from training.callbacks.stopping import SkippedSteps
from training.callbacks.tracing import Profiler
from training.config.config import Config
from training.run.autotune import choose_reducers, count_weights, profile_for, with_buckets
from training.run.data import Data
from training.run.exchange import PhaseExchange
from training.run.model import Model
from training.run.optimizer import WeightUpdate
from training.run.part import Part
from training.run.phases import PhaseRun
from training.run.receipts import Receipts
from training.run.step import TrainingStep
from training.run.step_reports import StepReports


@dataclass
class Parts:
    """What a run on one rank is made of. ``config`` has the choices of ``auto`` written out.

    ``choices``: what ``auto`` chose for phases, by number. ``step``: takes training steps with the parts.
    ``stateful``: the parts whose states are in a checkpoint, by name.
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
        """The parts with a state, in the order in which they are restored."""
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
        first = [*profiler, SkippedSteps(), *digests, StepReports(), *target, *served, Metrics()]
        given = [(each.name, each.make()) for each in config.callbacks]
        return Callbacks(first, given, [Receipts(self.data.fingerprints())])

    def guard_steps(self, number: Callable[[], int]) -> None:
        """Bound how long a rank waits for others in a step; ``number()`` is that of the step."""
        self.exchange.gradients.guard = lambda: self.waiting(f"step {number()}")

    def waiting(self, place: str) -> AbstractContextManager[None]:
        """Return a context in which the job ends when a rank waits for others longer than it may."""
        return self._watchdog.waiting(place)

    def __post_init__(self) -> None:
        self._watchdog = self.topology.world.watchdog(self.config.stall_timeout)


Build = Callable[[Config, Topology, Data], Parts]


def build(config: Config, topology: Topology, data: Data) -> Parts:
    """Return the parts of a run; collective. Raises ``ValueError`` of one line where a run is impossible."""
    profile = profile_for(config, topology)
    model = Model(config, topology, data)
    size = count_weights(model.keras) - model.tables.weights
    choices = choose_reducers(config, topology, profile, size)
    config = with_buckets(config.with_choices(choices), topology, profile, size)
    exchange = PhaseExchange(config, topology, model)
    optimizer = WeightUpdate(config, topology, model.variables, model.average)
    exchange.begin(config.phases[0], optimizer.optimizer)
    step = TrainingStep(topology, model, exchange, optimizer, accumulate=config.accumulate)
    return Parts(config, topology, data, model, exchange, optimizer, step, choices)
