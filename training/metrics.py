"""What a run leaves behind: a folder with its configuration, its metrics and its weights."""

import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from training.config import Config


class RunFolder:
    """The folder of one run, written by rank 0.

    ``config.yaml``: the resolved configuration. ``metrics.jsonl``: one JSON object a line, of the kinds
    ``choice``, ``step``, ``epoch``, ``switch`` and ``summary``, each with ``seconds`` since the start of the
    run. What is not finite is ``null`` there.
    """

    def __init__(self, config: Config) -> None:
        try:
            self._make(config)
        except OSError as error:
            raise ValueError(
                f"output: {config.output}: expected a folder that can be written: {error}"
            ) from error

    def _make(self, config: Config) -> None:
        self.path = _new_folder(Path(config.output), config.name)
        (self.path / "config.yaml").write_text(config.to_yaml())
        # line buffered: a run that is killed leaves whole lines
        self._metrics = (self.path / "metrics.jsonl").open("w", buffering=1)
        self._start = time.perf_counter()

    def write(self, kind: str, **values: Any) -> None:
        """Append one line to ``metrics.jsonl``."""
        seconds = round(time.perf_counter() - self._start, 6)
        line = json.dumps({"kind": kind, "seconds": seconds, **values}, allow_nan=False)
        self._metrics.write(line + "\n")

    def save_weights(self, model: Any) -> None:
        """Write ``model.weights.h5``; no half-written file bears that name."""
        unfinished = self.path / "unfinished.weights.h5"
        model.save_weights(unfinished)
        os.replace(unfinished, self.path / "model.weights.h5")

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()


def _new_folder(parent: Path, name: str) -> Path:
    """Make ``parent/name-<time>``, with a number behind it where that is taken."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    parent.mkdir(parents=True, exist_ok=True)
    attempt = 0
    while True:
        path = parent / (f"{stem}-{attempt}" if attempt else stem)
        try:
            path.mkdir()
        except FileExistsError:
            attempt += 1
        else:
            return path
