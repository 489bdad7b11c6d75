"""Show the newest records of benchmarks/results/: in benchmarks/README.md and docs/, with pictures.

It needs the records only: python -m benchmarks.draw_benchmarks
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes

from benchmarks import convergence, local_steps
from benchmarks.drawing import linear
from benchmarks.drawing.pages import (
    CHANGED,
    Results,
    fingerprint,
    markdown,
    newest,
    rate_in_words,
    rewrite,
    with_notes,
)
from benchmarks.drawing.style import STAGES, WAITING, WHOLE, legend, name_row, note, open_up, picture
from benchmarks.jobs import world
from benchmarks.linear import of_ranks
from benchmarks.pto import tables as pto_tables
from benchmarks.race import A_STEP, TO_ACCURACY, runs_table, steps_table
from benchmarks.reducers import table_of
from training.bench.cache import table as cache_table
from training.bench.record import Record, code_of
from training.bench.reducers import label, percent
from training.bench.selection import case_table
from training.commands.printing import NOTHING, Table, milliseconds

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
ROWS = 10
OLDER = " †"  # the code that was measured has changed since
STEP, ACCURACY = {"unit": A_STEP}, {"unit": TO_ACCURACY}
STEP_OF_MLP, MLP_TO_91 = "a step of an MLP of 10 M weights", "that MLP to 91 % test accuracy"
GPT = "a GPT of 0.9 M weights to the loss of dense after 3/4 of its steps"
RING, BARE = ("horovod, ring", "Horovod, MPI's ring"), ("horovod", "Horovod out of the box")
FASTEST, GLOO = "`{}`, the fastest dense one", ("ddp over gloo", "PyTorch's DDP over Gloo")
OUR_POWERSGD = "powersgd, one bucket"  # one bucket, as PyTorch's has
POWERSGD = ("ddp, PowerSGD hook of rank 4", "DDP with its PowerSGD hook")


@dataclass(frozen=True)
class Section:
    """A block of the page: some records of a kind, their table, and the picture of them, beside the page."""

    name: str
    kind: str
    table: Callable[[Sequence[Record]], Table]
    shows: Callable[[Record], bool] = lambda record: True
    picture: str = ""
    draw: Callable[[Sequence[Record], Path], None] | None = None
    fastest_first: bool = False

    def records(self, results: Results) -> list[Record]:
        return [record for record in results.records if self.shows(record)]

    def markdown(self, results: Results) -> str:
        records = self.records(results)
        if self.fastest_first:
            records.sort(key=lambda record: record.seconds.median)
        table = self.table(records)
        return f"{results.source}\n{with_notes(replace(table, rows=table.rows[:ROWS]))}"


def draw_cluster(records: Sequence[Record], path: Path) -> None:
    """Write the picture: for each density time by stage, and below it the bytes between nodes."""
    found = (record.case["density"] for record in records)
    densities = list(dict.fromkeys(density for density in found if density is not None)) or [1.0]
    with picture(path, 0.8 + 4.1 * len(densities), 5.6, fingerprint(records)) as figure:
        sharing = {"sharey": "row", "sharex": "col", "squeeze": False, "height_ratios": (3, 2)}
        rows = figure.subplots(2, len(densities), **sharing)
        for density, time, sent in zip(densities, *rows, strict=True):
            own = [record for record in records if record.case["density"] in (None, density)]
            own.sort(key=lambda record: "baselines" not in record.more)  # the all-reduces at the end
            time.set_title(f"density {percent(density)}")
            draw_time(time, own)
            draw_bytes(sent, own)
            for axes in (time, sent):
                open_up(axes)
            sent.set_xticks(range(len(own)), [label(each) for each in own], rotation=90)
        name_row(rows[0, 0], "ms a step")
        name_row(rows[1, 0], "MB between nodes,\nbusiest rank")
        legend(figure, STAGES | {"waiting": WAITING, "dense all-reduce": WHOLE})
        case = records[0].case
        figure.suptitle(f"{case['rate']}, {case['size']:,} entries, {world(case['ranks_of_nodes'])}")


def draw_time(axes: Axes, records: Sequence[Record]) -> None:
    """Draw a bar for each candidate, as high as its step took, and above it its ratio to the peer."""
    for place, record in enumerate(records):
        total, low = record.seconds.median * 1e3, 0.0
        for stage, seconds in (record.more["stages"] or {}).items():
            high = min(total, low + seconds["mean"] * 1e3)  # medians of parts may add up to more
            axes.bar(place, high - low, bottom=low, color=STAGES[stage], width=0.75)
            low = high
        rest = WAITING if record.more["stages"] else WHOLE
        axes.bar(place, total - low, bottom=low, color=rest, width=0.75)
        if record.ratio is not None:
            note(axes, place, total, f"{record.ratio:.3g}×")


def draw_bytes(axes: Axes, records: Sequence[Record]) -> None:
    """Draw what the busiest rank sends between nodes; that of MPI's own collectives is unknown."""
    for place, record in enumerate(records):
        sent = record.bytes.inter / 1e6 if record.bytes else 0.0
        if record.bytes:
            axes.bar(place, sent, color=STAGES["inter"], width=0.75)
        note(axes, place, sent, f"{sent:.3g}" if record.bytes else NOTHING)


