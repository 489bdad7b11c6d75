"""Tables in Markdown, for the pages of docs/."""

from collections.abc import Iterable, Sequence

from training.commands.printing import Table


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, numbers to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = [f"| {' | '.join(header)} |", f"|{'|'.join(rule)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def rate_in_words(rate: str) -> str:
    """Return the rate of a link, which is written as for tc.

    >>> rate_in_words("0.2gbit"), rate_in_words("50mbit")
    ('0.2 Gbit/s', '50 Mbit/s')
    """
    return rate.replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")


def layout_in_words(layout: str) -> str:
    return layout.replace("x", " × ")


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def with_notes(table: Table) -> str:
    """Return a table under its title, the names in the first column as code, its notes below."""
    header = [" ".join(name.split()) for name in table.header]
    rows = markdown(header, ([f"`{row[0]}`", *row[1:]] for row in table.rows))
    return "\n".join([f"{table.title}\n", rows, *(f"- {note}" for note in table.notes), ""])
