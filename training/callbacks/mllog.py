"""A run in MLPerf's format: ``mllog.txt``, each line of which has a time, a key and a value.

Format and keys are those of https://github.com/mlcommons/logging.
"""

import json
import math
import time
from typing import Any

from training.callbacks.callback import Callback, PhaseView, RunView
from training.config.run_files import MLLOG
from training.results import EpochResult, Step
from training.run_folder import unwritable
from training.tasks.task import Tested

START, END, POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"


class MLLog(Callback):
    """Writes ``mllog.txt`` into the run's folder, on rank 0; a process that goes on appends to it.

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
        self._write(run, START, "init_start", at=self._built)
        for key, value in (self._submission | _facts(run)).items():
            self._write(run, POINT, key, value)

    def on_phase_begin(self, run: RunView, phase: PhaseView) -> None:
        if not self._is_running:
            self._is_running = True
            self._write(run, END, "init_stop")
            self._write(run, START, "run_start")

    def on_step_end(self, run: RunView, step: Step) -> None:
        self._step_end = _now()
        if not self._in_epoch:
            self._in_epoch = True
            start = self._step_end - round(1000 * step.seconds)
            self._write(run, START, "epoch_start", at=start, epoch_num=run.position.run_epoch + 1)

    def on_test_end(self, run: RunView, tested: Tested) -> None:
        epoch, config = run.position.run_epoch + 1, run.config
        self._end_epoch(run, epoch)
        name = next(iter(run.task.metrics)) if config.target is None else config.target.metric
        value = tested.values[name]
        self._write(run, START, "eval_start", at=self._step_end, epoch_num=epoch)
        self._write(run, POINT, "eval_accuracy", value if math.isfinite(value) else None, epoch_num=epoch)
        self._write(run, END, "eval_stop", epoch_num=epoch)

    def on_epoch_end(self, run: RunView, result: EpochResult) -> None:
        self._end_epoch(run, result.epoch + 1)

    def on_run_end(self, run: RunView) -> None:
        """Write the end; a run that has a target and did not reach it was aborted, as MLPerf has it."""
        has_failed = run.config.target is not None and not run.summary.reached
        self._write(run, END, "run_stop", status="aborted" if has_failed else "success")

    def on_error(self, run: RunView, error: BaseException) -> None:
        if self._is_running:
            self._write(run, END, "run_stop", status="aborted")

    def _end_epoch(self, run: RunView, epoch: int) -> None:
        if self._in_epoch:
            self._in_epoch = False
            self._write(run, END, "epoch_stop", at=self._step_end, epoch_num=epoch)

    def _write(
        self, run: RunView, event: str, key: str, value: Any = None, at: int | None = None, **metadata: Any
    ) -> None:
        """Append a line, on rank 0; ``at``: ms since 1970, now by default."""
        if run.folder is None:
            return
        path = run.folder.path / MLLOG
        time_ms = _now() if at is None else at
        fields = {"namespace": "", "time_ms": time_ms, "event_type": event, "key": key, "value": value}
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
