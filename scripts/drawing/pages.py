"""Pages of docs/ in which the newest records of one kind stand between two marks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scripts.drawing.results import Results

BEGIN = "<!-- measured: written by scripts/draw_benchmarks.py -->\n"
END = "<!-- end of what was measured -->\n"


@dataclass(frozen=True)
class Page:
    """A page, from the top of the project.

    ``tables(results, folder)``: its picture, which is in that folder, and its tables. ``measure``: what does.
    """

    path: str
    kind: str
    tables: Callable[[Results, str], Iterator[str]]
    measure: str

    def with_measured(self, text: str, found: dict[str, Results]) -> str:
        """Return the text of the page with the newest records between its marks."""
        if not 0 <= text.find(BEGIN) < text.find(END):
            raise ValueError(f"{self.path}: expected the lines {BEGIN!r} and {END!r}, in this order")
        before, after = text[: text.index(BEGIN)], text[text.index(END) :]
        measured = f"Nothing has been measured yet: `{self.measure}` does.\n"
        if self.kind in found:
            link = found[self.kind].source.replace("](results/", "](../benchmarks/results/")
            measured = "\n".join([link, *self.tables(found[self.kind], "../benchmarks/")])
        return f"{before}{BEGIN}\n{measured}\n{after}"
