"""Callbacks that end a run before its last step: it gets no better, or skips too many steps in a row."""

from collections.abc import Mapping
from typing import Any

from commlib.errors import shown, suggestion
from training.callbacks.callback import Callback, RunView
from training.config.schema import ConfigurationError, is_number, is_whole
from training.results import EpochResult, Step

SKIPPED_STEPS_IN_A_ROW = 20


class TrainingDiverged(RuntimeError):
    """Too many consecutive steps were not finite."""


class SkippedSteps(Callback):
    """Counts the skipped steps of each phase; a step is skipped on all ranks or on none."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def on_step_end(self, run: RunView, step: Step) -> None:
        """Count the step; raise :class:`TrainingDiverged`, on all ranks, if there are too many."""
        steps = step.hyperparameters.round_steps
        if not steps:  # within a round of local steps a rank knows only its own gradients
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


class EarlyStopping(Callback):
    """Ends the run, on all ranks, when ``patience`` tests in a row were no better than the best before.

    ``metric``: of the task. A test is better if it improves on the best by more than ``min_delta``; NaN never
    does.
    """

    def __init__(self, *, metric: str, patience: int = 3, min_delta: float = 0.0) -> None:
        if not is_whole(patience, 1):
            raise ConfigurationError(f"expected a whole number from 1, got {shown(patience)}", key="patience")
        if not is_number(min_delta) or min_delta < 0:
            raise ConfigurationError(f"expected a number from 0, got {shown(min_delta)}", key="min_delta")
        self._metric, self._patience, self._min_delta = metric, patience, min_delta
        self._best: float | None = None
        self._waited = 0

    def on_build(self, run: RunView) -> None:
        metrics = run.task.metrics
        if self._metric not in metrics:
            near = suggestion(self._metric, metrics)
            expected = f"expected one of {', '.join(metrics)}, the metrics of {run.config.task.name}"
            raise ValueError(f"metric: {expected}; got {shown(self._metric)}{near}")

    def on_epoch_end(self, run: RunView, result: EpochResult) -> None:
        if not result.metrics:
            return
        value, metric = result.metrics[self._metric], run.task.metrics[self._metric]
        sign = 1 if metric.better == "higher" else -1
        if value == value and (self._best is None or sign * (value - self._best) > self._min_delta):
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            best = "a number" if self._best is None else metric.shown(self._best, 2)
            tests = "1 test" if self._patience == 1 else f"{self._patience} tests in a row"
            run.stop(f"early stopping: {self._metric} was no better than {best} in {tests}")

    def state_dict(self) -> Mapping[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._waited = state["best"], state["waited"]
