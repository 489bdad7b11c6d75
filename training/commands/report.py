"""``cloudtrain report``: a page about runs, and its charts as pictures beside it."""

from collections.abc import Sequence
from pathlib import Path

from datacache.escaping import escaped
from datacache.store.files import write_atomic
from training.process.job import usage_error
from training.report.page import MOST_RUNS, Page
from training.report.run import named, read

DEFAULT = "report.html"


def report(given: Sequence[Path], output: Path | None) -> None:
    """Write a report on runs; exit with status 2 and one line where a folder is none of a run."""
    if len(given) > MOST_RUNS:
        usage_error(f"report: expected at most {MOST_RUNS} runs, got {len(given)}")
    try:
        runs = [read(path, name) for path, name in zip(given, names(given), strict=True)]
    except (ValueError, RuntimeError) as error:  # a link to itself, of which there is no name
        usage_error(f"report: {error}")
    for run in runs:
        if named(run.config.get("task")) == "linear":
            usage_error(f"report: {run.path}: expected a run that trains a network, got one of task linear")
    path = (given[0] / DEFAULT if len(given) == 1 else Path(DEFAULT)) if output is None else output
    if path.suffix != ".html":
        usage_error(f"report: --output: expected a file that ends in .html, got {path}")
    page = Page(runs)
    files = {path: page.text.encode()}
    files |= {path.with_name(f"{path.stem}-{name}.png"): content for name, content in page.pictures.items()}
    try:
        for each, content in files.items():
            write_atomic(each, content, is_private=False)
    except OSError as error:
        usage_error(f"report: {path}: expected a file that can be written: {error.strerror}")
    pictures = f", and its {len(page.pictures)} charts as {path.stem}-*.png" if page.pictures else ""
    print(escaped(f"report: {path}{pictures}"))


def names(given: Sequence[Path]) -> list[str]:
    """Return the names of runs: of their folders, with as much of the path as tells them apart.

    >>> names([Path("a/x"), Path("b/x")]), names([Path("a/x"), Path("a/y")])
    (['a/x', 'b/x'], ['x', 'y'])
    """
    paths = [path.resolve() for path in given]
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        found = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(found)) == len(set(paths)):
            break
    return [escaped(each) for each in found]
