"""What is in the folder of a run, for all that write or read one: names, JSON, and the last records."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

CONFIG, METRICS, SUMMARY, WEIGHTS = "config.yaml", "metrics.jsonl", "summary.json", "model.weights.h5"
RUN, RECEIPT, CHECKPOINTS = "run.json", "receipt.json", "checkpoints"
DAWNBENCH, DAWNBENCH_LINES, MLLOG = "dawnbench.json", "dawnbench.tsv", "mllog.txt"
FILES = (RUN, CONFIG, METRICS, SUMMARY, WEIGHTS, DAWNBENCH, DAWNBENCH_LINES, MLLOG)
"""The files whose digests are in the receipt of a run."""


def object_of(content: bytes) -> dict[str, Any]:
    """Return a JSON object, an empty one for anything else; numbers that are not finite are ``None``."""
    try:
        value = json.loads(content, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def object_in(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file as :func:`object_of` does, an empty one where there is no file."""
    try:
        return object_of(path.read_bytes())
    except OSError:
        return {}


def last_record(metrics: Path, kind: str) -> Mapping[str, Any] | None:
    """Return the last record of a kind in ``metrics.jsonl``, which may end with half a line, or ``None``."""
    mark = f'"kind": "{kind}"'.encode()
    with suppress(OSError):
        for line in reversed(metrics.read_bytes().split(b"\n")):
            if mark in line and (record := object_of(line)).get("kind") == kind:
                return record
    return None


def last_checkpoint(metrics: Path) -> int | None:
    """Return the step of the checkpoint that was last recorded as complete."""
    steps = (last_record(metrics, "checkpoint") or {}).get("steps")
    return steps if isinstance(steps, int) else None
