"""A run in DAWNBench's format: ``dawnbench.tsv``, a line per epoch, and ``dawnbench.json`` with the rest.

The format is described in https://github.com/stanford-futuredata/dawn-bench-entries.
"""

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from commlib.version import __version__
from training.callbacks.callback import Callback, RunView
from training.config.run_files import DAWNBENCH, DAWNBENCH_LINES, METRICS
from training.config.secrets import mask
from training.results import EpochResult
from training.run_folder import RunFolder
from training.tasks.task import Metric


class DawnBenchFiles(Callback):
    """Writes the files of a run that has a target, on rank 0."""

    def __init__(self) -> None:
        self._files: DawnBench | None = None

    def on_run_begin(self, run: RunView) -> None:
        """Write what is known; ``ValueError`` where there is no room for it."""
        if run.folder is None:
            return
        try:
            self._files = DawnBench(run.folder, run.config, run.task.metrics, run.ranks.hardware)
        except OSError as error:
            raise ValueError(f"{run.folder.path}: expected room for its records: {error}") from error

    def on_epoch_end(self, run: RunView, result: EpochResult) -> None:
        """Write the line of the epoch."""
        if self._files is not None:
            self._files.add(result)


class DawnBench:
    """Writes both files into a run's folder. A resumed run continues with the lines of the epochs before."""

    def __init__(
        self, folder: RunFolder, config: Any, metrics: "Mapping[str, Metric]", hardware: str
    ) -> None:
        """Write ``dawnbench.json``, and the header of ``dawnbench.tsv``; ``OSError`` on a full disk.

        ``metrics``: of the task.
        """
        self._folder, self._metrics = folder, metrics
        folder.write_file(DAWNBENCH, json.dumps(mask(_about(config, hardware)), indent=2) + "\n")
        path = folder.path / DAWNBENCH_LINES
        rows = path.read_text().splitlines()[1:] if path.exists() else []
        self._lines = [row.split("\t") for row in rows]
        self._write()

    def add(self, result: EpochResult) -> None:
        """Append a tested epoch; shares in percent, hours since the run began.

        The previous line of an epoch that is trained again after a crash is dropped. On a full disk the
        lines are written with the next epoch.
        """
        if not result.metrics:
            return
        shown = ((100 if each.share else 1) * result.metrics[name] for name, each in self._metrics.items())
        values = (result.run_seconds / 3600, *shown)
        previous = [line for line in self._lines if int(line[0]) < result.epoch + 1]
        self._lines = [*previous, [str(result.epoch + 1), *(f"{value:.8g}" for value in values)]]
        self._folder.attempt(DAWNBENCH_LINES, self._write)

    def _write(self) -> None:
        header = ["epoch", "hours", *(each.column or name for name, each in self._metrics.items())]
        content = "".join("\t".join(line) + "\n" for line in (header, *self._lines))
        self._folder.write_file(DAWNBENCH_LINES, content)


def _about(config: Any, hardware: str) -> dict[str, Any]:
    about = config.dawnbench
    return {
        "version": "v1.0",
        "author": about.author,
        "authorEmail": about.author_email,
        "framework": f"TensorFlow {version('tensorflow')}, cloudtrain {__version__}",
        "codeURL": about.code_url,
        "model": config.model.name,
        "hardware": about.hardware or hardware,
        "costPerHour": about.cost_per_hour,
        "timestamp": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "logFilename": METRICS,
        "misc": {"config": config.model_dump(mode="json", exclude_none=True)},
    }
