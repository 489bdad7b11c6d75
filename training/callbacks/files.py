"""Callbacks that write files of a run's folder: configuration, metrics, summary, DAWNBench's and MLPerf's.

DAWNBench's format is described in https://github.com/stanford-futuredata/dawn-bench-entries, MLPerf's, with
its keys, in https://github.com/mlcommons/logging.
"""

import json
import math
import time
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from commlib.version import __version__
from training.callbacks.callback import Callback, Event, PhaseView, RunView
from training.config.run_files import DAWNBENCH, DAWNBENCH_LINES, METRICS, MLLOG
from training.config.secrets import mask
from training.results import EpochResult, Step
from training.run_folder import RunFolder, unwritable
from training.tasks.task import Tested

# Of MLPerf, by the last word of a key; other keys are points in time.
INTERVALS = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}


class Metrics(Callback):
    """Writes ``config.yaml``, ``metrics.jsonl`` and ``summary.json``."""

    def on_run_begin(self, run: RunView) -> None:
        if run.folder is not None:
            run.folder.write_config(run.config)

    def on_event(self, run: RunView, event: Event) -> None:
        if run.folder is not None:
            values = event.record()
            values.setdefault("phase", run.phase.number)
            values["run_steps"] = run.position.steps
            run.folder.write(event.kind, **values)

    def on_run_end(self, run: RunView) -> None:
        if run.folder is not None:
            run.folder.end(run.summary, run.ranks)


class DawnBench(Callback):
    """Writes ``dawnbench.json`` and ``dawnbench.tsv``, a line per epoch, also of a resumed run."""

    _lines: list[list[str]]

    def on_run_begin(self, run: RunView) -> None:
        """Write ``dawnbench.json`` and the header of the table; ``ValueError`` on a full disk."""
        if run.folder is None:
            return
        path = run.folder.path / DAWNBENCH_LINES
        with unwritable(f"{run.folder.path}: expected room for its records"):
            rows = path.read_text().splitlines()[1:] if path.exists() else []
            self._lines = [row.split("\t") for row in rows]
            run.folder.write_file(DAWNBENCH, json.dumps(mask(_about(run)), indent=2) + "\n")
            self._write(run, run.folder)

    def on_epoch_end(self, run: RunView, result: EpochResult) -> None:
        """Append a tested epoch; shares in percent, hours since the run began.

        The previous line of an epoch that is trained again after a crash is dropped. On a full disk the
        lines are written with the next epoch.
        """
        folder, metrics = run.folder, run.task.metrics
        if folder is None or not result.metrics:
            return
        shown = ((100 if each.share else 1) * result.metrics[name] for name, each in metrics.items())
        values = (result.run_seconds / 3600, *shown)
        previous = [line for line in self._lines if int(line[0]) < result.epoch + 1]
        self._lines = [*previous, [str(result.epoch + 1), *(f"{value:.8g}" for value in values)]]
        folder.attempt(DAWNBENCH_LINES, lambda: self._write(run, folder))

    def _write(self, run: RunView, folder: RunFolder) -> None:
        header = ["epoch", "hours", *(each.column or name for name, each in run.task.metrics.items())]
        content = "".join("\t".join(line) + "\n" for line in (header, *self._lines))
        folder.write_file(DAWNBENCH_LINES, content)


def _about(run: RunView) -> dict[str, Any]:
    about = run.config.dawnbench
    return {
        "version": "v1.0",
        "author": about.author,
        "authorEmail": about.author_email,
        "framework": f"TensorFlow {version('tensorflow')}, cloudtrain {__version__}",
        "codeURL": about.code_url,
        "model": run.config.model.name,
        "hardware": about.hardware or run.ranks.hardware,
        "costPerHour": about.cost_per_hour,
        "timestamp": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "logFilename": METRICS,
        "misc": {"config": run.config.model_dump(mode="json", exclude_none=True)},
    }


