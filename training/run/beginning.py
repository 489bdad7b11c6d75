"""What a run tells before its first step: what it trains, on which ranks, and what was chosen for it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from training.callbacks.callback import Event
from training.config.config import Config
from training.results import Ranks
from training.run.data import Data
from training.run.events import Reasoned
from training.run.learner import Learner
from training.run.phases import PhaseRun
from training.run.provenance import command, now, versions

if TYPE_CHECKING:
    from training.run.trainer import Trainer


def tell(run: "Trainer", why_not_on_gpus: str | None) -> None:
    """Tell all of it; only rank 0 has a folder, and records."""
    if run.folder is not None:
        on_gpus = run.topology.world.arrays is not np
        run.report(RunBegun.of(run.folder.identity, run.ranks, run.config, on_gpus=on_gpus))
    run.progress.say(introduction(run.data, run.learner))
    for line in run.task.notes(run.data.samples):
        run.progress.say(line)
    for event in choices(run.learner, run.phases, why_not_on_gpus):
        run.report(event)


def introduction(data: Data, learner: Learner) -> str:
    """Return the first line of a run: data set, model and ranks."""
    config, topology = learner.config, learner.topology
    nodes = [len(node) for node in topology.nodes]
    samples = f"{len(data.training):,} training and {len(data.test):,} test samples"
    begin = f"{config.dataset.name}: {samples}; {config.model.name}: {learner.gradients.size:,} weights"
    if topology.world.size == 1:
        return f"{begin}; one rank, so nothing is exchanged and no reducer is used"
    emulated = "emulated " if config.ranks_per_node else ""
    word = "node" if len(nodes) == 1 else "nodes"
    return f"{begin}; {topology.world.size} ranks on {len(nodes)} {emulated}{word} {nodes}"


@dataclass(frozen=True)
class RunBegun(Event):
    """A process begins a run, or resumes one.

    ``transport``: ``nccl``, ``nccl+mpi`` or ``mpi``, the transport of gradients; ``none`` on one rank.
    ``reducers``: of the phases, with their options.
    """

    kind = "run"
    identity: str
    command: str
    started: str
    versions: dict[str, str]
    ranks: Ranks
    transport: str
    reducers: list[dict[str, Any]]

    @classmethod
    def of(cls, identity: str, ranks: Ranks, config: Config, *, on_gpus: bool) -> "RunBegun":
        """Return the beginning of a run by this process; ``on_gpus``: gradients stay on GPUs."""
        transport = {"auto": "nccl"}.get(config.transport, config.transport) if on_gpus else "mpi"
        return cls(
            identity=identity,
            command=command(),
            started=now(),
            versions=versions(),
            ranks=ranks,
            transport=transport if ranks.count > 1 else "none",
            reducers=[config.reducer_config(phase) for phase in config.phases] if ranks.count > 1 else [],
        )

    def record(self) -> dict[str, Any]:
        """See :meth:`Event.record`."""
        ranks = {"ranks": self.ranks.count, "nodes": self.ranks.nodes, "hosts": self.ranks.hosts}
        return {name: value for name, value in asdict(self).items() if name != "ranks"} | ranks


@dataclass(frozen=True)
class ReducerChosen(Event):
    """The reducer that ``reducer: auto`` chose for a phase."""

    kind = "choice"
    phase: int
    reducer: str
    options: dict[str, str]
    predicted_seconds: float
    predicted_dense_seconds: float
    reason: str

    def lines(self) -> Iterable[str]:
        """See :meth:`Event.lines`."""
        yield f"phase {self.phase + 1}: auto picks {self.reason}"


class NormsShared(Reasoned):
    """How ranks share the computation of norms."""

    kind = "norms"


class InBuckets(Reasoned):
    """How the gradient is divided into buckets."""

    kind = "buckets"


class SparseTables(Reasoned):
    """Which tables travel as rows."""

    kind = "tables"


class VarianceFrozen(Reasoned):
    """When the second moment of Adam is frozen."""

    kind = "variance"


class LocalRounds(Reasoned):
    """How many local steps a phase has."""

    kind = "local_steps"


@dataclass(frozen=True)
class OnGPUs(Event):
    """Whether gradients stay on the GPUs of ``ranks``; ``why_not``: the reason if not."""

    kind = "gpus"
    ranks: int
    transport: str
    why_not: str | None

    def lines(self) -> Iterable[str]:
        """See :meth:`Event.lines`."""
        if self.why_not is not None:
            yield self.why_not
        elif self.ranks > 1:
            by = "NCCL inside nodes and MPI between them" if self.transport == "nccl+mpi" else "NCCL"
            yield f"gradients stay on the GPUs, one for each rank, and travel by {by}"


def choices(learner: Learner, phases: Sequence[PhaseRun], why_not_on_gpus: str | None) -> Iterator[Event]:
    """Yield the choices that the configuration left open, and how its local steps go."""
    if why_not_on_gpus is not None or learner.topology.world.arrays is not np:
        yield OnGPUs(learner.topology.world.size, learner.config.transport, why_not_on_gpus)
    for number, choice in learner.choices.items():
        yield ReducerChosen(
            phase=number,
            reducer=choice.reducer,
            options=choice.options,
            predicted_seconds=choice.seconds,
            predicted_dense_seconds=choice.dense_seconds,
            reason=choice.reason,
        )
    yield from map(SparseTables, learner.tables.lines())
    yield from map(InBuckets, learner.how_gradients_travel())
    yield from map(NormsShared, learner.how_norms_are_computed())
    yield from map(
        VarianceFrozen, how_the_variance_is_frozen(learner.config, [each.steps for each in phases])
    )
    yield from (LocalRounds(line) for phase in phases if (line := phase.how_rounds_go()) is not None)


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
