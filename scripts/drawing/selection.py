"""Times of selectors on one core."""

from collections.abc import Iterator
from itertools import groupby

from scripts.drawing.results import Results
from scripts.drawing.text import NOTHING, percent, table
from training.commands.printing import milliseconds, times

TEXT = """## Selection

Selecting on one core, against the alternatives, and against a bare read of the vector.
"""


def tables(results: Results) -> Iterator[str]:
    """Yield a table for each law that the vectors were drawn from."""
    peers = list(dict.fromkeys(record.peer for record in results.records))
    for law, of_law in groupby(results.records, key=lambda record: record.case["input"]):
        rows = []
        for (size, density, subject), own in groupby(
            of_law, key=lambda record: (record.case["size"], record.case["density"], record.subject)
        ):
            by_peer = {record.peer: record for record in own}
            seconds = next(iter(by_peer.values())).seconds
            ratios = [times(by_peer[peer].ratio) if peer in by_peer else NOTHING for peer in peers]
            cells = [f"`{subject}`", f"{size:,}", percent(density), milliseconds(seconds.median)]
            rows.append([*cells, *ratios])
        header = ["selector", "entries", "density", "ms", *(f"× {peer}" for peer in peers)]
        yield f"Entries: {law}.\n"
        yield table(header, rows)