def draw_steps(records: Sequence[Record], path: Path) -> None:
    with picture(path, 5.4, 3.6, fingerprint(records)) as figure:
        axes: Axes = figure.subplots()
        axes.set_title(records[0].case["rate"])
        for number, record in enumerate(records):
            color = WHOLE if record.case["density"] is None else STAGES["select"]
            axes.bar(number, record.more["steps_a_second"], color=color, width=0.75)
            above = "" if record.ratio is None else f"{record.ratio:.3g}×"
            note(axes, number, record.more["steps_a_second"], above)
        axes.set_xticks(range(len(records)), [each.subject for each in records], rotation=90)
        open_up(axes)
        name_row(axes, "steps a second")
        legend(figure, {"sends all entries": WHOLE, "sends a part": STAGES["select"]})


def draw_runs(records: Sequence[Record], path: Path) -> None:
    """Write the picture of accuracies over time: a line a seed, and the accuracy that is raced to."""
    colors = matplotlib.colormaps["tab20"].colors
    of_subject = {record.subject: colors[number % 20] for number, record in enumerate(records)}
    with picture(path, 6.8, 4.2, fingerprint(records)) as figure:
        axes: Axes = figure.subplots()
        for record in records:
            style = "--" if record.case["density"] is None else "-"  # dashed: it sends all entries
            for curve in record.more["curves"]:
                seconds, accuracies = zip(*curve, strict=True)
                axes.plot(seconds, accuracies, style, color=of_subject[record.subject], linewidth=0.9)
        axes.axhline(records[0].more["target"], color=WHOLE, linewidth=0.5)
        axes.set(xscale="log", xlabel="s", ylabel="test accuracy")
        legend(figure, of_subject)


def draw_cache(records: Sequence[Record], path: Path) -> None:
    seconds = {each.subject: each.seconds.median for each in records}
    subjects = set(seconds)
    seconds |= {each.peer: each.peer_seconds.median for each in records if each.peer_seconds}
    bars_of = sorted(seconds.items(), key=lambda each: each[1])
    with picture(path, 6.4, 2.4, fingerprint(records)) as figure:
        axes = figure.subplots()
        colors = [STAGES["select"] if name in subjects else WHOLE for name, _ in bars_of]
        axes.barh([name for name, _ in bars_of], [each * 1e6 for _, each in bars_of], color=colors)
        for place, (_, each) in enumerate(bars_of):
            number, at = f"{each * 1e6:,.0f}", (each * 1e6, place)
            axes.annotate(number, at, (3, 0), textcoords="offset points", va="center")
        axes.set(xscale="log", xlabel="µs a sample")
        axes.invert_yaxis()


def gpu_tables(results: Results) -> Iterator[str]:
    for _, own in groupby(results.records, key=lambda record: (record.case["size"], record.case["entry"])):
        yield with_notes(case_table(list(own)))


def has(**case: Any) -> Callable[[Record], bool]:
    """Return what picks records by keys of their case, and leaves out probes of MPI's algorithms."""
    return lambda record: record.bench != "probe" and case.items() <= record.case.items()


def few_densities(records: Sequence[Record]) -> Table:
    return table_of([each for each in records if each.case["density"] in (None, 0.01)])


