"""The count of skipped steps, and the end of a run that skips too many in a row."""

from training.callbacks.callback import Callback, RunView
from training.results import Step

SKIPPED_STEPS_IN_A_ROW = 20


class TrainingDiverged(RuntimeError):
    """Too many consecutive steps were not finite."""


class SkippedSteps(Callback):
    """Counts the steps of each phase that were skipped, as they are on all ranks or none."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def on_step_end(self, run: RunView, step: Step) -> None:
        """Count the step; raise :class:`TrainingDiverged`, on all ranks, if there are too many."""
        steps = step.hyperparameters.round_steps
        if not steps:  # within a round nothing is known of the other ranks
            return
        is_skipped = not step.report.finite
        self._in_a_row = self._in_a_row + 1 if is_skipped else 0
        run.phase.result.skipped_steps += is_skipped * steps
        if self._in_a_row == SKIPPED_STEPS_IN_A_ROW:
            what = "rounds of local steps" if steps > 1 else "steps"
            raise TrainingDiverged(
                f"{SKIPPED_STEPS_IN_A_ROW} {what} in a row had a NaN or an infinity in their gradients; "
                f"the learning rate is {step.hyperparameters.learning_rate:g}: try a smaller one"
            )
