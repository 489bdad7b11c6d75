"""The numbers of a run for MLflow, through its package mlflow."""

from collections.abc import Iterator, Mapping
from typing import Any

from training.callbacks.callback import RunView
from training.callbacks.writer import Writer, package


class MLflow(Writer):
    """Gives numbers, and the configuration as parameters, with secrets masked, to an experiment.

    ``tracking_uri``: of the server or folder; by default as ``MLFLOW_TRACKING_URI`` says. A run that goes on
    from a checkpoint goes on there, too.
    """

    def __init__(self, *, experiment: str = "cloudtrain", tracking_uri: str | None = None) -> None:
        self._experiment, self._tracking_uri = experiment, tracking_uri
        self._mlflow: Any = None
        self._run_id: str | None = None

    def on_build(self, run: RunView) -> None:
        """Refuse to run without the package."""
        if run.rank == 0:
            package("mlflow")

    def on_run_begin(self, run: RunView) -> None:
        """Begin the run there, or go on with it."""
        if run.folder is None:
            return
        self._mlflow = package("mlflow")
        if self._tracking_uri is not None:
            self._mlflow.set_tracking_uri(self._tracking_uri)
        self._mlflow.set_experiment(self._experiment)
        if self._run_id is not None:
            self._mlflow.start_run(run_id=self._run_id)
            return
        self._run_id = self._mlflow.start_run(run_name=run.folder.path.name).info.run_id
        self._mlflow.log_params(dict(_flat(run.config.model_dump(mode="json", exclude_none=True))))

    def write(self, numbers: Mapping[str, float], steps: int) -> None:
        """Give numbers."""
        self._mlflow.log_metrics(dict(numbers), step=steps)

    def on_run_end(self, run: RunView) -> None:
        """End the run there."""
        if self._mlflow is not None:
            self._mlflow.end_run()

    def on_error(self, run: RunView, error: BaseException) -> None:
        """Mark the run there as failed."""
        if self._mlflow is not None:
            self._mlflow.end_run("FAILED")

    def state_dict(self) -> Mapping[str, Any]:
        """See :meth:`Callback.state_dict`."""
        return {} if self._run_id is None else {"run_id": self._run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Callback.load_state_dict`."""
        self._run_id = state["run_id"]


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in records and lists by their keys, joined by dots.

    >>> dict(_flat({"phases": [{"epochs": 2}], "name": "x"}))
    {'phases.0.epochs': 2, 'name': 'x'}
    """
    if isinstance(value, Mapping | list):
        for name, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _flat(each, f"{key}.{name}".lstrip("."))
    else:
        yield key, value