ACCURACY_PICTURE, CLUSTER_PICTURE = "race-mlp-4x1-0.2gbit-accuracy.svg", "cluster-1gbit-14728266.svg"
OF_VGG16 = {"rate": "1gbit", "size": 14_728_266}
LINEAR = {"shape": "url", "loss": "logistic", "solver": "sgd", "batch_size": 1000, "mpi_algorithm": "ring"}
SELECTION = {"size": 25_000_000, "density": 0.001, "input": "gaussian"}
SECTIONS = (
    Section("race", "race", steps_table, has(unit=A_STEP), "race-mlp-4x1.svg", draw_steps, True),
    Section("race-overlap", "race-overlap", steps_table),
    Section("accuracy", "race", runs_table, has(unit=TO_ACCURACY), ACCURACY_PICTURE, draw_runs),
    Section("cluster", "cluster", few_densities, has(**OF_VGG16), CLUSTER_PICTURE, draw_cluster, True),
    Section("cluster-1m", "cluster-1m", table_of, has(), "cluster-1m-1gbit-1000000.svg", draw_cluster, True),
    Section("reducers", "reducers", table_of),
    Section("selection", "selection", case_table, has(**SELECTION)),
    Section("gpu-selection", "gpu-selection", case_table, has(size=1 << 27, entry="float32")),
    Section("cache", "cache", cache_table, has(samples=10_000), "cache.svg", draw_cache),
    Section("cache-short", "cache", cache_table, has(samples=600)),
    Section("pto", "pto", lambda records: next(pto_tables(records))),
    Section("linear", "linear", of_ranks, has(**LINEAR)),
)
# Pages of docs/ with tables of the records of a kind, and the command that measures them.
PAGES: tuple[tuple[str, str, Callable[[Results], Iterable[str]], str], ...] = (
    ("docs/pto.md", "pto", lambda results: map(with_notes, pto_tables(results.records)), "benchmarks/run.sh"),
    ("docs/linear.md", linear.KIND, linear.tables, "benchmarks/run.sh"),
    ("docs/gpu.md", "gpu-selection", gpu_tables, "scripts/gpu.sh"),
)
NOT_YET = "Not measured yet.\n"


def planned(found: dict[str, Results]) -> str:
    """Return the steps of all races beside those that were planned, as Markdown."""
    races = [each for each in found.values() if any("planned_seconds" in one.more for one in each.records)]
    records = [each for race in races for each in race.records if each.more.get("planned_seconds")]
    if not records:
        return NOT_YET
    ratios = [record.more["planned_seconds"] / record.seconds.median for record in records]
    off = [abs(each - 1) for each in ratios]
    near, half = sum(each <= 0.2 for each in off), f"{median(off):.0%}"
    sources = from_docs(", ".join(race.link for race in races))
    verdict = f"Of {len(off)} steps {near} are planned within 20 %, half within {half} ({sources})."
    verdict += CHANGED * (not all(race.is_current for race in races)) + "\n"
    rows = []
    for record, of_measured in zip(records, ratios, strict=True):
        case, of_step = record.case, (record.more["planned_seconds"], record.seconds.median)
        where = (case["model"], case["rate"], world(case["ranks_of_nodes"]))
        rows.append([*where, f"`{record.subject}`", *map(milliseconds, of_step), f"{of_measured:.2f}"])
    header = ["model", "rate", "ranks", "reducer", "planned, ms", "measured, ms", "planned/measured"]
    return f"{verdict}\n{markdown(header, rows)}"


@dataclass(frozen=True)
class Claim:
    """A subject beside ``peer``, its name in the records and as it is shown; ``None``: the fastest dense."""

    what: str
    kind: str
    case: dict[str, Any]
    subject: str
    peer: tuple[str, str] | None

    def row(self, results: Results) -> list[str]:
        own = self._record(results, self.subject)
        name, shown = self.peer or (str(own.peer), FASTEST.format(own.peer))
        assert own.more.get("reached") == own.more.get("seeds"), "a run that has not arrived has no time"
        cells = _cells(self.subject, own.seconds.median, shown, self._record(results, name).seconds.median)
        cores = f"[{own.more['machine']['cores']}]({results.path.relative_to(ROOT)})"
        return [self.what, _links(own.case), *cells, cores + OLDER * (not results.is_current)]

    def _record(self, results: Results, subject: str) -> Record:
        own = (each for each in results.records if each.subject == subject)
        (found,) = (each for each in own if self.case.items() <= each.case.items())
        return found


