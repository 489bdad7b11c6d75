"""Pages of docs/ in which tables stand between two marks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import floor, log10

from benchmarks.drawing.results import Results
from training.commands.printing import markdown

BEGIN = "<!-- measured: written by benchmarks/draw_benchmarks.py -->\n"
END = "<!-- end of what was measured -->\n"


def replaced(page: str, begin: str, end: str, text: str) -> str:
    """Return a page with ``text`` between the only line ``begin`` and the next ``end``."""
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found or begin in rest:
        raise ValueError(f"expected one line {begin!r}, and {end!r} after it")
    return f"{before}{begin}{text}{end}{after}"


def with_block(page: str, name: str, text: str) -> str:
    r"""Return a page with ``text`` between its marks ``<!-- NAME -->`` and ``<!-- end -->``.

    >>> with_block("<!-- one -->\nold\n<!-- end -->\n", "one", "new\n")
    '<!-- one -->\nnew\n<!-- end -->\n'
    """
    return replaced(page, f"<!-- {name} -->\n", "<!-- end -->", text)


@dataclass(frozen=True)
class Table:
    """A table of a page: the text of its cells."""

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return the table as the page shows it."""
        return markdown(self.head, self.rows)

    def records(self) -> list[dict[str, str]]:
        """Return an object a row."""
        return [{"table": self.name, **dict(zip(self.head, row, strict=True))} for row in self.rows]


def milliseconds(seconds: float) -> str:
    """Return three digits, and more before the point where there are.

    >>> milliseconds(0.0123456), milliseconds(1.5)
    ('12.3', '1500')
    """
    return f"{seconds * 1e3:.{max(0, 2 - int(floor(log10(seconds * 1e3))))}f}"


@dataclass(frozen=True)
class Page:
    """A page, from the top of the project.

    ``tables(results, folder)``: its picture, which is in that folder, and its tables. ``measure``: the
    command that measures them.
    """

    path: str
    kind: str
    tables: Callable[[Results, str], Iterator[str]]
    measure: str

    def with_measured(self, text: str, found: dict[str, Results]) -> str:
        """Return the text of the page with the newest records between its marks."""
        measured = f"Nothing has been measured yet: `{self.measure}` does.\n"
        if self.kind in found:
            link = found[self.kind].source.replace("](results/", "](../benchmarks/results/")
            measured = "\n".join([link, *self.tables(found[self.kind], "../benchmarks/")])
        try:
            return replaced(text, BEGIN, END, f"\n{measured}\n")
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
