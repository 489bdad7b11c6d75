"""Callbacks that write the files of a run's folder: configuration, metrics, summary, and DAWNBench's.

DAWNBench's format is described in https://github.com/stanford-futuredata/dawn-bench-entries.
"""

import json
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from commlib.version import __version__
from training.callbacks.callback import Callback, Event, RunView
from training.config.run_files import DAWNBENCH, DAWNBENCH_LINES, METRICS
from training.config.secrets import mask
from training.results import EpochResult
from training.run_folder import RunFolder, unwritable


class Metrics(Callback):
    """Writes ``config.yaml``, ``metrics.jsonl`` and ``summary.json``."""

    def on_run_begin(self, run: RunView) -> None:
        if run.folder is not None:
            run.folder.write_config(run.config)

    def on_event(self, run: RunView, event: Event) -> None:
        if run.folder is not None:
            run.folder.write(event.kind, **event.record())

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
