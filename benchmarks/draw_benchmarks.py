"""Show the newest records of benchmarks/results/: in benchmarks/README.md and docs/, with pictures.

It needs the records only: python -m benchmarks.draw_benchmarks
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from benchmarks.drawing import linear
from benchmarks.drawing.measured import (
    draw_cache,
    draw_cluster,
    draw_runs,
    draw_steps,
    norms_page,
)
from benchmarks.drawing.pages import Page, Results, fingerprint, newest, with_block
from benchmarks.linear import of_ranks
from benchmarks.pto import tables as pto_tables
from benchmarks.race import A_STEP, runs_table, steps_table
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


def is_cell(record: Record) -> bool:
    """Return whether it is of VGG-16's size at 1 Gbit/s, and not a probe of MPI's algorithms."""
    case = record.case
    return record.bench != "probe" and (case["rate"], case["size"]) == ("1gbit", 14_728_266)


def is_step(record: Record) -> bool:
    """Return whether a record of the race is of steps, not of runs."""
    return bool(record.case["unit"] == A_STEP)


def is_run(record: Record) -> bool:
    """Return whether a record of the race is of runs to an accuracy."""
    return not is_step(record)


def table_of_rows(records: Sequence[Record]) -> Table:
    """Return the table of a cell's first density."""
    return table_of([record for record in records if record.case["density"] in (None, 0.01)])


def is_measured(record: Record) -> bool:
    """Return whether it is more than a probe of MPI's algorithms."""
    return record.bench != "probe"


def is_long_selection(record: Record) -> bool:
    """Return whether it is of the selection that the page shows."""
    case = record.case
    return (case["size"], case["density"], case["input"]) == (25_000_000, 0.001, "gaussian")


def is_gpu_selection(record: Record) -> bool:
    """Return whether it is of the selection on a GPU that the page shows."""
    return (record.case["size"], record.case["entry"]) == (1 << 27, "float32")


def first_pto_table(records: Sequence[Record]) -> Table:
    """Return the table of norms on the fewest ranks."""
    return next(iter(pto_tables(records)))


def gpu_tables(results: Results, folder: str) -> Iterator[str]:
    """Yield a table of each length and type of entries."""
    for _, own in groupby(results.records, key=lambda record: (record.case["size"], record.case["entry"])):
        yield case_table(list(own)).markdown()


SECTIONS = (
    Section("race", "race", steps_table, is_step, "race-mlp-4x1.svg", draw_steps, fastest_first=True),
    Section("accuracy", "race", runs_table, is_run, "race-mlp-4x1-0.2gbit-accuracy.svg", draw_runs),
    Section(
        "cluster",
        "cluster",
        table_of_rows,
        is_cell,
        "cluster-1gbit-14728266.svg",
        draw_cluster,
        fastest_first=True,
    ),
    Section(
        "cluster-1m",
        "cluster-1m",
        table_of,
        is_measured,
        "cluster-1m-1gbit-1000000.svg",
        draw_cluster,
        fastest_first=True,
    ),
    Section("reducers", "reducers", table_of),
    Section("selection", "selection", case_table, is_long_selection),
    Section("gpu-selection", "gpu-selection", case_table, is_gpu_selection),
    Section("cache", "cache", cache_table, picture="cache.svg", draw=draw_cache),
    Section("pto", "pto", first_pto_table),
    Section("linear", "linear", of_ranks, linear.is_first_case),
)
PAGES = (
    Page("docs/pto.md", "pto", norms_page, "scripts/bench.sh"),
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


def write(folder: Path) -> None:
    """Write page and pictures of the newest results."""
    found, readme = newest(folder / "results"), folder / "README.md"
    readme.write_text(page(readme.read_text(), found))
    for section in SECTIONS:
        if section.kind in found and section.draw is not None:
            section.draw(section.records(found[section.kind]), folder / section.picture)


def fingerprints(found: dict[str, Results]) -> dict[str, str]:
    """Return for each picture the digest of its records, which the picture has among its metadata."""
    drawn = [each for each in SECTIONS if each.kind in found and each.draw is not None]
    return {each.picture: fingerprint(each.records(found[each.kind])) for each in drawn}


if __name__ == "__main__":
    write(FOLDER)
    measured = newest(FOLDER / "results")
    if linear.KIND in measured:
        linear.draw(measured[linear.KIND], FOLDER.parent / linear.PICTURE)
    for each in PAGES:
        file = FOLDER.parent / each.path
        file.write_text(each.with_measured(file.read_text(), measured))
