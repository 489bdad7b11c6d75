"""Show the newest records of benchmarks/results/: tables in benchmarks/README.md, and pictures beside it.

Some stand on a page of docs/, too. It needs no more than the records:
python scripts/draw_benchmarks.py
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.drawing import cache, cluster, gpu, pto, race, reducers, selection, spread, transcription
from scripts.drawing.cluster import CLUSTER, all_cells
from scripts.drawing.pages import Page
from scripts.drawing.results import Results, newest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"

HEAD = """# Benchmarks

What `cloudtrain bench` has measured last. `scripts/bench.sh` measures all of it again and keeps the records
in [results](results), a JSON object a line; `python scripts/draw_benchmarks.py` makes this page of them. "×"
says how many times as fast as the peer named; subject and peer take turns in one run. Seconds are medians.
Processes run as those of a training do, with the C library's own allocator settings; each record has what its
environment sets (`settings`). Those of 2026-11-21 have no such entry: their processes kept all freed memory,
and their reducers still allocated long arrays in each step. Where a kind was measured on other days or
machines, too, the range is shown.
"""

# By the kind of results, in the order of the page: each has a ``TEXT`` and makes ``tables``.
SECTIONS = {
    "selection": selection,
    "gpu-selection": gpu,
    "reducers": reducers,
    "oktopk-numpy": transcription,
    "cache": cache,
    "pto": pto,
}
PICTURES = {"cache": cache.draw, "gpu-selection": gpu.draw, "pto": pto.draw}
PAGES = (
    Page("docs/pto.md", "pto", pto.tables, "scripts/bench.sh"),
    Page("docs/gpu.md", "gpu-selection", gpu.tables, "scripts/gpu.sh"),
)


def page(found: dict[str, Results]) -> str:
    """Return the text of benchmarks/README.md."""
    parts = [HEAD]
    for kind, section in SECTIONS.items():
        if kind in found:
            parts += [section.TEXT, found[kind].source, *section.tables(found[kind])]
            parts += spread.tables(found[kind]) if section is selection else ()
    for kind, results in found.items():
        if kind.startswith(CLUSTER):
            title = kind.replace(CLUSTER, "Reducers on an emulated cluster", 1).replace("-", ": ", 1)
            parts += [cluster.TEXT.format(title=title), results.source, *cluster.tables(results)]
            parts += spread.tables(results)
    for kind, results in found.items():
        if kind.startswith(race.RACE):
            title = kind.replace(race.RACE, "Training, raced", 1).replace("-", ": ", 1)
            parts += [race.TEXT.format(title=title), results.source, *race.tables(results)]
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
    for each in PAGES:
        file = FOLDER.parent / each.path
        file.write_text(each.with_measured(file.read_text(), newest(FOLDER / "results")))
