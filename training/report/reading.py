"""What a run has left in its folder, read as far as it goes: lines may be damaged, files missing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datacache.escaping import escaped
from training.config.reading import parsed_file
from training.config.run_files import CONFIG, DAWNBENCH, METRICS, SUMMARY, object_of
from training.config.schema import ConfigurationError
from training.config.secrets import mask

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Folder:
    """The contents of a run's folder. ``damaged``: lines of ``metrics.jsonl`` that are no records.

    ``config`` and ``summary`` are empty where they are missing or damaged. ``is_alive``: whether it is
    trained now.
    """

    path: Path
    records: list[Record]
    damaged: int = 0
    config: Record = field(default_factory=dict)
    summary: Record = field(default_factory=dict)
    hardware: str = ""
    is_alive: bool = False


def read(path: Path, *, is_alive: bool = False) -> Folder:
    """Read the folder of a run, secrets masked; raise ``ValueError`` with one line where it is none."""
    try:
        with (path / METRICS).open("rb") as file:
            lines = [_record(line) for line in file if line.strip()]
    except OSError as error:
        expected = f"expected the folder of a run, which has a file {METRICS}"
        raise ValueError(f"{escaped(str(path))}: {expected}: {error.strerror}") from error
    records = [each for each in lines if each is not None]
    if not records:
        raise ValueError(f"{escaped(str(path / METRICS))}: expected the records of a run, found none")
    last = next((each for each in reversed(records) if each["kind"] == "summary"), {})
    return Folder(
        path=path,
        records=records,
        damaged=len(lines) - len(records),
        config=_config(path / CONFIG),
        summary=_json(path / SUMMARY) or last,
        hardware=text(_json(path / DAWNBENCH).get("hardware")),
        is_alive=is_alive,
    )


def _record(line: bytes) -> Record | None:
    value = object_of(line)
    if not isinstance(kind := value.get("kind"), str):
        return None
    return value if kind == "step" else _masked(value)  # a step has no text


def _masked(value: Record) -> Record | None:
    """Return a record with its secrets masked; ``None`` for what is nested so deep that it cannot be."""
    try:
        masked: Record = mask(value)
    except RecursionError:
        return None
    return masked


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(_masked(object_of(path.read_bytes())) or {})
    except OSError:
        return {}


def _config(path: Path) -> dict[str, Any]:
    try:
        return dict(mapping(mask(parsed_file(path))))
    except (ConfigurationError, RecursionError):
        return {}


def number(record: Record, *keys: str) -> float | None:
    """Return the finite number at a path of keys, ``None`` where there is none.

    >>> number({"traffic": {"sent": 3}}, "traffic", "sent"), number({"loss": "x"}, "loss")
    (3.0, None)
    """
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def whole(record: Record, key: str) -> int | None:
    """Return the whole number from 0 on at a key, ``None`` where there is none."""
    value = record.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def text(value: Any) -> str:
    """Return a text, a number as text, and an empty text for anything else."""
    is_shown = isinstance(value, str | int | float) and not isinstance(value, bool)
    return escaped(str(value)) if is_shown else ""


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a record, an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """Return the records of a list."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def named(value: Any) -> str:
    """Return the name of a part, which a configuration gives as a text or as a record.

    >>> named("dense"), named({"name": "hitopk", "density": 0.01}), named(None)
    ('dense', 'hitopk', '')
    """
    return text(mapping(value).get("name")) or text(value)
