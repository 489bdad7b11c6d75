"""What is shown of ``benchmarks.linear``: SparCML's table 2, all of it, objectives against time."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from pathlib import Path

from benchmarks.drawing.pages import Results, fingerprint, markdown, with_notes
from benchmarks.drawing.style import PALETTE, picture
from benchmarks.linear import DENSE, of_one_rank, of_ranks
from training.bench.record import Record
from training.commands.printing import times

KIND, PICTURE = "linear", "docs/linear/objective.svg"
# SparCML's table 2, on 8 nodes with Gigabit Ethernet: seconds of an epoch, and of its communication, dense
# and sparse (SSAR_Split_allgather).
PAPER = {
    ("url", "logistic", "sgd"): (1045.0, 1004.6, 80.26, 42.2),
    ("webspam", "logistic", "sgd"): (768.0, 759.5, 37.9, 29.5),
    ("url", "logistic", "coordinate"): (49.0, 24.0, 26.0, 4.5),  # on 8 nodes of Piz Daint
}
ROWS_OF_RANK = 1000  # in a step there, and in the picture
MOST_LINES = 4  # of a picture


def groups(results: Results) -> Iterator[list[Record]]:
    """Yield the records of each case on ranks, a dense one first."""
    on_ranks = [each for each in results.records if "until" not in each.case]
    keys = ("shape", "loss", "solver", "clock", "batch_size")
    for _, own in groupby(on_ranks, key=lambda each: [each.case.get(key) for key in keys]):
        yield list(own)


def by_speed(records: Sequence[Record], *, dense: bool) -> list[Record]:
    own = [each for each in records if (each.subject in DENSE) == dense]
    return sorted(own, key=lambda each: each.seconds.median)


def tables(results: Results) -> Iterator[str]:
    yield _as_in_the_paper(list(groups(results)))
    for own in groups(results):
        yield with_notes(of_ranks(own))
    alone = [each for each in results.records if "until" in each.case]
    for until, own_alone in groupby(alone, key=lambda each: str(each.case["until"])):
        for _, of_loss in groupby(own_alone, key=lambda each: [each.case["shape"], each.case["loss"]]):
            yield with_notes(of_one_rank(list(of_loss), until))


def _as_in_the_paper(cases: Sequence[Sequence[Record]]) -> str:
    rows = []
    for records in cases:
        case = records[0].case
        dense, sparse = (by_speed(records, dense=each)[0] for each in (True, False))
        theirs = PAPER.get((case["shape"], case["loss"], case["solver"]))
        cells = ["–"] * 3
        if theirs is not None and case["batch_size"] == ROWS_OF_RANK:
            ratios = f"{times(theirs[0] / theirs[2])} ({times(theirs[1] / theirs[3])})"
            cells = [f"{theirs[0]:g} ({theirs[1]:g})", f"{theirs[2]:g} ({theirs[3]:g})", ratios]
        row = [
            f"{case['shape']}, {case['loss']}, {case['solver']}{', simulated' * ('clock' in case)}",
            f"{case['batch_size']:,}" if case["solver"] == "sgd" else "all",
            f"{dense.subject}, {_times_of(dense)}",
            f"{sparse.subject}, {_times_of(sparse)}",
            f"{times(sparse.ratio)} ({times(sparse.more['communication_ratio'])})",
        ]
        rows.append(row + cells)
    header = ["", "rows of a rank in a step", "best dense, s a pass", "best sparse", "×"]
    return markdown([*header, "SparCML: dense, s", "sparse", "×"], rows)


def _times_of(record: Record) -> str:
    return f"{record.seconds.median:.3f} ({record.more['communication']['median']:.3f})"


def draw(results: Results, path: Path) -> None:
    """Write the picture of objectives against seconds: the best dense candidate, and the best sparse ones."""
    keys = {"solver": "sgd", "batch_size": ROWS_OF_RANK}.items()
    cases = [own for own in groups(results) if keys <= own[0].case.items() and "clock" not in own[0].case]
    with picture(path, 3.4 * len(cases), 2.8, fingerprint(sum(cases, []))) as figure:
        for axes, records in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
            shown = by_speed(records, dense=True)[:1] + by_speed(records, dense=False)[: MOST_LINES - 1]
            for color, record in zip(PALETTE, shown, strict=False):
                seconds = list(accumulate(record.more["pass_seconds"]))
                axes.plot(
                    seconds, record.more["objectives"], "o-", ms=3, lw=1, color=color, label=record.subject
                )
            axes.set_title(f"{records[0].case['shape']}, {records[0].case['loss']}", fontsize=9)
            axes.set_xlabel("seconds")
            axes.legend(fontsize=7, loc="upper right")
        figure.axes[0].set_ylabel("objective")
