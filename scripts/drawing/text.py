"""Tables in Markdown, and the text of their cells."""

from collections.abc import Iterable, Sequence

from training.bench.tables import NOTHING


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, numbers to the right.

    >>> print(table(["name", "ms"], [["a", "1"]]), end="")
    | name | ms |
    |---|---:|
    | a | 1 |
    """
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = [f"| {' | '.join(header)} |", f"|{'|'.join(rule)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def world(nodes: Sequence[int]) -> str:
    """Return how many ranks are where.

    >>> world([2, 2, 2, 2]), world([3, 1])
    ('4 nodes × 2 ranks', '2 nodes of 3 and 1 ranks')
    """
    if len(set(nodes)) == 1:
        return f"{len(nodes)} nodes × {nodes[0]} rank{'s' if nodes[0] > 1 else ''}"
    return f"{len(nodes)} nodes of {' and '.join(map(str, nodes))} ranks"


def percent(density: float | None) -> str:
    """Return a density; dense reducers have none.

    >>> percent(0.01), percent(0.001), percent(None)
    ('1%', '0.1%', '–')
    """
    return NOTHING if density is None else f"{density * 100:g}%"


def microseconds(seconds: float) -> str:
    """Return seconds in µs, without the unit.

    >>> microseconds(0.0123456)
    '12,346'
    """
    return f"{seconds * 1e6:,.0f}"
