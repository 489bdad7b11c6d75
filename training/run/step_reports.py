"""What a run tells of its steps: the live line, and a record every ``log_every`` steps."""

from typing import TYPE_CHECKING

from training.callbacks.callback import Callback
from training.process.progress import TimeLeft
from training.run.events import StepTaken, live_line
from training.run.phases import PhaseRun
from training.run.stages import Slowest, Step, shown
from training.run.summary import EpochResult

if TYPE_CHECKING:
    from training.run.trainer import Trainer


class StepReports(Callback):
    """Shows where the run is, and reports :class:`training.run.events.StepTaken`."""

    def __init__(self) -> None:
        self._left = TimeLeft()
        self._slowest: Slowest | None = None  # rank of the latest epoch

    def on_phase_begin(self, run: "Trainer", phase: PhaseRun) -> None:
        """Measure anew: step times differ between phases."""
        self._left = TimeLeft()

    def on_step_end(self, run: "Trainer", step: Step) -> None:
        """Show the step."""
        self._left.add(step.seconds)
        left = self._left.of(run.phase.steps - run.position.phase_steps)
        times = shown(run.accumulator.stages.hidden_share, self._slowest)
        run.progress.update(live_line(run.phases, run.position, step.loss, left, times))
        if run.position.steps % run.config.log_every == 0:
            run.report(StepTaken.of(run.position, step, run.learner))

    def on_epoch_end(self, run: "Trainer", result: EpochResult) -> None:
        """Note who was the slowest."""
        self._slowest = result.stages.slowest
