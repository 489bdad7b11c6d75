"""What a run tells of its steps: the live line, and a record every ``log_every`` steps."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from training.callbacks.callback import Callback, Event, PhaseView, RunView
from training.process.progress import TimeLeft
from training.results import EpochResult, Position, Slowest, Step, shown


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
class StepTaken(Event):
    """A step of rank 0. ``step``: of its phase. ``loss``: of its samples, if it was finite.

    ``step_seconds``: since the end of the step before. ``stage_seconds``: by
    :class:`training.results.LoopSeconds` and :class:`commlib.reducers.report.StageSeconds`.
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
    def of(cls, at: Position, step: Step) -> "StepTaken":
        """Return the event of the step that led to ``at``, with the loss scale of the next step."""
        report = step.report
        return cls(
            epoch=at.run_epoch,
            step=at.phase_steps,
            loss=step.loss if np.isfinite(step.loss) else None,
            learning_rate=step.hyperparameters.learning_rate,
            momentum=step.hyperparameters.momentum,
            loss_scale=step.loss_scale,
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


class StepReports(Callback):
    """Shows where the run is, and reports :class:`StepTaken`."""

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
            run.report(StepTaken.of(run.position, step))

    def on_epoch_end(self, run: RunView, result: EpochResult) -> None:
        """Remember the slowest rank."""
        self._slowest = result.stages.slowest