class MLLog(Callback):
    """Writes ``mllog.txt``: each line has a time, a key and a value. A resumed run appends to the file.

    ``benchmark``, ``organization``, ``division`` and ``status`` describe a submission.
    """

    def __init__(
        self,
        *,
        benchmark: str | None = None,
        organization: str | None = None,
        division: str | None = None,
        status: str | None = None,
    ) -> None:
        given = {"benchmark": benchmark, "org": organization, "division": division, "status": status}
        self._submission = {f"submission_{key}": value for key, value in given.items() if value is not None}
        self._built = self._step_end = 0
        self._is_running = self._in_epoch = False

    def on_build(self, run: RunView) -> None:
        self._built = _now()

    def on_run_begin(self, run: RunView) -> None:
        if run.folder is None:
            return
        with unwritable(f"{run.folder.path / MLLOG}: expected room for it"):
            (run.folder.path / MLLOG).touch()
        self._write(run, "init_start", at=self._built)
        for key, value in (self._submission | _facts(run)).items():
            self._write(run, key, value)

    def on_phase_begin(self, run: RunView, phase: PhaseView) -> None:
        if not self._is_running:
            self._is_running = True
            self._write(run, "init_stop")
            self._write(run, "run_start")

    def on_step_end(self, run: RunView, step: Step) -> None:
        self._step_end = _now()
        if not self._in_epoch:
            self._in_epoch = True
            start = self._step_end - round(1000 * step.seconds)
            self._write(run, "epoch_start", at=start, epoch_num=run.position.run_epoch + 1)

    def on_test_end(self, run: RunView, tested: Tested) -> None:
        epoch, config = run.position.run_epoch + 1, run.config
        self._end_epoch(run, epoch)
        name = next(iter(run.task.metrics)) if config.target is None else config.target.metric
        value = tested.values[name]
        self._write(run, "eval_start", at=self._step_end, epoch_num=epoch)
        self._write(run, "eval_accuracy", value if math.isfinite(value) else None, epoch_num=epoch)
        self._write(run, "eval_stop", epoch_num=epoch)

    def on_epoch_end(self, run: RunView, result: EpochResult) -> None:
        self._end_epoch(run, result.epoch + 1)

    def on_run_end(self, run: RunView) -> None:
        """Write the end; a run that has a target and did not reach it was aborted, as MLPerf has it."""
        has_failed = run.config.target is not None and not run.summary.reached
        self._write(run, "run_stop", status="aborted" if has_failed else "success")

    def on_error(self, run: RunView, error: BaseException) -> None:
        if self._is_running:
            self._write(run, "run_stop", status="aborted")

    def _end_epoch(self, run: RunView, epoch: int) -> None:
        if self._in_epoch:
            self._in_epoch = False
            self._write(run, "epoch_stop", at=self._step_end, epoch_num=epoch)

    def _write(
        self, run: RunView, key: str, value: Any = None, at: int | None = None, **metadata: Any
    ) -> None:
        """Append a line, on rank 0; ``at``: ms since 1970, now by default."""
        if run.folder is None:
            return
        path = run.folder.path / MLLOG
        time_ms = _now() if at is None else at
        kind = INTERVALS.get(key.rpartition("_")[2], "POINT_IN_TIME")
        fields = {"namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value}
        content = f":::MLLOG {json.dumps({**fields, 'metadata': metadata})}\n"

        def append() -> None:
            with path.open("a") as file:
                file.write(content)

        run.folder.attempt(MLLOG, append)


def _facts(run: RunView) -> dict[str, Any]:
    config, first = run.config, run.phase
    return {
        "submission_platform": run.ranks.hardware,
        "seed": config.seed,
        "global_batch_size": first.global_batch,
        "gradient_accumulation_steps": config.accumulate,
        "train_samples": len(run.data.training),
        "eval_samples": len(run.data.test),
        "opt_name": config.optimizer.name,
        "opt_base_learning_rate": first.hyperparameters(run.position.phase_steps).learning_rate,
    }


def _now() -> int:
    return time.time_ns() // 1_000_000
