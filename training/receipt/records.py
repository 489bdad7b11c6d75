"""The records of ``metrics.jsonl``, read strictly: a line that is none is an error."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commlib.errors import shown
from training.config.run_files import METRICS

Record = Mapping[str, Any]


def read_records(folder: Path) -> list[Record]:
    """Return the records of a run; ``ValueError`` names the file, and the line that is no record."""
    path = folder / METRICS
    try:
        with path.open("rb") as file:
            return [_record(path, number, line) for number, line in enumerate(file, 1)]
    except OSError as error:
        raise ValueError(f"{path}: expected the records of a run: {error.strerror}") from error


def digests_of(folder: Path, records: list[Record]) -> dict[int, str]:
    """Return the digests of the weights by step, without those of steps that a later process made again.

    Raises ``ValueError`` for a record of one that has not both.
    """
    found: dict[int, str] = {}
    went_on = 0
    for number, record in enumerate(records, 1):
        kind = record["kind"]
        if kind == "run":
            went_on = 0
        elif kind == "resume":
            went_on = whole(folder, number, record, "steps")
        elif kind == "prepare":  # training begins
            found = {step: digest for step, digest in found.items() if step <= went_on}
        elif kind == "digest":
            found[whole(folder, number, record, "steps")] = _digest(folder, number, record)
    return found


def whole(folder: Path, number: int, record: Record, key: str) -> int:
    """Return a whole number from 0 on of the record in line ``number``; ``ValueError`` names that."""
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        where = f"{folder / METRICS}, line {number}"
        raise ValueError(f"{where}: {key}: expected a whole number, got {shown(value)}")
    return value


def latest_process(records: list[Record]) -> list[Record]:
    """Return the records of the latest process."""
    first = max((number for number, each in enumerate(records) if each["kind"] == "run"), default=0)
    return records[first:]


def _digest(folder: Path, number: int, record: Record) -> str:
    if not isinstance(digest := record.get("digest"), str):
        where = f"{folder / METRICS}, line {number}"
        raise ValueError(f"{where}: digest: expected a text, got {shown(digest)}")  # noqa: TRY004 - a file
    return digest


def _record(path: Path, number: int, line: bytes) -> Record:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise ValueError(f"{path}, line {number}: expected a record, got what is damaged")  # noqa: TRY004
    return value
