"""Show the newest records of benchmarks/results/: in benchmarks/README.md and docs/, with pictures.

It needs the records only: python -m benchmarks.draw_benchmarks
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.drawing import linear
from benchmarks.drawing.measured import draw_cache, draw_cluster, draw_runs, draw_steps
from benchmarks.drawing.pages import Page, Results, fingerprint, newest, with_block
from benchmarks.linear import of_ranks
from benchmarks.pto import tables as pto_tables
from benchmarks.race import A_STEP, TO_ACCURACY, runs_table, steps_table
from benchmarks.reducers import table_of
from training.bench.cache import table as cache_table
from training.bench.record import Record
from training.bench.selection import case_table
from training.commands.printing import Table

FOLDER = Path(__file__).resolve().parent
ROWS = 10


@dataclass(frozen=True)
class Section:
    """A block of the page: some records of a kind, their table, and the picture of them, beside the page."""

    name: str
    kind: str
    table: Callable[[Sequence[Record]], Table]
    shows: Callable[[Record], bool] = lambda record: True
    picture: str = ""
    draw: Callable[[Sequence[Record], Path], None] | None = None
    fastest_first: bool = False

    def records(self, results: Results) -> list[Record]:
        """Return the records that it shows."""
        return [record for record in results.records if self.shows(record)]

    def markdown(self, results: Results) -> str:
        """Return the source of the records and the first rows of their table."""
        records = self.records(results)
        if self.fastest_first:
            records.sort(key=lambda record: record.seconds.median)
        table = self.table(records)
        return f"{results.source}\n{replace(table, rows=table.rows[:ROWS]).markdown()}"


def gpu_tables(results: Results) -> Iterator[str]:
    """Yield a table of each length and type of entries."""
    for _, own in groupby(results.records, key=lambda record: (record.case["size"], record.case["entry"])):
        yield case_table(list(own)).markdown()


def has(**case: Any) -> Callable[[Record], bool]:
    """Return what picks records by keys of their case, and leaves out probes of MPI's algorithms."""
    return lambda record: record.bench != "probe" and case.items() <= record.case.items()


SECTIONS = (
    Section(
        "race", "race", steps_table, has(unit=A_STEP), "race-mlp-4x1.svg", draw_steps, fastest_first=True
    ),
    Section(
        "accuracy", "race", runs_table, has(unit=TO_ACCURACY), "race-mlp-4x1-0.2gbit-accuracy.svg", draw_runs
    ),
    Section(
        "cluster",
        "cluster",
        lambda records: table_of([each for each in records if each.case["density"] in (None, 0.01)]),
        has(rate="1gbit", size=14_728_266),
        "cluster-1gbit-14728266.svg",
        draw_cluster,
        fastest_first=True,
    ),
    Section(
        "cluster-1m",
        "cluster-1m",
        table_of,
        has(),
        "cluster-1m-1gbit-1000000.svg",
        draw_cluster,
        fastest_first=True,
    ),
    Section("reducers", "reducers", table_of),
    Section("selection", "selection", case_table, has(size=25_000_000, density=0.001, input="gaussian")),
    Section("gpu-selection", "gpu-selection", case_table, has(size=1 << 27, entry="float32")),
    Section("cache", "cache", cache_table, picture="cache.svg", draw=draw_cache),
    Section("pto", "pto", lambda records: next(pto_tables(records))),
    Section("linear", "linear", of_ranks, linear.is_first_case),
)
PAGES = (
    Page(
        "docs/pto.md",
        "pto",
        lambda results: (table.markdown() for table in pto_tables(results.records)),
        "scripts/bench.sh",
    ),
    Page("docs/linear.md", linear.KIND, linear.tables, "scripts/bench.sh"),
    Page("docs/gpu.md", "gpu-selection", gpu_tables, "scripts/gpu.sh"),
)


def page(text: str, found: dict[str, Results]) -> str:
    """Return the text of benchmarks/README.md with the newest records in its blocks."""
    for section in SECTIONS:
        block = section.markdown(found[section.kind]) if section.kind in found else "Not measured yet.\n"
        text = with_block(text, section.name, f"\n{block}\n")
    kinds = {section.kind for section in SECTIONS}
    others = "".join(f"- {results.link}\n" for kind, results in found.items() if kind not in kinds)
    return with_block(text, "others", f"\n{others}\n")


def fingerprints(found: dict[str, Results]) -> dict[str, str]:
    """Return for each picture the digest of its records, which the picture has among its metadata."""
    drawn = [each for each in SECTIONS if each.kind in found and each.draw is not None]
    return {each.picture: fingerprint(each.records(found[each.kind])) for each in drawn}


def write() -> None:
    """Write the pages and the pictures of the newest records."""
    found, readme = newest(FOLDER / "results"), FOLDER / "README.md"
    readme.write_text(page(readme.read_text(), found))
    for section in SECTIONS:
        if section.kind in found and section.draw is not None:
            section.draw(section.records(found[section.kind]), FOLDER / section.picture)
    if linear.KIND in found:
        linear.draw(found[linear.KIND], FOLDER.parent / linear.PICTURE)
    for each in PAGES:
        file = FOLDER.parent / each.path
        file.write_text(each.with_measured(file.read_text(), found))


if __name__ == "__main__":
    write()
