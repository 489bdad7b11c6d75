"""Callbacks that give the numbers of a run to another tool: TensorBoard, W&B, MLflow, Prometheus."""

import math
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar, Literal

from training.callbacks.callback import Callback, RunView
from training.config.schema import ConfigurationError
from training.results import EpochResult, Step
from training.run_folder import RunFolder


class Writer(Callback, ABC):
    """Writes numbers of every ``log_every``-th step and of every epoch, on rank 0."""

    package: ClassVar[str | None] = None  # that it needs, and that cloudtrain does not install
    _is_open = False

    @abstractmethod
    def write(self, numbers: Mapping[str, float], steps: int) -> None:
        """Write numbers by name, after ``steps`` of the run; rank 0 calls it, after ``open``."""

    @abstractmethod
    def open(self, run: RunView, folder: RunFolder) -> None:
        """Begin to write, or continue after a resumption; rank 0 calls it."""

    @abstractmethod
    def close(self, *, has_failed: bool) -> None:
        """End what ``open`` began; rank 0 calls it."""

    def on_build(self, run: RunView) -> None:
        if run.rank == 0 and self.package is not None:
            imported(self.package)

    def on_run_begin(self, run: RunView) -> None:
        if run.folder is not None:
            self.open(run, run.folder)
            self._is_open = True

    def on_step_end(self, run: RunView, step: Step) -> None:
        if self._is_open and run.position.steps % run.config.log_every == 0:
            self.write(numbers_of_step(run, step), run.position.steps)

    def on_epoch_end(self, run: RunView, result: EpochResult) -> None:
        if self._is_open:
            self.write(numbers_of_epoch(run, result), run.position.steps)

    def on_run_end(self, run: RunView) -> None:
        if self._is_open:
            self.close(has_failed=False)

    def on_error(self, run: RunView, error: BaseException) -> None:
        if self._is_open:
            self.close(has_failed=True)


