"""Pages in Markdown, in which tables stand between two marks."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.jobs import record_of
from training.bench.record import Record, code_of
from training.commands.printing import Table

NAMED = re.compile(r"\d{4}-\d{2}-\d{2}-(.+)\.jsonl")
CHANGED = " The code that was measured has changed since."


@dataclass(frozen=True)
class Results:
    """The records of one file; ``kind``: its name without the day."""

    kind: str
    path: Path
    records: Sequence[Record]

    @classmethod
    def of(cls, path: Path) -> "Results":
        named = NAMED.fullmatch(path.name)
        if named is None:
            raise ValueError(f"{path}: expected a name as 2026-11-21-reducers.jsonl")
        records = [record_of(json.loads(line)) for line in path.read_text().splitlines()]
        return cls(named[1], path, records)

    @property
    def source(self) -> str:
        """Return where the records are from, as Markdown."""
        given = dict.fromkeys(record.more["command"] for record in self.records)
        commands = [re.sub(r"^(\w+)\.py", r"python -m benchmarks.\1", each) for each in given]
        machine = self.records[0].more["machine"]
        where = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB"
        return f"`{'`, `'.join(commands)}` on {where} ({self.link}).{CHANGED * (not self.is_current)}\n"

    @property
    def is_current(self) -> bool:
        """Return whether the code that the records measure is still the same."""
        return all(record.more.get("code") == code_of(record.bench) for record in self.records)

    @property
    def link(self) -> str:
        return f"[{self.path.name}](results/{self.path.name})"


def fingerprint(records: Iterable[Record]) -> str:
    lines = [repr((each.subject, each.case, each.seconds, each.bytes, each.more)) for each in records]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def newest(folder: Path) -> dict[str, Results]:
    """Return the newest file of each kind that is not empty."""
    found = [Results.of(path) for path in sorted(folder.glob("*.jsonl")) if path.stat().st_size]
    return {results.kind: results for results in found}


def with_block(page: str, name: str, text: str) -> str:
    """Return a page with ``text`` between its only mark ``<!-- NAME -->`` and the next ``<!-- end -->``."""
    begin, end = f"<!-- {name} -->\n", "<!-- end -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found or begin in rest:
        raise ValueError(f"expected one line {begin!r}, and {end!r} after it")
    return f"{before}{begin}{text}{end}{after}"


def rewrite(path: Path, blocks: Mapping[str, str]) -> None:
    """Write a page again with these texts between its marks."""
    page = path.read_text()
    for name, text in blocks.items():
        page = with_block(page, name, text)
    path.write_text(page)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, numbers to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = [f"| {' | '.join(header)} |", f"|{'|'.join(rule)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def rate_in_words(rate: str) -> str:
    """Return the rate of a link, which is written as for tc (``0.2gbit``): 0.2 Gbit/s."""
    return rate.replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")


def layout_in_words(layout: str) -> str:
    return layout.replace("x", " × ")


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def with_notes(table: Table) -> str:
    """Return a table under its title, the names in the first column as code, its notes below."""
    header = [" ".join(name.split()) for name in table.header]
    rows = markdown(header, ([f"`{row[0]}`", *row[1:]] for row in table.rows))
    return "\n".join([f"{table.title}\n", rows, *(f"- {note}" for note in table.notes), ""])
