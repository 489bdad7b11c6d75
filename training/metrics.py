"""What a run leaves behind: a folder with its configuration, its metrics, its checkpoints and its weights."""

import json
import os
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from training.config import Config
from training.summary import Summary

METRICS, SUMMARY, CHECKPOINTS = "metrics.jsonl", "summary.json", "checkpoints"


class RunFolder:
    """The folder of one run, written by rank 0.

    ``config.yaml``: the resolved configuration. ``metrics.jsonl``: one JSON object a line, of the kinds
    ``gpus``, ``choice``, ``norms``, ``prepare``, ``resume``, ``step``, ``epoch``, ``switch``, ``stall``,
    ``checkpoint``, ``cache`` (:mod:`training.events`) and ``summary``, each with ``seconds`` since the start
    of the process. What is not finite is ``null`` there. ``summary.json`` is there when the run has ended.
    """

    def __init__(self, config: Config, path: Path | None = None) -> None:
        """Make a new folder, or with ``path`` go on in that one."""
        try:
            self.path = _new_folder(Path(config.output), config.name) if path is None else path
            # line buffered: a run that is killed leaves whole lines
            self._metrics = (self.path / METRICS).open("a", buffering=1)
            self._start = time.perf_counter()
        except OSError as error:
            raise ValueError(
                f"output: {config.output}: expected a folder that can be written: {error}"
            ) from error

    def keep(self, config: Config) -> None:
        """Write ``config.yaml``."""
        self.write_file("config.yaml", config.to_yaml())

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

    def write_file(self, name: str, content: str) -> None:
        """Write a file wholly or not at all."""
        unfinished = self.path / f"unfinished.{name}"
        unfinished.write_text(content)
        os.replace(unfinished, self.path / name)

    def end(self, summary: Summary) -> None:
        """Note what the run came to: it is not gone on with any more."""
        content = {"accuracy": summary.accuracy, **asdict(summary)}
        self.write("summary", **content)
        self.write_file(SUMMARY, json.dumps(content, indent=2) + "\n")

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()


def to_resume(config: Config) -> Path | None:
    """Return the folder of the run to go on with, if ``resume`` asks for one.

    Raises ``ValueError`` where it names a folder that is none of a run.
    """
    if config.resume == "never":
        return None
    if config.resume == "auto":
        return unfinished_run(config)
    path = Path(config.resume).expanduser()
    if not (path / METRICS).exists():
        raise ValueError(f"resume: expected auto, never or the folder of a run, got {config.resume}")
    return path


def unfinished_run(config: Config) -> Path | None:
    """Return the newest run of this name that has checkpoints and did not end."""
    runs = [
        path
        for path in Path(config.output).glob(f"{config.name}-*")
        if (path / CHECKPOINTS).is_dir() and not (path / SUMMARY).exists() and _is_of(path, config.name)
    ]
    return max(runs, key=lambda path: (path / METRICS).stat().st_mtime, default=None)


def _is_of(path: Path, name: str) -> bool:
    """Tell a run of ``a`` from one of ``a-b``: the rest of the name is its time."""
    stamp = path.name.removeprefix(f"{name}-")
    return stamp[:15].replace("-", "").isdigit() and (path / METRICS).exists()


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
