"""The events of a run: their lines for the user, and their records in ``metrics.jsonl``.

:mod:`training.process.progress` shows the lines, :class:`training.run.metrics.RunFolder` writes the records.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from commlib.errors import one_line
from training.callbacks.callback import Event
from training.config.config import Config
from training.config.records import Target
from training.run.data import Data, Reads
from training.run.learner import Learner
from training.run.phases import PhaseRun
from training.run.provenance import command, now, versions
from training.run.stages import Step
from training.run.state import Position
from training.run.summary import EpochResult, Ranks, epoch_line
from training.tasks import Task

# ------------------------------------------------------------------------------------------ before training


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


@dataclass(frozen=True)
class Reasoned(Event):
    """An event that one line tells."""

    reason: str

    def lines(self) -> Iterable[str]:
        """See :meth:`Event.lines`."""
        yield self.reason


class NormsShared(Reasoned):
    """How ranks share the computation of norms."""

    kind = "norms"


class InBuckets(Reasoned):
    """How the gradient is divided into buckets."""

    kind = "buckets"


class SparseTables(Reasoned):
    """Which tables travel as rows."""

    kind = "tables"


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


def choices(learner: Learner, why_not_on_gpus: str | None) -> Iterator[Event]:
    """Yield the choices that the configuration left open."""
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


class LocalRounds(Reasoned):
    """How many local steps a phase has."""

    kind = "local_steps"


def rounds(phases: Sequence[PhaseRun]) -> Iterator[LocalRounds]:
    """Yield the local steps of the phases that have them."""
    yield from (LocalRounds(line) for phase in phases if (line := phase.how_rounds_go()) is not None)


@dataclass(frozen=True)
class Resumed(Event):
    """The run resumes ``at`` the position of a checkpoint. ``changes``: a line for each difference."""

    kind = "resume"
    checkpoint: str
    changes: list[str]
    at: Position

    def lines(self) -> Iterable[str]:
        """See :meth:`Event.lines`."""
        at = self.at
        position = f"step {at.steps}, phase {at.phase + 1}, epoch {at.run_epoch + 1}"
        yield f"resumed from {self.checkpoint}: {position}"
        yield from self.changes

    def record(self) -> dict[str, Any]:
        """See :meth:`Event.record`."""
        return {"checkpoint": self.checkpoint, "changes": self.changes, **asdict(self.at)}


@dataclass(frozen=True)
class Prepared(Event):
    """The steps of all phases to come are compiled."""

    kind = "prepare"
    compile_seconds: float


# ------------------------------------------------------------------------------------------ while training


def live_line(
    phases: Sequence[PhaseRun], at: Position, loss: float, seconds_left: float | None, times: str = ""
) -> str:
    """Return the live line after a step.

    ``seconds_left``: until the end of the phase, if known; ``times``: see :func:`training.run.stages.shown`.
    """
    phase = phases[at.phase]
    reducer = "" if phase.result.reducer is None else f" of {phase.result.reducer}"
    left = ""
    if seconds_left is not None:
        of_phase = "" if len(phases) == 1 else f" of phase {at.phase + 1}/{len(phases)}"
        left = f"  {timedelta(seconds=round(seconds_left))} left{of_phase}"
    return (
        f"epoch {at.run_epoch + 1}  step {at.phase_steps}/{phase.steps}{reducer}"
        f" at {phase.result.input}  loss {loss:.3f} (rank 0){times}{left}"
    )


@dataclass(frozen=True)
class StepTaken(Event):
    """A step of rank 0. ``step``: of its phase. ``loss``: of its samples, if it was finite.

    ``step_seconds``: since the end of the step before. ``stage_seconds``: by
    :class:`training.run.stages.LoopSeconds` and :class:`commlib.reducers.report.StageSeconds`.
    ``busy_seconds``, ``hidden_seconds``, ``forgotten``: as in :class:`commlib.Report`.
    """

    kind = "step"
    epoch: int
    step: int
    loss: float | None
    learning_rate: float
    momentum: float | None
    loss_scale: float | None
    finite: bool
    selected: int
    applied: int
    traffic: dict[str, Any]
    step_seconds: float
    stage_seconds: dict[str, float]
    busy_seconds: float
    hidden_seconds: float
    forgotten: dict[str, float]

    @classmethod
    def of(cls, at: Position, step: Step, learner: Learner) -> "StepTaken":
        """Return the event of the step that led to ``at``, with the loss scale of the next step."""
        report = step.report
        return cls(
            epoch=at.run_epoch,
            step=at.phase_steps,
            loss=step.loss if np.isfinite(step.loss) else None,
            learning_rate=step.hyperparameters.learning_rate,
            momentum=step.hyperparameters.momentum,
            loss_scale=None if learner.scale is None else float(learner.scale.scale.numpy()),
            finite=report.finite,
            selected=report.selected,
            applied=report.applied,
            traffic=asdict(report.traffic),
            step_seconds=step.seconds,
            stage_seconds=step.stage_seconds,
            busy_seconds=report.busy,
            hidden_seconds=report.hidden,
            forgotten=asdict(report.forgotten),
        )


@dataclass(frozen=True)
class Switched(Event):
    """A phase has another reducer, which takes over the residual of the previous one."""

    kind = "switch"
    before: str
    after: str
    residual_norm: float

    def lines(self) -> Iterable[str]:
        """See :meth:`Event.lines`."""
        residual = f"the residual (norm {self.residual_norm:.3g} on rank 0) goes into the next step"
        yield f"switch from {self.before} to {self.after}: {residual}"


class Settled(Reasoned):
    """The ranks come together before a phase that begins, or ends, local steps."""

    kind = "settle"

    @classmethod
    def of(cls, phase: PhaseRun, residual_norm: float) -> "Settled":
        """Return it; ``residual_norm``: of what the reducer of the phase before holds back."""
        held_back = f"what was held back (norm {residual_norm:.3g} on rank 0) is applied first"
        if phase.phase.local_steps is not None:
            return cls(f"phase {phase.number + 1} begins local steps: {held_back}")
        together = "ranks take the mean of their optimizers' states"
        return cls(f"phase {phase.number + 1} ends local steps: {held_back}, {together}")


@dataclass(frozen=True)
class Stalled(Event):
    """The ranks stalled before the first step of a phase."""

    kind = "stall"
    phase: int
    stall_seconds: float


@dataclass(frozen=True)
class EpochEnded(Event):
    """An epoch of ``epochs``; ``width``: of the reducers' names."""

    kind = "epoch"
    result: EpochResult
    task: Task
    epochs: int
    width: int

    @classmethod
    def of(cls, result: EpochResult, task: Task, phases: Sequence[PhaseRun], at: Position) -> "EpochEnded":
        """Return the event of the epoch that ends ``at``; later epochs are counted by the current phases."""
        now, *later = phases[at.phase :]
        to_come = -(-(now.steps - at.phase_steps) // now.epoch_steps) + sum(phase.epochs for phase in later)
        width = max(len(phase.result.reducer or "") for phase in phases)
        return cls(result, task, result.epoch + 1 + to_come, width)

    def lines(self) -> Iterable[str]:
        """See :meth:`Event.lines`."""
        yield epoch_line(self.result, self.task, epochs=self.epochs, width=self.width)

    def record(self) -> dict[str, Any]:
        """See :meth:`Event.record`: metrics by name, ``None`` where the epoch was not tested."""
        values: dict[str, Any] = asdict(self.result)
        stages: dict[str, Any] = values.pop("stages")
        metrics: dict[str, Any] = dict.fromkeys(self.task.metrics) | values.pop("metrics")
        throughput = {f"{self.task.unit}_per_second": values.pop("throughput")}
        return metrics | values | throughput | stages


@dataclass(frozen=True)
class Examples(Event):
    """Answers of the model in the test of an epoch: each a few texts, by what they are."""

    kind = "examples"
    epoch: int
    examples: Sequence[Mapping[str, str]]

    def lines(self) -> Iterable[str]:
        """See :meth:`Event.lines`."""
        for example in self.examples:
            width = max(map(len, example), default=0)
            yield from (f"  {name:<{width}}  {one_line(text)}" for name, text in example.items())


def target_line(result: EpochResult, task: Task, target: Target) -> str:
    """Return the line of an epoch that reached the target."""
    metric, value = task.metrics[target.metric], result.metrics[target.metric]
    reached, goal = metric.shown(value, 2), metric.shown(target.goal, 2)
    return f"{target.metric} {reached} reaches the target of {goal} after {result.run_seconds:.1f} s"


@dataclass(frozen=True)
class Stopped(Event):
    """A callback ends the run after an epoch, the number of which is ``epoch``."""

    kind = "stop"
    epoch: int
    reason: str

    def lines(self) -> Iterable[str]:
        """See :meth:`Event.lines`."""
        yield f"{self.reason}: the run ends after epoch {self.epoch + 1}"


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """The checkpoint after ``steps`` of the run is complete.

    ``copy_seconds``: in which the loop stood still for a copy of the state. ``write_seconds``: from then
    until all files were there, in the background. ``wait_seconds``: of these, in which the loop stood still,
    since the next checkpoint was due or the run ended.
    """

    kind = "checkpoint"
    steps: int
    copy_seconds: float
    write_seconds: float
    wait_seconds: float


@dataclass(frozen=True)
class Terminated(Event):
    """The run ends before its time, after ``steps``, because a rank was sent SIGTERM."""

    kind = "terminated"
    steps: int

    def lines(self) -> Iterable[str]:
        """See :meth:`Event.lines`."""
        yield f"SIGTERM: stopped after step {self.steps}, with a checkpoint of it; resume=auto goes on"


@dataclass(frozen=True)
class CacheRead(Event):
    """The reads of all ranks, from the levels of the cache and from storage."""

    kind = "cache"
    reads: Reads

    def lines(self) -> Iterable[str]:
        """See :meth:`Event.lines`."""
        return self.reads.lines()

    def record(self) -> dict[str, Any]:
        """See :meth:`Event.record`."""
        return {**self.reads.counts, "stand_ins": self.reads.stand_ins}
