"""The tables of ``cloudtrain bench train --cluster``."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from training.bench.record import Record
from training.bench.tables import NOTHING
from training.commands.printing import Table, milliseconds, times

A_STEP, TO_ACCURACY = "seconds a step", "seconds to the accuracy"


def race_tables(records: Iterable[Record]) -> Iterator[Table]:
    """Yield a table of steps for each cell, and one of runs where there are some."""

    def place(record: Record) -> tuple[str, ...]:
        case = record.case
        return case["model"], case["rate"], str(case["ranks_of_nodes"]), case["unit"]

    for _, own in groupby(records, key=place):
        yield (
            steps_table(of_cell) if (of_cell := list(own))[0].case["unit"] == A_STEP else runs_table(of_cell)
        )


def title_of(record: Record) -> str:
    """Return what distinguishes a cell from others."""
    case = record.case
    nodes = case["ranks_of_nodes"]
    ranks = f"{len(nodes)} nodes × {nodes[0]} rank{'s' * (nodes[0] > 1)}"
    return f"{case['model']} ({case['weights']:,} weights), {case['rate']}, {ranks}"


def steps_table(records: Sequence[Record]) -> Table:
    """Return the table of what steps took."""
    header = ["", "steps/s", "ms", "min\nms", "max\nms", "peer", "× peer", "× horovod", "of best"]
    header += ["× no\noverlap", "hidden", "sent inter\nkB", "card\nkB"]
    notes = [
        "ms: of a step, from barrier to barrier, median of turns. peer: the fastest that sends all;",
        "of best: the fastest of all over it. hidden: share of the exchange behind computing.",
        "sent: payload of the busiest rank; card: what the busiest node's card sent, headers and all",
    ]
    quick = "  (quick)" * records[0].case["quick"]
    return Table(title_of(records[0]) + quick, header, list(step_rows(records)), notes)


def step_rows(records: Sequence[Record]) -> Iterator[list[str]]:
    """Yield a row a subject."""
    medians = {record.subject: record.seconds.median for record in records}
    for record in records:
        seconds, more = record.seconds, record.more
        yield [
            record.subject,
            f"{more['steps_a_second']:.3g}",
            *(milliseconds(each) for each in (seconds.median, seconds.min, seconds.max)),
            record.peer or NOTHING,
            times(record.ratio),
            times(ratio(medians.get("horovod"), seconds.median)),
            f"{more['of_best']:.2f}",
            times(ratio(medians.get(f"{record.subject}, overlap off"), seconds.median)),
            share(more["hidden_share"] if more["overlap"] else None),
            f"{record.bytes.inter / 1e3:,.0f}" if record.bytes else NOTHING,
            f"{more['card_bytes'] / 1e3:,.0f}",
        ]


def ratio(other: float | None, own: float) -> float | None:
    """Return how many times as long another one takes, if there is one."""
    return None if other is None else other / own


def share(value: float | None) -> str:
    """Return a share in percent, or a dash.

    >>> share(0.714), share(None)
    ('71 %', '–')
    """
    return NOTHING if value is None else f"{value:.0%}".replace("%", " %")


def runs_table(records: Sequence[Record]) -> Table:
    """Return the table of how long runs took to the accuracy."""
    header = ["", "reached", "s", "min\ns", "max\ns", "peer", "× peer", "steps", "last\naccuracy"]
    notes = [
        f"s: to a test accuracy of {records[0].more['target']:.1%}, median of seeds; a run that has not",
        "reached it counts with all its seconds, and there is no ratio",
    ]
    title = f"{title_of(records[0])}: time to accuracy"
    return Table(title, header, list(map(run_row, records)), notes)


def run_row(record: Record) -> list[str]:
    """Return the row of a subject."""
    more, seconds = record.more, record.seconds
    accuracies = sorted(more["final_accuracy"])
    return [
        record.subject,
        f"{more['reached']} of {more['seeds']}",
        *(f"{each:,.1f}" for each in (seconds.median, seconds.min, seconds.max)),
        record.peer or NOTHING,
        times(record.ratio),
        f"{sorted(more['steps'])[len(more['steps']) // 2]:,}",
        f"{accuracies[len(accuracies) // 2]:.1%}",
    ]
