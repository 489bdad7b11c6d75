"""The end of a run that no longer gets better."""

from collections.abc import Mapping
from typing import Any

from commlib.errors import shown, suggestion
from training.callbacks.callback import Callback, RunView
from training.config.schema import ConfigurationError, is_number, is_whole
from training.results import EpochResult


class EarlyStopping(Callback):
    """Ends the run, on all ranks, when ``patience`` tests in a row were not better than the best before.

    ``metric``: of the task. A test is better if it is so by more than ``min_delta``; one that is no number
    never is.
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
        """Refuse a metric that the task has not."""
        metrics = run.task.metrics
        if self._metric not in metrics:
            near = suggestion(self._metric, metrics)
            expected = f"expected one of {', '.join(metrics)}, the metrics of {run.config.task.name}"
            raise ValueError(f"metric: {expected}; got {shown(self._metric)}{near}")

    def on_epoch_end(self, run: RunView, result: EpochResult) -> None:
        """Count the tests since the best; all ranks have the same."""
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
        """See :meth:`Callback.state_dict`."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Callback.load_state_dict`."""
        self._best, self._waited = state["best"], state["waited"]
