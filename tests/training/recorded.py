"""Folders of runs for the tests of reports: what is recorded, without training."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

# A real run on two ranks, of which the names of folders and hosts were shortened:
# cloudtrain launch -np 2 digits name=small ranks_per_node=1 reducer=hitopk phases.1.reducer=auto
#   phases.0.epochs=4 phases.1.epochs=3 phases.0.density_warmup="{start: 0.25, epochs: 2}" log_every=8
#   cache.memory=auto checkpoints="{every_epochs: 1}" target="{metric: top1, at_least: 0.98}"
RECORDED = Path(__file__).parent / "recorded"


def folder(path: Path, records: Iterable[Mapping[str, Any]], **config: Any) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    return path


def begun(seconds: float = 0.0, **more: Any) -> list[dict[str, Any]]:
    """Return the first records of a process, which trains from ``seconds`` on."""
    return [
        {"kind": "run", "seconds": 0.0, "started": "2026-11-22T20:54:44Z", "versions": {}, **more},
        {"kind": "prepare", "seconds": seconds, "compile_seconds": seconds},
    ]


def step(epoch: int, number: int, seconds: float = 0.0, **more: Any) -> dict[str, Any]:
    """Return the record of a step; ``number``: in its phase, the first by default."""
    values = {"loss": 1.0, "learning_rate": 0.1, "finite": True, "phase": 0, "run_steps": number, **more}
    return {"kind": "step", "seconds": seconds, "epoch": epoch, "step": number, **values}


def epoch(number: int, *, steps: int = 4, seconds: float = 0.0, **more: Any) -> dict[str, Any]:
    """Return the record of an epoch that ended after ``seconds`` of the run, all of which have ``steps``."""
    metrics = more.pop("metrics", {"top1": 0.5})
    values = {"reducer": "hitopk", "input": "6 px", "steps": steps, "loss": 1.0, "run_seconds": seconds}
    values |= {"phase": 0, "run_steps": (number + 1) * steps if isinstance(number, int) else number}
    return {"kind": "epoch", "seconds": seconds, **metrics, "epoch": number, **values, **more}


def checkpoint(
    steps: int, seconds: float, *, copied: float = 0.0, written: float = 0.0, waited: float = 0.0
) -> dict[str, Any]:
    values = {"copy_seconds": copied, "write_seconds": written, "wait_seconds": waited}
    return {"kind": "checkpoint", "seconds": seconds, "steps": steps, **values}


def resumed(steps: int, run_epoch: int, phase_steps: int) -> dict[str, Any]:
    at = {"steps": steps, "run_epoch": run_epoch, "phase_steps": phase_steps}
    return {"kind": "resume", "seconds": 0.0, "checkpoint": f"step-{steps:08}", "changes": [], **at}
