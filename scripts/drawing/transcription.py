"""Processor time of Ok-Topk, against the paper's algorithm in NumPy."""

from collections.abc import Iterator

from scripts.drawing.results import Results
from scripts.drawing.text import percent, table, world
from training.bench.tables import label
from training.commands.printing import milliseconds, times

TEXT = """## Ok-Topk against its transcription

Processor time of a rank; the peer is the paper's algorithm 1 in plain NumPy.
"""


def tables(results: Results) -> Iterator[str]:
    """Yield the table of processor time."""
    first = results.records[0]
    yield f"{world(first.case['ranks_of_nodes'])} (simulated), {first.case['size']:,} entries.\n"
    header = ["reducer", "density", "ms", "× peer", "selected", "applied"]
    rows = [
        [
            *(f"`{label(record)}`", percent(record.case["density"])),
            *(milliseconds(record.seconds.median), times(record.ratio)),
            *(f"{record.more['entries'][name]:,}" for name in ("selected", "applied")),
        ]
        for record in results.records
    ]
    yield table(header, rows)
