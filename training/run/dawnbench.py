"""A run in DAWNBench's format: ``dawnbench.tsv``, a line per epoch, and ``dawnbench.json`` with the rest.

The format is described in https://github.com/stanford-futuredata/dawn-bench-entries.
"""

import json
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from commlib import __version__
from commlib.tuning.profile import processor
from training.config.config import Config
from training.config.secrets import mask
from training.run.metrics import RunFolder
from training.run.summary import EpochResult
from training.tasks.task import Metric

LINES, ABOUT = "dawnbench.tsv", "dawnbench.json"


class DawnBench:
    """Writes both files into a run's folder. A resumed run continues with the lines of the epochs before."""

    def __init__(
        self, folder: RunFolder, config: Config, metrics: Mapping[str, Metric], hardware: str
    ) -> None:
        """Write ``dawnbench.json``, and the header of ``dawnbench.tsv``; ``OSError`` on a full disk.

        ``metrics``: of the task.
        """
        self._folder, self._metrics = folder, metrics
        folder.write_file(ABOUT, json.dumps(mask(_about(config, hardware)), indent=2) + "\n")
        path = folder.path / LINES
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
        self._folder.attempt(LINES, self._write)

    def _write(self) -> None:
        header = ["epoch", "hours", *(each.column or name for name, each in self._metrics.items())]
        content = "".join("\t".join(line) + "\n" for line in (header, *self._lines))
        self._folder.write_file(LINES, content)


def _about(config: Config, hardware: str) -> dict[str, Any]:
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
        "logFilename": "metrics.jsonl",
        "misc": {"config": config.model_dump(mode="json", exclude_none=True)},
    }


def hardware() -> str:
    """Return the hardware that this rank computes on."""
    return processor()


def summed_up(of_ranks: list[str]) -> str:
    """Return the hardware that all ranks compute on.

    >>> summed_up(["a", "a", "b"])
    '2 ranks on a, 1 rank on b'
    """
    counts = Counter(of_ranks)
    return ", ".join(f"{count} rank{'s' * (count > 1)} on {each}" for each, count in counts.items())
