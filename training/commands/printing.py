"""Tables and numbers that commands print."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import rich.table
from rich.box import SIMPLE_HEAD
from rich.console import Console

from training.process.progress import has_launcher

NOTHING = "–"  # of what is not known
WIDTH = 180  # wider than any table: a terminal may wrap lines, numbers are not truncated


@dataclass(frozen=True)
class Table:
    """A table under a title, and notes below it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def print(self) -> None:
        """Print it, without colours and rules where standard output is no terminal."""
        is_terminal = sys.stdout.isatty() and not has_launcher()
        console = Console(  # a name may look like markup
            force_terminal=is_terminal, width=WIDTH, highlight=False, emoji=False, markup=False
        )
        box = SIMPLE_HEAD if is_terminal else None
        table = rich.table.Table(box=box, pad_edge=False, padding=(0, 1, 0, 0))
        for column, name in enumerate(self.header):
            table.add_column(name, justify="right" if column else "left", vertical="bottom", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        for each in (self.title, table, *self.notes, ""):
            console.print(each)


def milliseconds(seconds: float | None) -> str:
    """Return seconds in ms, without the unit.

    >>> milliseconds(0.0123456), milliseconds(1.5), milliseconds(None)
    ('12.346', '1,500.0', '–')
    """
    return NOTHING if seconds is None else f"{seconds * 1e3:,.{1 if seconds >= 0.1 else 3}f}"


def times(ratio: float | None) -> str:
    """Return how many times as fast, or a dash where there is nothing to compare with.

    >>> times(12.345), times(0.0123), times(None)
    ('12.3', '0.0123', '–')
    """
    return NOTHING if ratio is None else f"{ratio:,.3g}" if ratio < 100 else f"{ratio:,.0f}"
