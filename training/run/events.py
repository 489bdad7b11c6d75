"""The events of a run: their lines for the user, and their records in ``metrics.jsonl``.

Each function returns an event; those of steps are in :mod:`training.run.lines`.
:mod:`training.process.progress` shows the lines, :class:`training.run_folder.RunFolder` writes the records.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from commlib.errors import one_line
from commlib.tuning.tuner import Choice
from training.config.config import Config
from training.config.records import Target
from training.results import EpochResult, Position, Ranks
from training.run.data import Reads
from training.run.lines import RunEvent, epoch_line
from training.run.phases import PhaseRun
from training.run.provenance import command, now, versions
from training.tasks import Task


def note(kind: str, reason: str) -> RunEvent:
    """Return the event of a line on how the run works.

    ``kind``: ``tables``, ``buckets``, ``norms``, ``variance``, ``local_steps`` or ``settle``.
    """
    return RunEvent(kind, {"reason": reason}, [reason])


def run_begun(identity: str, ranks: Ranks, config: Config, *, on_gpus: bool) -> RunEvent:
    """Return the event of a process that begins a run, or resumes one; ``on_gpus``: gradients stay on GPUs.

    Its ``transport`` is that of gradients: ``nccl``, ``nccl+mpi`` or ``mpi``; ``none`` on one rank. Its
    ``reducers`` are those of the phases, with their options.
    """
    transport = {"auto": "nccl"}.get(config.transport, config.transport) if on_gpus else "mpi"
    fields = {
        "identity": identity,
        "command": command(),
        "started": now(),
        "versions": versions(),
        "transport": transport if ranks.count > 1 else "none",
        "reducers": [config.reducer_config(phase) for phase in config.phases] if ranks.count > 1 else [],
        "ranks": ranks.count,
        "nodes": ranks.nodes,
        "hosts": ranks.hosts,
    }
    return RunEvent("run", fields)


def reducer_chosen(phase: int, choice: Choice) -> RunEvent:
    """Return the event of the reducer that ``reducer: auto`` chose for a phase."""
    fields = {
        "phase": phase,
        "reducer": choice.reducer,
        "options": choice.options,
        "predicted_seconds": choice.seconds,
        "predicted_dense_seconds": choice.dense_seconds,
        "reason": choice.reason,
    }
    return RunEvent("choice", fields, [f"phase {phase + 1}: auto picks {choice.reason}"])


def on_gpus(ranks: int, transport: str, why_not: str | None) -> RunEvent:
    """Return whether gradients stay on the GPUs of so many ranks; ``why_not``: the reason if not."""
    lines = [] if why_not is None else [why_not]
    if why_not is None and ranks > 1:
        by = "NCCL inside nodes and MPI between them" if transport == "nccl+mpi" else "NCCL"
        lines = [f"gradients stay on the GPUs, one for each rank, and travel by {by}"]
    return RunEvent("gpus", {"ranks": ranks, "transport": transport, "why_not": why_not}, lines)


def resumed(checkpoint: str, changes: Sequence[str], at: Position) -> RunEvent:
    """Return the event of a resumption from a checkpoint; ``changes``: a line for each difference."""
    place = f"step {at.steps}, phase {at.phase + 1}, epoch {at.run_epoch + 1}"
    fields = {"checkpoint": checkpoint, "changes": list(changes), **asdict(at)}
    return RunEvent("resume", fields, [f"resumed from {checkpoint}: {place}", *changes])


def prepared(seconds: float) -> RunEvent:
    """Return the event of the steps of all phases to come, which are compiled."""
    return RunEvent("prepare", {"compile_seconds": seconds})


def switched(before: str, after: str, residual_norm: float) -> RunEvent:
    """Return the event of a phase with another reducer, which takes over the residual of the previous one."""
    residual = f"the residual (norm {residual_norm:.3g} on rank 0) goes into the next step"
    fields = {"before": before, "after": after, "residual_norm": residual_norm}
    return RunEvent("switch", fields, [f"switch from {before} to {after}: {residual}"])


def settled(phase: PhaseRun, residual_norm: float) -> RunEvent:
    """Return the event of ranks that apply the residual before a phase that begins, or ends, local steps.

    ``residual_norm``: of the residual of the phase before.
    """
    residual = f"what was held back (norm {residual_norm:.3g} on rank 0) is applied first"
    if phase.phase.local_steps is not None:
        return note("settle", f"phase {phase.number + 1} begins local steps: {residual}")
    together = "ranks take the mean of their optimizers' states"
    return note("settle", f"phase {phase.number + 1} ends local steps: {residual}, {together}")


def stalled(phase: int, seconds: float) -> RunEvent:
    """Return the event of ranks that stalled before the first step of a phase."""
    return RunEvent("stall", {"phase": phase, "stall_seconds": seconds})


def epoch_ended(result: EpochResult, task: Task, phases: Sequence[PhaseRun], at: Position) -> RunEvent:
    """Return the event of the epoch that ends ``at``; later epochs are counted by the current phases.

    Its record has the metrics by name, ``None`` where the epoch was not tested.
    """
    this, *later = phases[at.phase :]
    to_come = -(-(this.steps - at.phase_steps) // this.epoch_steps) + sum(phase.epochs for phase in later)
    width = max(len(phase.result.reducer or "") for phase in phases)
    line = epoch_line(result, task, epochs=result.epoch + 1 + to_come, width=width)
    values = asdict(result)
    stages, metrics = values.pop("stages"), dict.fromkeys(task.metrics) | values.pop("metrics")
    throughput = {f"{task.unit}_per_second": values.pop("throughput")}
    return RunEvent("epoch", metrics | values | throughput | stages, [line])


def examples_shown(epoch: int, examples: Sequence[Mapping[str, str]]) -> RunEvent:
    """Return the event of answers of the model in a test: each a few texts, by what they are."""
    lines = []
    for example in examples:
        width = max(map(len, example), default=0)
        lines += [f"  {name:<{width}}  {one_line(text)}" for name, text in example.items()]
    return RunEvent("examples", {"epoch": epoch, "examples": [dict(each) for each in examples]}, lines)


def target_line(result: EpochResult, task: Task, target: Target) -> str:
    """Return the line of an epoch that reached the target."""
    metric, value = task.metrics[target.metric], result.metrics[target.metric]
    reached, goal = metric.shown(value, 2), metric.shown(target.goal, 2)
    return f"{target.metric} {reached} reaches the target of {goal} after {result.run_seconds:.1f} s"


def stopped(epoch: int, reason: str) -> RunEvent:
    """Return the event of a callback that ends the run after an epoch."""
    fields = {"epoch": epoch, "reason": reason}
    return RunEvent("stop", fields, [f"{reason}: the run ends after epoch {epoch + 1}"])


def checkpoint_saved(steps: int, copy_seconds: float, write_seconds: float, wait_seconds: float) -> RunEvent:
    """Return the event of a complete checkpoint of step ``steps`` of the run.

    ``copy_seconds``: the loop waited for a copy of the state. ``write_seconds``: from then until all files
    were written, in the background. ``wait_seconds``: of these, the loop waited since the next checkpoint was
    due or the run ended.
    """
    seconds = {"copy_seconds": copy_seconds, "write_seconds": write_seconds, "wait_seconds": wait_seconds}
    return RunEvent("checkpoint", {"steps": steps, **seconds})


def terminated(steps: int) -> RunEvent:
    """Return the event of a run that ends after ``steps``, because a rank was sent SIGTERM."""
    line = f"SIGTERM: stopped after step {steps}, with a checkpoint of it; resume=auto goes on"
    return RunEvent("terminated", {"steps": steps}, [line])


def cache_read(reads: Reads) -> RunEvent:
    """Return the event of the reads of all ranks, from the levels of the cache and from storage."""
    return RunEvent("cache", {**reads.counts, "stand_ins": reads.stand_ins}, reads.lines())
