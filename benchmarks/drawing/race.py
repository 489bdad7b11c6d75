"""Steps a second of all that raced, and accuracies over time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

from benchmarks.drawing.cluster import world
from benchmarks.drawing.results import Results, fingerprint
from benchmarks.drawing.style import STAGES, WHOLE, legend, name_rows, note, open_up, picture
from benchmarks.race_tables import A_STEP, race_tables, runs_table
from training.bench.record import Record

RACE = "race"  # so begin the names of the pictures, and of the kinds of results

TEXT = """## Training, raced

Whole training steps, and time to a test accuracy, on MNIST-5k (`lstm_lm_small`: on the Brown corpus, with
10,000 words): real ranks under `horovodrun` on an emulated cluster, on the cores of one machine. `horovod`:
an asynchronous `hvd.allreduce` for each gradient in the backward graph, fused and overlapped by Horovod, over
the all-reduce that Open MPI chooses; `horovod, ring`: over its ring. All others go through this package's
engine, whose `dense` overlaps, too; `overlap off`: each exchange begins when the whole gradient is there. "×
peer" is against the fastest that sends all entries, "of best" is the fastest of all over it, "hidden" the
share of the exchange that ran while the rank computed, and "card" what the card of the busiest node sent,
headers and all. All that send all entries train alike, but for rounding: of these only the fastest, `horovod,
ring`, is raced to an accuracy. In pictures of accuracies its lines are dashed. Runs go on after they have
reached it, to the end of their last epoch. `hitopk then dense` has a schedule of its own, as in DAWNBench:
more epochs than the others, of which the last is dense. "steps" and "last accuracy" are of the whole run.
"""


def place(record: Record) -> tuple[str, list[int]]:
    """Return what is drawn together: a model on so many ranks."""
    return record.case["model"], record.case["ranks_of_nodes"]


def rate(record: Record) -> str:
    """Return the rate of the links."""
    found: str = record.case["rate"]
    return found


def is_step(record: Record) -> bool:
    """Return whether it is of a step; else it is of runs."""
    return bool(record.case["unit"] == A_STEP)


@dataclass(frozen=True)
class Picture:
    """A picture of these records."""

    picture: str
    records: Sequence[Record]
    drawn: Callable[["Picture", Path], None]

    @property
    def fingerprint(self) -> str:
        """Return a digest of the records, which the picture has among its metadata."""
        return fingerprint(self.records)

    def draw(self, path: Path) -> None:
        """Write it."""
        self.drawn(self, path)


def steps_and_runs(results: Results) -> Iterator[tuple[list[Record], list[list[Record]]]]:
    """Yield, for each model on so many ranks, the records of steps, and those of runs for each rate."""
    ordered = sorted(results.records, key=lambda record: (str(place(record)), not is_step(record)))
    for _, own in groupby(ordered, key=place):
        steps = {is_step: list(each) for is_step, each in groupby(own, key=is_step)}
        yield steps.get(True, []), [list(each) for _, each in groupby(steps.get(False, []), key=rate)]


def name_of(results: Results, record: Record, *more: str) -> str:
    """Return the name of a picture."""
    model, nodes = place(record)
    return "-".join([results.kind, model, f"{len(nodes)}x{nodes[0]}", *more]) + ".svg"


def pictures(results: Results) -> Iterator[Picture]:
    """Yield what there is to draw."""
    for steps, runs in steps_and_runs(results):
        if steps:
            yield Picture(name_of(results, steps[0]), steps, draw_steps)
        for own in runs:
            yield Picture(name_of(results, own[0], rate(own[0]), "accuracy"), own, draw_runs)


def all_pictures(newest_results: Iterable[Results]) -> list[Picture]:
    """Return what there is to draw of all races."""
    return [each for results in newest_results if results.kind.startswith(RACE) for each in pictures(results)]


def tables(results: Results) -> Iterator[str]:
    """Yield pictures and tables: of steps for each model and number of ranks, then of runs."""
    for steps, runs in steps_and_runs(results):
        first = (steps or runs[0])[0]
        title = (
            f"{first.case['model']}, {first.case['weights']:,} weights, {world(first.case['ranks_of_nodes'])}"
        )
        yield f"### {title}\n"
        if steps:
            yield f"![Steps a second: {title}]({name_of(results, first)})\n"
            yield from (table.markdown() for table in race_tables(steps))
        for own in runs:
            at = f"{rate(own[0])}, test accuracy {own[0].more['target']:.1%}"
            name = name_of(results, own[0], rate(own[0]), "accuracy")
            yield f"Time to the accuracy: {at}; median of seeds. One that has not reached it has no ratio.\n"
            yield f"![Accuracy over time: {title}, {at}]({name})\n"
            yield runs_table(own).markdown()


def is_whole(record: Record) -> bool:
    """Return whether it sends all entries."""
    return record.case["density"] is None


def draw_steps(drawn: Picture, path: Path) -> None:
    """Write the picture of steps a second: a panel a rate, a bar a subject, its ratio to the peer above."""
    panels = [list(own) for _, own in groupby(drawn.records, key=rate)]
    with picture(path, 0.8 + 4.6 * len(panels), 3.6, drawn.fingerprint) as figure:
        row = figure.subplots(1, len(panels), squeeze=False)
        for axes, records in zip(row[0], panels, strict=True):
            axes.set_title(rate(records[0]))
            for number, record in enumerate(records):
                color = WHOLE if is_whole(record) else STAGES["select"]
                axes.bar(number, record.more["steps_a_second"], color=color, width=0.75)
                above = "" if record.ratio is None else f"{record.ratio:.3g}×"
                note(axes, number, record.more["steps_a_second"], above)
            axes.set_xticks(range(len(records)), [each.subject for each in records], rotation=90)
            open_up(axes)
        name_rows(row, ["steps a second"])
        legend(figure, {"sends all entries": WHOLE, "sends a part": STAGES["select"]})


def draw_runs(drawn: Picture, path: Path) -> None:
    """Write the picture of accuracies over time: a line a seed, and the accuracy that is raced to."""
    colors = matplotlib.colormaps["tab20"].colors
    of_subject = {record.subject: colors[number % 20] for number, record in enumerate(drawn.records)}
    with picture(path, 6.8, 4.2, drawn.fingerprint) as figure:
        axes: Axes = figure.subplots()
        for record in drawn.records:
            style = "--" if is_whole(record) else "-"
            for curve in record.more["curves"]:
                seconds, accuracies = zip(*curve, strict=True)
                axes.plot(seconds, accuracies, style, color=of_subject[record.subject], linewidth=0.9)
        axes.axhline(drawn.records[0].more["target"], color=WHOLE, linewidth=0.5)
        axes.set_xscale("log")
        axes.set_xlabel("s")
        axes.set_ylabel("test accuracy")
        axes.spines[["top", "right"]].set_visible(False)
        legend(figure, of_subject)
