"""Pages of docs/ in which tables stand between two marks."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.jobs import record_of
from training.bench.record import Record, code_of

NAMED = re.compile(r"\d{4}-\d{2}-\d{2}-(.+)\.jsonl")


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
        commands = dict.fromkeys(record.more["command"] for record in self.records)
        machine = self.records[0].more["machine"]
        where = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB"
        since = "" if self.is_current else " The code that they measure has changed since."
        return f"`{'`, `'.join(commands)}` on {where} ({self.link}).{since}\n"

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
    r"""Return a page with ``text`` between its only mark ``<!-- NAME -->`` and the next ``<!-- end -->``.

    >>> with_block("<!-- one -->\nold\n<!-- end -->\n", "one", "new\n")
    '<!-- one -->\nnew\n<!-- end -->\n'
    """
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


@dataclass(frozen=True)
class Page:
    """A page of docs/ with tables of the records of a kind; ``measure``: the command that makes them."""

    path: str
    kind: str
    tables: Callable[[Results], Iterator[str]]
    measure: str

    def with_measured(self, text: str, found: dict[str, Results]) -> str:
        measured = f"Nothing has been measured yet: `{self.measure}` does.\n"
        if self.kind in found:
            link = found[self.kind].source.replace("](results/", "](../benchmarks/results/")
            measured = "\n".join([link, *self.tables(found[self.kind])])
        return with_block(text, "measured", f"\n{measured}\n")
