"""The events of a run: their lines for the user, and their records in ``metrics.jsonl``.

Those of steps are in :mod:`training.run.lines`. :mod:`training.process.progress` shows the lines,
:class:`training.run_folder.RunFolder` writes the records.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from commlib.errors import one_line
from training.callbacks.callback import Event
from training.config.config import Config
from training.config.records import Target
from training.results import EpochResult, Position, Ranks
from training.run.data import Reads
from training.run.lines import epoch_line
from training.run.phases import PhaseRun
from training.run.provenance import command, now, versions
from training.tasks import Task


@dataclass(frozen=True)
class Note(Event):
    """A line on how the run works.

    ``kind``: ``tables``, ``buckets``, ``norms``, ``variance``, ``local_steps`` or ``settle``.
    """

    kind: str  # type: ignore[misc]  # one class for all kinds
    reason: str

    def lines(self) -> Iterable[str]:
        """See :meth:`Event.lines`."""
        yield self.reason

    def record(self) -> dict[str, Any]:
        """See :meth:`Event.record`."""
        return {"reason": self.reason}


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


def settled(phase: PhaseRun, residual_norm: float) -> Note:
    """Return the event of ranks that apply the residual before a phase that begins, or ends, local steps.

    ``residual_norm``: of the residual of the phase before.
    """
    residual = f"what was held back (norm {residual_norm:.3g} on rank 0) is applied first"
    if phase.phase.local_steps is not None:
        return Note("settle", f"phase {phase.number + 1} begins local steps: {residual}")
    together = "ranks take the mean of their optimizers' states"
    return Note("settle", f"phase {phase.number + 1} ends local steps: {residual}, {together}")


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
