"""The lines that a run prints of its results: the live line, the line of an epoch, those at the end."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from training.callbacks.callback import Callback, Event, PhaseView, RunView
from training.config.records import Target
from training.process.progress import TimeLeft
from training.results import EpochResult, PhaseResult, Position, Ranks, Slowest, Step, Summary, shown
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
    of = f" ({round(value * summary.tested)} of {summary.tested})" if metric.share else ""
    return f"{metric.label} {metric.shown(value)}{of}"


def _share(phase: PhaseResult) -> str:
    sent, dense = phase.sent_inter_bytes, phase.dense_inter_bytes
    if not sent:
        return "nothing"
    return f"1/{dense / sent:.0f}" if sent < dense else "all"


def _stall_lines(phases: Sequence[PhaseResult]) -> Iterator[str]:
    """Yield a line if training stalled between phases for at least ``STALL_SECONDS``."""
    stalls = {number: phase.stall_seconds or 0.0 for number, phase in enumerate(phases, 1)}
    long = {number: seconds for number, seconds in stalls.items() if seconds >= STALL_SECONDS}
    reported = [f"{seconds:.1f} s before phase {number}" for number, seconds in long.items()]
    if reported:
        yield f"training stood still between phases: {', '.join(reported)}"


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
    yield from _stall_lines(summary.phases)
    if skipped := sum(phase.skipped_steps for phase in summary.phases):
        steps = "1 step was" if skipped == 1 else f"{skipped} steps were"
        yield f"{steps} skipped: a NaN or an infinity in the gradients"
    if summary.residual_norm:
        norm = f"{summary.residual_norm:.3g}"
        yield f"unsent residual at the end: norm {norm} on rank 0 (not applied)"
    yield f"files: {folder} (metrics.jsonl, config.yaml, model.weights.h5)"


def live_line(
    phases: Sequence[PhaseView], at: Position, loss: float, seconds_left: float | None, times: str = ""
) -> str:
    """Return the live line after a step.

    ``seconds_left``: until the end of the phase, if known; ``times``: see :func:`training.results.shown`.
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
class RunEvent(Event):
    """An event of the loop. ``fields``: of its record. ``text``: its lines."""

    kind: str  # type: ignore[misc]  # one class for all kinds
    fields: Mapping[str, Any]
    text: Sequence[str] = ()

    def lines(self) -> Sequence[str]:
        return self.text

    def record(self) -> dict[str, Any]:
        return dict(self.fields)


def step_taken(at: Position, step: Step) -> RunEvent:
    """Return the event of the step of rank 0 that led to ``at``, with the loss scale of the next step.

    Fields: ``step``: of its phase. ``loss``: of its samples, ``None`` unless it was finite. ``step_seconds``:
    since the end of the step before. ``stage_seconds``: by :class:`training.results.LoopSeconds` and
    :class:`commlib.reducers.report.StageSeconds`. ``busy_seconds``, ``hidden_seconds``, ``forgotten``: as in
    :class:`commlib.Report`.
    """
    report = step.report
    fields = {
        "epoch": at.run_epoch,
        "step": at.phase_steps,
        "loss": step.loss if np.isfinite(step.loss) else None,
        "learning_rate": step.hyperparameters.learning_rate,
        "momentum": step.hyperparameters.momentum,
        "loss_scale": step.loss_scale,
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
        """Forget the step times, which differ between phases."""
        self._left = TimeLeft()

    def on_step_end(self, run: RunView, step: Step) -> None:
        """Show the step."""
        self._left.add(step.seconds)
        left = self._left.of(run.phase.steps - run.position.phase_steps)
        times = shown(run.accumulator.stages.hidden_share, self._slowest)
        run.progress.update(live_line(run.phases, run.position, step.loss, left, times))
        if run.position.steps % run.config.log_every == 0:
            run.report(step_taken(run.position, step))

    def on_epoch_end(self, run: RunView, result: EpochResult) -> None:
        """Remember the slowest rank."""
        self._slowest = result.stages.slowest
