"""Show the newest records of benchmarks/results/: tables in benchmarks/README.md, and pictures next to it.

Some are on a page of docs/, too. It needs the records only:
python -m benchmarks.draw_benchmarks
"""

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

from benchmarks.drawing import cache, cluster, gpu, linear, pto, race, spread
from benchmarks.drawing.cluster import CLUSTER, all_cells
from benchmarks.drawing.pages import Page
from benchmarks.drawing.results import Results, newest
from training.bench import cache as cache_bench
from training.bench.selection import case_table
from training.bench.tables import table_of

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"

HEAD = """# Benchmarks

The latest measurements of `cloudtrain bench`. `scripts/bench.sh` repeats all of them and writes the records
to [results](results), a JSON object a line; `python -m benchmarks.draw_benchmarks` makes this page of them.
"×": how many times as fast as the peer named; subject and peer alternate in one run. Seconds are medians.
Processes run as those of a training do, with the C library's own allocator settings; each record has what its
environment sets (`settings`). Those of 2026-11-21 have no such entry: their processes retained freed memory,
and their reducers still allocated long arrays in each step. Where a kind was measured on other days or
machines, too, the range is shown.
"""

SELECTION = """## Selection

Selecting on one core, against the alternatives, and against a bare read of the vector.
"""
REDUCERS = """## Reducers on simulated ranks

By the virtual clock: messages take the time that the α-β model predicts.
"""
TRANSCRIPTION = """## Ok-Topk against its transcription

Processor time of a rank; the peer is the paper's algorithm 1 in plain NumPy.
"""
CACHE = """## Batches from the cache

JPEGs of 500 × 375 pixels and about 110 KB in central storage, which is emulated; the time of a sample, in
whole batches of crops. `levels` is from the second epoch on, with two threads but for one core;
`first epoch` begins with empty folders.

![µs a sample](cache.svg)
"""


def of_cases(results: Results) -> Iterator[str]:
    """Yield the tables of selections, one for each case."""
    keys = ("size", "input", "density")
    for _, own in groupby(results.records, key=lambda record: [record.case[key] for key in keys]):
        yield case_table(list(own)).markdown()


def of_reducers(results: Results) -> Iterator[str]:
    """Yield the table of reducers on simulated ranks."""
    yield table_of(results.records).markdown()


def of_cache(results: Results) -> Iterator[str]:
    """Yield the table of the cache."""
    yield cache_bench.table(results.records).markdown()


# By the kind of results, in the order of the page: the text above the tables, and what yields these.
SECTIONS: dict[str, tuple[str, Callable[[Results], Iterator[str]]]] = {
    "selection": (SELECTION, of_cases),
    "gpu-selection": (gpu.TEXT, gpu.tables),
    "reducers": (REDUCERS, of_reducers),
    "oktopk-numpy": (TRANSCRIPTION, of_reducers),
    "cache": (CACHE, of_cache),
    "pto": (pto.TEXT, pto.tables),
}
PICTURES = {"cache": cache.draw, "gpu-selection": gpu.draw, "pto": pto.draw}
PAGES = (
    Page("docs/pto.md", "pto", pto.tables, "scripts/bench.sh"),
    Page("docs/linear.md", linear.KIND, linear.tables, "scripts/bench.sh"),
    Page("docs/gpu.md", "gpu-selection", gpu.tables, "scripts/gpu.sh"),
)


def page(found: dict[str, Results]) -> str:
    """Return the text of benchmarks/README.md."""
    parts = [HEAD]
    for kind, (text, tables) in SECTIONS.items():
        if kind in found:
            parts += [text, found[kind].source, *tables(found[kind])]
            parts += spread.tables(found[kind]) if kind == "selection" else ()
    for kind, results in found.items():
        if kind.startswith(CLUSTER):
            title = kind.replace(CLUSTER, "Reducers on an emulated cluster", 1).replace("-", ": ", 1)
            parts += [cluster.TEXT.format(title=title), results.source, *cluster.tables(results)]
            parts += spread.tables(results)
    races = [results for kind, results in found.items() if kind.startswith(race.RACE)]
    parts += [race.TEXT] if races else []
    for results in races:
        parts += [results.source, *race.tables(results)]
    return "\n".join(parts)


def write(folder: Path) -> None:
    """Write page and pictures of the newest results; pictures of none are removed."""
    found = newest(folder / "results")
    (folder / "README.md").write_text(page(found))
    drawn = {cell.picture: cell for cell in all_cells(found.values())}
    raced = {each.picture: each for each in race.all_pictures(found.values())}
    for old in [*folder.glob(f"{CLUSTER}*.svg"), *folder.glob(f"{race.RACE}*.svg")]:
        if old.name not in drawn | raced:
            old.unlink()
    for name, cell in drawn.items():
        cluster.draw(cell, folder / name)
    for name, each in raced.items():
        each.draw(folder / name)
    for kind, draw in PICTURES.items():
        if kind in found:
            draw(found[kind], folder / f"{kind}.svg")


if __name__ == "__main__":
    write(FOLDER)
    measured = newest(FOLDER / "results")
    if linear.KIND in measured:
        linear.draw(measured[linear.KIND], FOLDER.parent / linear.PICTURE)
    for each in PAGES:
        file = FOLDER.parent / each.path
        file.write_text(each.with_measured(file.read_text(), measured))