CLAIMS = (
    Claim(STEP_OF_MLP, "race", STEP, "hitopk", RING),
    Claim(MLP_TO_91, "race", ACCURACY, "hitopk", RING),
    Claim(MLP_TO_91, "race", ACCURACY, "oktopk", RING),
    Claim(MLP_TO_91, "race", ACCURACY, "auto", RING),
    Claim(STEP_OF_MLP, "race-all", STEP, "hitopk", None),
    Claim(STEP_OF_MLP, "race-all", STEP, "hitopk", BARE),
    Claim("a step in PyTorch, 10 M weights", "torch-ddp", {"network": "wide"}, "hitopk, gap+fp16", GLOO),
    Claim("a step in PyTorch, 10 M weights", "torch-ddp", {"network": "wide"}, OUR_POWERSGD, POWERSGD),
)


def _links(case: dict[str, Any]) -> str:
    nodes = case["ranks_of_nodes"]
    return f"{rate_in_words(case['rate'])}, {len(nodes)} × {nodes[0]}"


def _cells(subject: str, seconds: float, peer: str, beside: float) -> list[str]:
    names = (f"`{part}`" if part.islower() and " " not in part else part for part in subject.split(", "))
    return [", ".join(names), _seconds(seconds), peer, _seconds(beside), f"{beside / seconds:.1f}"]


def _seconds(value: float) -> str:
    return f"{float(f'{value:.3g}'):,g} s"


def claimed(found: dict[str, Results]) -> str:
    """Return what the README claims of speed, as a table of the newest records."""
    rows = [claim.row(found[claim.kind]) for claim in CLAIMS]
    runs, records = local_steps.Runs.of(local_steps.plan()), convergence.recorded(local_steps.TIMES)
    dense, subject = runs.content["times"]["dense"], "MuLoCo, 2 bits, H = 30"
    for rate in ("50mbit", "10mbit"):
        own = local_steps.on_cluster(records, rate, "4x1")
        seconds = local_steps.seconds_to(runs.target, runs, own)
        fastest = min((name for name in dense if name in seconds), key=seconds.__getitem__)
        cells = _cells(subject, seconds[subject], FASTEST.format(fastest), seconds[fastest])
        cores = f"[{own[subject]['machine']['cores']}](docs/local_steps.md#time-to-the-same-loss)"
        older = OLDER * (own[subject].get("code") != code_of(own[subject]["bench"]))
        rows.append([GPT, _links({"rate": rate, "ranks_of_nodes": [1] * 4}), *cells, cores + older])
    header = ["what", "links, nodes × ranks", "cloudtrain", "", "compared with", "", "×", "cores"]
    return markdown(header, rows)


def from_docs(text: str) -> str:
    """Return a text with links to records as a page of docs/ has them."""
    return text.replace("](results/", "](../benchmarks/results/")


def texts(found: dict[str, Results]) -> dict[str, dict[str, str]]:
    """Return what stands between the marks of each page."""
    readme = {}
    for section in SECTIONS:
        block = section.markdown(found[section.kind]) if section.kind in found else NOT_YET
        readme[section.name] = f"\n{block}\n"
    others = found.keys() - {section.kind for section in SECTIONS}
    listed = "".join(f"- {found[kind].link}\n" for kind in found if kind in others)
    readme["others"] = f"\n{listed}\n"
    pages = {"benchmarks/README.md": readme, "README.md": {"claims": claimed(found)}}
    pages["docs/validation.md"] = {"planned": planned(found)}
    for path, kind, tables, command in PAGES:
        measured = f"Nothing has been measured yet: `{command}` does.\n"
        if kind in found:
            measured = "\n".join([from_docs(found[kind].source), *tables(found[kind])])
        pages[path] = {"measured": f"\n{measured}\n"}
    return pages


def drawn(found: dict[str, Results]) -> Iterator[tuple[Section, list[Record]]]:
    """Yield the sections that have a picture, with its records."""
    for section in SECTIONS:
        if section.kind in found and section.draw is not None:
            yield section, section.records(found[section.kind])


def write() -> None:
    found = newest(FOLDER / "results")
    for path, blocks in texts(found).items():
        rewrite(ROOT / path, blocks)
    for section, records in drawn(found):
        section.draw(records, FOLDER / section.picture)
    if linear.KIND in found:
        linear.draw(found[linear.KIND], ROOT / linear.PICTURE)


if __name__ == "__main__":
    write()
