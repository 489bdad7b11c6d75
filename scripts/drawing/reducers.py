"""Times of reducers on simulated ranks, against dense."""

from collections.abc import Iterator

from scripts.drawing.results import Results
from scripts.drawing.text import percent, table, world
from training.bench.record import Record
from training.bench.tables import cells, label

TEXT = """## Reducers on simulated ranks

By the virtual clock: messages take the time that the α-β model predicts. Sent: by the busiest rank in a
step; memory: allocated by a rank besides its gradient, in vectors of the gradient's size.
"""


def tables(results: Results) -> Iterator[str]:
    """Yield the table of simulated ranks, after a line about them."""
    first = results.records[0]
    yield f"{world(first.case['ranks_of_nodes'])}, {first.case['size']:,} entries, {links(first)}.\n"
    header = ["reducer", "density", "ms", "× dense", "intra ms", "inter ms", "predicted ms", "sent intra kB"]
    header += ["sent inter kB", "selected", "applied", "memory"]
    rows = ([f"`{label(each)}`", percent(each.case["density"]), *cells(each)] for each in results.records)
    yield table(header, rows)


def links(record: Record) -> str:
    """Return the links of the virtual clock."""
    network = record.case["network"]
    texts = (
        f"{name} {network[link]['alpha'] * 1e6:g} µs and {8 / network[link]['beta'] / 1e9:g} Gbit/s"
        for link, name in (("intra", "inside nodes"), ("inter", "between them"))
    )
    return ", ".join(texts)
