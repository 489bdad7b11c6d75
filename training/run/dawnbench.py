"""A run as DAWNBench takes it: ``dawnbench.tsv``, a line an epoch, and ``dawnbench.json`` about the rest.

https://github.com/stanford-futuredata/dawn-bench-entries says what the files hold.
"""

import json
from collections import Counter
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from commlib import __version__
from commlib.tuning.profile import processor
from training.config.config import Config
from training.config.secrets import mask
from training.run.metrics import RunFolder
from training.run.summary import EpochResult

LINES, ABOUT = "dawnbench.tsv", "dawnbench.json"
HEADER = ("epoch", "hours", "top1Accuracy", "top5Accuracy")


class DawnBench:
    """Writes both files into a run's folder. A resumed run goes on with the lines of the epochs before."""

    def __init__(self, folder: RunFolder, config: Config, hardware: str) -> None:
        """Write ``dawnbench.json``, and the header of ``dawnbench.tsv``; ``OSError`` on a full disk."""
        self._folder = folder
        folder.write_file(ABOUT, json.dumps(mask(_about(config, hardware)), indent=2) + "\n")
        path = folder.path / LINES
        rows = path.read_text().splitlines()[1:] if path.exists() else []
        self._lines = [row.split("\t") for row in rows]
        self._write()

    def add(self, result: EpochResult) -> None:
        """Append an epoch that was tested; accuracies in percent, hours since the run began.

        Of an epoch that is trained again after a crash, what was written before is dropped. On a full disk
        the lines wait for the next epoch.
        """
        if result.accuracy is None or result.accuracy_of_five is None:
            return
        values = (result.run_seconds / 3600, 100 * result.accuracy, 100 * result.accuracy_of_five)
        kept = [line for line in self._lines if int(line[0]) < result.epoch + 1]
        self._lines = [*kept, [str(result.epoch + 1), *(f"{value:.8g}" for value in values)]]
        self._folder.attempt(LINES, self._write)

    def _write(self) -> None:
        content = "".join("\t".join(line) + "\n" for line in (HEADER, *self._lines))
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
    """Return what this rank computes on."""
    return processor()


def summed_up(of_ranks: list[str]) -> str:
    """Return what all ranks compute on.

    >>> summed_up(["a", "a", "b"])
    '2 ranks on a, 1 rank on b'
    """
    counts = Counter(of_ranks)
    return ", ".join(f"{count} rank{'s' * (count > 1)} on {each}" for each, count in counts.items())
