"""The events of a run: their lines for the user, and their records in ``metrics.jsonl``; and its other lines.

:mod:`training.process.progress` shows the lines, :class:`training.run_folder.RunFolder` writes the records.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta

import numpy as np

from commlib.errors import one_line
from commlib.tuning.tuner import Choice
from training.callbacks.callback import Callback, PhaseView, RunEvent, RunView
from training.config.records import Target
from training.process.progress import TimeLeft
from training.results import EpochResult, PhaseResult, Position, Ranks, Slowest, Step, Summary, shown
from training.run.data import Reads
from training.tasks.task import Task

STALL_SECONDS = 0.1  # a shorter stop between phases is not worth a line: a step's own time varies by as much


def megabytes(count: float) -> str:
    """Return a number of bytes in MB, with two decimals.

    >>> megabytes(1_234_567)
    '1.23 MB'
    """
    return f"{count / 1e6:.2f} MB"


def epoch_line(result: EpochResult, task: Task, *, epochs: int, width: int) -> str:
    """Return the line of an epoch; ``width`` is that of the reducers' names, 0 without any."""
    loss = "nan" if result.loss is None else f"{result.loss:.3f}"
    between = ""
    if result.dense_inter_bytes:
        sent, dense = megabytes(result.sent_inter_bytes), megabytes(result.dense_inter_bytes)
        between = f"  between nodes {sent} (dense {dense})"
    name, metric = next(iter(task.metrics.items()))
    shown_metric = metric.shown(result.metrics[name]) if result.metrics else ""
    tested = f"{metric.label} {shown_metric:>6}"
    if not result.metrics:
        tested = "not tested".ljust(len(tested))
    reducer = f"{result.reducer or '':<{width}}  " if width else ""
    times = shown(result.stages.hidden_share, result.stages.slowest)
    if result.passed_over:
        times += f"  passed over {result.passed_over} step{'s' * (result.passed_over > 1)}"
    return (
        f"epoch {result.epoch + 1:>2}/{epochs}  {reducer}{result.input}"
        f"  loss {loss}  {tested}"
        f"  {result.throughput:7,.0f} {task.unit}/s{between}{times}"
    )


def _last_test(summary: Summary, task: Task) -> str:
    if not summary.metrics:
        return "not tested"
    name, metric = next(iter(task.metrics.items()))
    value = summary.metrics[name]
    is_count = metric.share and math.isfinite(value)
    of = f" ({round(value * summary.tested)} of {summary.tested})" if is_count else ""
    return f"{metric.label} {metric.shown(value)}{of}"


def _share(phase: PhaseResult) -> str:
    sent, dense = phase.sent_inter_bytes, phase.dense_inter_bytes
    if not sent:
        return "nothing"
    return f"1/{dense / sent:.0f}" if sent < dense else "all"


def closing_lines(
    summary: Summary, task: Task, ranks: Ranks, folder: str, target: Target | None = None
) -> Iterator[str]:
    """Yield the lines at the end of a run."""
    yield f"{_last_test(summary, task)}, trained in {summary.seconds:.0f} s by {ranks}"
    if target is not None and not summary.reached and summary.stopped is None:
        metric = task.metrics[target.metric]
        best = "none" if summary.best is None else metric.shown(summary.best)
        yield f"target not reached: {metric.label} {metric.shown(target.goal)}; the best was {best}"
    sent = sum(phase.sent_inter_bytes for phase in summary.phases)
    dense = sum(phase.dense_inter_bytes for phase in summary.phases)
    if dense:
        yield f"sent between nodes {megabytes(sent)}; dense all the way would have sent {megabytes(dense)}"
        for number, phase in enumerate(summary.phases, 1):
            sizes = f"{megabytes(phase.sent_inter_bytes)} of {megabytes(phase.dense_inter_bytes)}"
            yield f"  phase {number}, {phase.reducer}: {sizes} ({_share(phase)})"
    stalls = [(phase.stall_seconds or 0.0, number) for number, phase in enumerate(summary.phases, 1)]
    if long := [f"{each:.1f} s before phase {number}" for each, number in stalls if each >= STALL_SECONDS]:
        yield f"training stood still between phases: {', '.join(long)}"
    if skipped := sum(phase.skipped_steps for phase in summary.phases):
        steps = "1 step was" if skipped == 1 else f"{skipped} steps were"
        yield f"{steps} skipped: a NaN or an infinity in the gradients"
    if passed_over := sum(phase.passed_over for phase in summary.phases):
        steps = "1 step was" if passed_over == 1 else f"{passed_over} steps of ranks were"
        yield f"{steps} passed over: their rounds had lasted round_seconds"
    if summary.residual_norm:
        norm = f"{summary.residual_norm:.3g}"
        yield f"unsent residual at the end: norm {norm} on rank 0 (not applied)"
    yield f"files: {folder} (metrics.jsonl, config.yaml, model.weights.h5)"


