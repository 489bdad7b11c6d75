"""Tables and numbers that commands print."""

import os
import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 180  # wider than any table: a terminal may wrap lines, numbers are not truncated


def print_table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str]
) -> None:
    """Print a table, its title above and the notes below it; plain where standard output is no terminal."""
    # Open MPI gives its ranks a pseudo-terminal.
    is_terminal = sys.stdout.isatty() and "OMPI_COMM_WORLD_SIZE" not in os.environ
    console = Console(file=sys.stdout, force_terminal=is_terminal, width=WIDTH, highlight=False)
    table = Table(box=box.SIMPLE_HEAD if is_terminal else None, pad_edge=False, padding=(0, 1, 0, 0))
    for column, name in enumerate(header):
        table.add_column(name, justify="right" if column else "left", vertical="bottom", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(title, markup=False)
    console.print(table)
    for note in notes:
        console.print(note, markup=False)
    console.print()


def milliseconds(seconds: float) -> str:
    """Return seconds in ms, without the unit.

    >>> milliseconds(0.0123456), milliseconds(1.5)
    ('12.346', '1,500.0')
    """
    return f"{seconds * 1e3:,.{1 if seconds >= 0.1 else 3}f}"


def times(ratio: float | None) -> str:
    """Return how many times as fast, or a dash where there is nothing to compare with.

    >>> times(12.345), times(0.0123), times(None)
    ('12.3', '0.0123', '–')
    """
    return "–" if ratio is None else f"{ratio:,.3g}" if ratio < 100 else f"{ratio:,.0f}"
