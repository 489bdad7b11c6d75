"""The newest records of each kind of bench."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.jobs import record_of
from training.bench.record import Record

NAMED = re.compile(r"\d{4}-\d{2}-\d{2}-(.+)\.jsonl")


@dataclass(frozen=True)
class Results:
    """The records of one file; ``kind``: its name without the day."""

    kind: str
    path: Path
    records: Sequence[Record]

    @classmethod
    def of(cls, path: Path) -> "Results":
        """Read a file of JSON lines."""
        named = NAMED.fullmatch(path.name)
        if named is None:
            raise ValueError(f"{path}: expected a name as 2026-11-21-reducers.jsonl")
        records = [record_of(json.loads(line)) for line in path.read_text().splitlines()]
        return cls(named[1], path, records)

    @property
    def fingerprint(self) -> str:
        """Return a digest of the records, which their picture has among its metadata."""
        return fingerprint(self.records)

    @property
    def source(self) -> str:
        """Return where the records are from, as Markdown."""
        commands = dict.fromkeys(record.more["command"] for record in self.records)
        machine = self.records[0].more["machine"]
        where = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB"
        return f"`{'`, `'.join(commands)}` on {where} ({self.link}).\n"

    @property
    def link(self) -> str:
        """Return a link to the file, as Markdown."""
        return f"[{self.path.name}](results/{self.path.name})"


def fingerprint(records: Iterable[Record]) -> str:
    """Return a digest of records."""
    lines = [repr((each.subject, each.case, each.seconds, each.bytes, each.more)) for each in records]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def newest(folder: Path) -> dict[str, Results]:
    """Return the newest file of each kind that is not empty."""
    found = [Results.of(path) for path in sorted(folder.glob("*.jsonl")) if path.stat().st_size]
    return {results.kind: results for results in found}