class TensorBoard(Writer):
    """Writes event files into the folder ``tensorboard`` of the run's: ``tensorboard --logdir runs``."""

    def open(self, run: RunView, folder: RunFolder) -> None:
        import tensorflow as tf

        self._writer = tf.summary.create_file_writer(str(folder.path / "tensorboard"))

    def write(self, numbers: Mapping[str, float], steps: int) -> None:
        import tensorflow as tf

        with self._writer.as_default(steps):
            for name, value in numbers.items():
                tf.summary.scalar(name, value)

    def on_epoch_end(self, run: RunView, result: EpochResult) -> None:
        super().on_epoch_end(run, result)
        if self._is_open:
            self._writer.flush()

    def close(self, *, has_failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases(Writer):
    """Sends numbers, and the configuration with secrets masked, to a project; needs wandb 0.19 or newer.

    Credentials come from ``wandb login`` or ``WANDB_API_KEY``. ``mode``: ``offline`` sends nothing; the
    default is that of ``WANDB_MODE``. A run that is resumed from a checkpoint continues its wandb run.
    """

    package = "wandb"
    # wandb would also send the command line, which may hold a secret, and wrap the terminal.
    _SETTINGS: ClassVar = {
        "console": "off",
        "x_disable_meta": True,
        "disable_code": True,
        "disable_git": True,
    }

    def __init__(
        self,
        *,
        project: str = "cloudtrain",
        entity: str | None = None,
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        if mode not in (None, "online", "offline"):
            raise ConfigurationError(f"expected online or offline, got {mode!r}", key="mode")
        self._where: dict[str, Any] = {"project": project, "entity": entity, "mode": mode}

    def open(self, run: RunView, folder: RunFolder) -> None:
        self._run = imported("wandb").init(
            **self._where,
            id=folder.identity,
            resume="allow",
            name=folder.path.name,
            dir=str(folder.path),
            config=run.config.model_dump(mode="json", exclude_none=True),
            settings=self._SETTINGS,
        )

    def write(self, numbers: Mapping[str, float], steps: int) -> None:
        self._run.log(dict(numbers), step=steps)

    def close(self, *, has_failed: bool) -> None:
        self._run.finish(exit_code=int(has_failed))


class MLflow(Writer):
    """Logs numbers, and the configuration as parameters with secrets masked, to an experiment of MLflow.

    ``tracking_uri``: of the server or folder; the default is that of ``MLFLOW_TRACKING_URI``. A run that is
    resumed from a checkpoint continues its MLflow run.
    """

    package = "mlflow"

    def __init__(self, *, experiment: str = "cloudtrain", tracking_uri: str | None = None) -> None:
        self._experiment, self._tracking_uri = experiment, tracking_uri
        self._run_id: str | None = None

    def open(self, run: RunView, folder: RunFolder) -> None:
        self._mlflow = imported("mlflow")
        if self._tracking_uri is not None:
            self._mlflow.set_tracking_uri(self._tracking_uri)
        self._mlflow.set_experiment(self._experiment)
        if self._run_id is not None:
            self._mlflow.start_run(run_id=self._run_id)
            return
        self._run_id = self._mlflow.start_run(run_name=folder.path.name).info.run_id
        self._mlflow.log_params(dict(_flat(run.config.model_dump(mode="json", exclude_none=True))))

    def write(self, numbers: Mapping[str, float], steps: int) -> None:
        self._mlflow.log_metrics(dict(numbers), step=steps)

    def close(self, *, has_failed: bool) -> None:
        self._mlflow.end_run("FAILED" if has_failed else "FINISHED")

    def state_dict(self) -> Mapping[str, Any]:
        return {} if self._run_id is None else {"run_id": self._run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._run_id = state["run_id"]


def numbers_of_step(run: RunView, step: Step) -> dict[str, float]:
    """Return the finite numbers of a step, as rank 0 has them; throughput is of all ranks."""
    report = step.report
    numbers = {
        "train/loss": step.loss,
        "train/learning_rate": step.hyperparameters.learning_rate,
        "train/momentum": step.hyperparameters.momentum,
        f"train/{run.task.unit}_per_second": run.size * step.size / step.seconds,
        "train/skipped_steps": sum(phase.result.skipped_steps for phase in run.phases),
    }
    if run.size > 1 and step.hyperparameters.round_steps:
        numbers |= {
            "exchange/density": report.selected / run.gradient_size,
            "exchange/sent_intra_bytes": report.traffic.sent.intra,
            "exchange/sent_inter_bytes": report.traffic.sent.inter,
            "exchange/hidden_share": report.hidden / report.busy if report.busy else None,
        }
    return _finite(numbers)


def numbers_of_epoch(run: RunView, result: EpochResult) -> dict[str, float]:
    """Return the finite numbers of an epoch, over all ranks."""
    numbers = {"epoch/loss": result.loss, f"epoch/{run.task.unit}_per_second": result.throughput}
    if run.size > 1:
        numbers |= {
            "epoch/sent_intra_bytes": result.sent_intra_bytes,
            "epoch/sent_inter_bytes": result.sent_inter_bytes,
            "epoch/hidden_share": result.stages.hidden_share,
        }
    return _finite(numbers | {f"test/{name}": value for name, value in result.metrics.items()})


def imported(package: str) -> Any:
    """Import a package that cloudtrain does not install; ``ValueError`` says how to install it."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        expected = f"expected the package {package}, which is not installed"
        raise ValueError(f"{expected}: pip install {package}") from error


def _finite(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(each) for name, each in numbers.items() if each is not None and math.isfinite(each)}


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


LOOPBACK = "127.0.0.1"


class Prometheus(Writer):
    """Serves ``http://127.0.0.1:PORT/metrics`` on the machine of rank 0 while the run lasts."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._gauges: dict[str, Any] = {}

    def on_build(self, run: RunView) -> None:
        if run.rank == 0:
            with self._port_errors(), socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
                probe.bind((LOOPBACK, self._port))

    def open(self, run: RunView, folder: RunFolder) -> None:
        self._run_name, self._client = run.config.name, imported("prometheus_client")
        self._registry = self._client.CollectorRegistry()
        with self._port_errors():
            self._served = self._client.start_http_server(self._port, addr=LOOPBACK, registry=self._registry)

    def write(self, numbers: Mapping[str, float], steps: int) -> None:
        """Serve these numbers from now on, and the latest of other names."""
        for name, value in {"steps": steps, **numbers}.items():
            full = f"cloudtrain_{re.sub('[^a-zA-Z0-9_]', '_', name)}"
            if full not in self._gauges:
                self._gauges[full] = self._client.Gauge(full, name, ["run"], registry=self._registry)
            self._gauges[full].labels(self._run_name).set(value)

    def close(self, *, has_failed: bool) -> None:
        server, thread = self._served
        server.shutdown()
        server.server_close()
        thread.join()

    @contextmanager
    def _port_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            expected = f"expected a free port of {LOOPBACK}"
            raise ValueError(f"metrics_port: {expected}, got {self._port}: {error.strerror}") from error
