"""What is shown of ``benchmarks.linear``: SparCML's table 2, all of it, objectives against time."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from pathlib import Path

from benchmarks.drawing.pages import Results, fingerprint
from benchmarks.drawing.style import PALETTE, picture
from benchmarks.linear import DENSE, of_one_rank, of_ranks
from training.bench.record import Record
from training.commands.printing import markdown, times

KIND, PICTURE = "linear", "docs/linear/objective.svg"
# SparCML's table 2, on 8 nodes with Gigabit Ethernet: seconds of an epoch, and of its communication, dense
# and sparse (SSAR_Split_allgather).
PAPER = {
    ("url", "logistic"): (1045.0, 1004.6, 80.26, 42.2),
    ("webspam", "logistic"): (768.0, 759.5, 37.9, 29.5),
}
# And its coordinate descent, on 8 nodes of Piz Daint.
PAPER_COORDINATE = {("url", "logistic"): (49.0, 24.0, 26.0, 4.5)}
ROWS_OF_RANK = 1000  # in a step there, and in the picture
MOST_LINES = 4  # of a picture


def is_first_case(record: Record) -> bool:
    """Return whether it is of the first case that is shown: url, logistic, on the cluster."""
    case = record.case
    own = (case["shape"], case["loss"], case["solver"], case["batch_size"])
    return own == ("url", "logistic", "sgd", ROWS_OF_RANK) and not {"until", "clock"} & case.keys()


def groups(results: Results) -> Iterator[list[Record]]:
    """Yield the records of each case on ranks, a dense one first."""
    on_ranks = [each for each in results.records if "until" not in each.case]
    keys = ("shape", "loss", "solver", "clock", "batch_size")
    for _, own in groupby(on_ranks, key=lambda each: [each.case.get(key) for key in keys]):
        yield list(own)


def fastest(records: Sequence[Record], *, dense: bool) -> Record:
    """Return the record of the fastest candidate of a kind."""
    return min(
        (each for each in records if (each.subject in DENSE) == dense), key=lambda each: each.seconds.median
    )


def tables(results: Results) -> Iterator[str]:
    """Yield the tables."""
    yield _as_in_the_paper(list(groups(results)))
    for own in groups(results):
        yield of_ranks(own).markdown()
    alone = [each for each in results.records if "until" in each.case]
    for until, own_alone in groupby(alone, key=lambda each: str(each.case["until"])):
        for _, of_loss in groupby(own_alone, key=lambda each: [each.case["shape"], each.case["loss"]]):
            yield of_one_rank(list(of_loss), until).markdown()


def _as_in_the_paper(cases: Sequence[Sequence[Record]]) -> str:
    rows = []
    for records in cases:
        case, dense, sparse = records[0].case, fastest(records, dense=True), fastest(records, dense=False)
        of_solver = PAPER if case["solver"] == "sgd" else PAPER_COORDINATE
        of_solver = of_solver if case["batch_size"] == ROWS_OF_RANK else {}
        theirs = of_solver.get((case["shape"], case["loss"]))
        rows.append(
            [
                f"{case['shape']}, {case['loss']}, {case['solver']}{', simulated' * ('clock' in case)}",
                f"{case['batch_size']:,}" if case["solver"] == "sgd" else "all",
                f"{dense.subject}, {_times_of(dense)}",
                f"{sparse.subject}, {_times_of(sparse)}",
                f"{times(sparse.ratio)} ({times(sparse.more['communication_ratio'])})",
                "–" if theirs is None else f"{theirs[0]:g} ({theirs[1]:g})",
                "–" if theirs is None else f"{theirs[2]:g} ({theirs[3]:g})",
                "–" if theirs is None else f"{times(theirs[0] / theirs[2])} ({times(theirs[1] / theirs[3])})",
            ]
        )
    header = [
        "",
        "rows of a rank in a step",
        "best dense, s a pass",
        "best sparse",
        "×",
        "SparCML: dense, s",
        "sparse",
        "×",
    ]
    return markdown(header, rows)


def _times_of(record: Record) -> str:
    return f"{record.seconds.median:.3f} ({record.more['communication']['median']:.3f})"


def drawn(results: Results) -> list[list[Record]]:
    """Return the cases of the picture."""
    return [
        own
        for own in groups(results)
        for case in [own[0].case]
        if (case["solver"], case["batch_size"]) == ("sgd", ROWS_OF_RANK) and "clock" not in case
    ]


def draw(results: Results, path: Path) -> None:
    """Write the picture of objectives against seconds: the best dense candidate, and the best sparse ones."""
    cases = drawn(results)
    with picture(path, 3.4 * len(cases), 2.8, fingerprint(sum(cases, []))) as figure:
        for axes, records in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
            sparse = sorted(
                (each for each in records if each.subject not in DENSE), key=lambda each: each.seconds.median
            )
            shown = [fastest(records, dense=True), *sparse[: MOST_LINES - 1]]
            for color, record in zip(PALETTE, shown, strict=False):
                seconds = list(accumulate(record.more["pass_seconds"]))
                axes.plot(
                    seconds, record.more["objectives"], "o-", ms=3, lw=1, color=color, label=record.subject
                )
            axes.set_title(f"{records[0].case['shape']}, {records[0].case['loss']}", fontsize=9)
            axes.set_xlabel("seconds")
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=7, loc="upper right")
        figure.axes[0].set_ylabel("objective")
