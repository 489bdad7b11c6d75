"""The last record of a kind in ``metrics.jsonl``, which may be long, and end with half a line."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 1 << 16


def last_record(metrics: Path, kind: str) -> Mapping[str, Any] | None:
    """Return the last record of a kind, ``None`` where there is none."""
    mark = f'"kind": "{kind}"'.encode()
    try:
        for line in _backwards(metrics):
            if mark in line and (record := _record(line)) is not None and record.get("kind") == kind:
                return record
    except OSError:
        return None
    return None


def last_checkpoint(metrics: Path) -> int | None:
    """Return the step of the checkpoint that was last recorded as complete."""
    record = last_record(metrics, "checkpoint")
    steps = None if record is None else record.get("steps")
    return steps if isinstance(steps, int) else None


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # half a line
        return None
    return record if isinstance(record, dict) else None


def _backwards(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first."""
    with path.open("rb") as file:
        left, rest = file.seek(0, os.SEEK_END), b""
        while left > 0:
            size = min(_BLOCK_BYTES, left)
            left -= size
            file.seek(left)
            first, *lines = (file.read(size) + rest).split(b"\n")
            yield from reversed(lines)
            rest = first
        yield rest