def live_line(
    phases: Sequence[PhaseView], at: Position, loss: float, seconds_left: float | None, times: str = ""
) -> str:
    """Return the live line after a step; ``seconds_left``: of the phase; ``times``: see :func:`shown`."""
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


def note(kind: str, reason: str) -> RunEvent:
    """Return the event of a line on how the run works.

    ``kind``: ``tables``, ``buckets``, ``norms``, ``variance``, ``local_steps`` or ``settle``.
    """
    return RunEvent(kind, {"reason": reason}, [reason])


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
    """Return the event that says whether gradients stay on the GPUs; ``why_not``: the reason if not."""
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


def switched(before: str, after: str, residual_norm: float) -> RunEvent:
    """Return the event of a phase with another reducer, which takes over the residual of the previous one."""
    residual = f"the residual (norm {residual_norm:.3g} on rank 0) goes into the next step"
    fields = {"before": before, "after": after, "residual_norm": residual_norm}
    return RunEvent("switch", fields, [f"switch from {before} to {after}: {residual}"])


def settled(phase: PhaseView, residual_norm: float) -> RunEvent:
    """Return the event of ranks that apply a residual before a phase that begins, or ends, local steps."""
    residual = f"what was held back (norm {residual_norm:.3g} on rank 0) is applied first"
    if phase.phase.local_steps is not None:
        return note("settle", f"phase {phase.number + 1} begins local steps: {residual}")
    together = "ranks take the mean of their optimizers' states"
    return note("settle", f"phase {phase.number + 1} ends local steps: {residual}, {together}")


def epoch_ended(result: EpochResult, task: Task, phases: Sequence[PhaseView], at: Position) -> RunEvent:
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
    """Return the event of the model's example outputs in a test: each maps the names of texts to texts."""
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

    ``copy_seconds``: how long the loop waited for a copy of the state. ``write_seconds``: from then until all
    files were written, in the background. ``wait_seconds``: the part of ``write_seconds`` in which the loop
    waited, because the next checkpoint was due or the run ended.
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


def step_taken(at: Position, step: Step) -> RunEvent:
    """Return the event of the step of rank 0 that led to ``at``, with the loss scale of the next step.

    Fields: ``step``: of its phase. ``loss``: of its samples, ``None`` unless it was finite. ``step_seconds``:
    since the end of the step before. ``passed_over``: no step was taken. ``stage_seconds``: by
    :class:`training.results.LoopSeconds` and :class:`commlib.reducers.report.StageSeconds`. ``busy_seconds``,
    ``hidden_seconds``, ``forgotten``: as in :class:`commlib.Report`.
    """
    report = step.report
    fields = {
        "epoch": at.run_epoch,
        "step": at.phase_steps,
        "loss": step.loss if np.isfinite(step.loss) else None,
        "learning_rate": step.hyperparameters.learning_rate,
        "momentum": step.hyperparameters.momentum,
        "loss_scale": step.loss_scale,
        "passed_over": step.passed_over,
        "finite": report.finite,
        "selected": report.selected,
        "applied": report.applied,
        "traffic": asdict(report.traffic),
        "step_seconds": step.seconds,
        "stage_seconds": step.stage_seconds,
        "busy_seconds": report.busy,
        "hidden_seconds": report.hidden,
        "forgotten": asdict(report.forgotten),
    }
    return RunEvent("step", fields)


class StepReports(Callback):
    """Shows where the run is, and reports every ``log_every``-th step."""

    def __init__(self) -> None:
        self._left = TimeLeft()
        self._slowest: Slowest | None = None  # rank of the latest epoch

    def on_phase_begin(self, run: RunView, phase: PhaseView) -> None:
        self._left = TimeLeft()

    def on_step_end(self, run: RunView, step: Step) -> None:
        self._left.add(step.seconds)
        left = self._left.of(run.phase.steps - run.position.phase_steps)
        times = shown(run.accumulator.stages.hidden_share, self._slowest)
        if not step.passed_over:  # which has no loss
            run.progress.update(live_line(run.phases, run.position, step.loss, left, times))
        if run.position.steps % run.config.log_every == 0:
            run.report(step_taken(run.position, step))

    def on_epoch_end(self, run: RunView, result: EpochResult) -> None:
        self._slowest = result.stages.slowest
