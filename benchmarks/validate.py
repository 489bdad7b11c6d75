"""Compare the cost model, the virtual clock and the tuner with measurements on the emulated cluster.

    python -m benchmarks.validate --predict     # from benchmarks/results: some minutes of both cores
    python -m benchmarks.validate               # the tables and pictures of docs/validation.md, from the last

Measured: the records of ``benchmarks.reducers --cluster``. Predicted from the profile that
``cloudtrain tune`` measured on the same cluster: in closed form, and by the same code on simulated ranks that
share as many cores. What the tuner picks from that profile is compared with the fastest that was measured.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import commlib
from benchmarks.drawing.pages import rewrite
from benchmarks.drawing.style import PALETTE, docs_picture
from benchmarks.drawing.tables import markdown
from benchmarks.throttled import bytes_per_second
from commlib import REDUCERS, Communicator, Topology, make_reducer
from commlib.reducers import reducer_options
from commlib.transport import simulated
from commlib.tuning import tuner
from commlib.tuning.probe import Gradients, Profile
from training.bench.record import command, machine
from training.bench.reducers import NOTHING, WALL, Candidate, interleave

ROOT = Path(__file__).resolve().parent.parent
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
PAGE, PICTURES = DOCS / "validation.md", DOCS / "validation"
SIMULATED = ((1.0, "4 × 2"), (10.0, "4 × 2"))  # Gbit/s and nodes × ranks; all of it would take an hour
WITHIN = 1.1  # the most that a pick may take, relative to the best
STEPS = range(1, 3)  # of those on simulated ranks; the one before is a warm-up
COLORS = (*PALETTE, "#999999", "#8c564b", "#bcbd22")


@dataclass(frozen=True, order=True)
class Cell:
    """One case: the rate of the links, ranks on each node, entries, and the share that is selected."""

    gbit: float
    ranks_of_nodes: tuple[int, ...]
    size: int
    density: float

    @property
    def nodes(self) -> list[range]:
        """Return the world ranks of every node."""
        ends = [sum(self.ranks_of_nodes[: node + 1]) for node in range(len(self.ranks_of_nodes))]
        return [range(end - count, end) for end, count in zip(ends, self.ranks_of_nodes, strict=True)]

    @property
    def profile(self) -> Profile:
        """Return the profile of its cluster."""
        return profiles()[self.gbit, sum(self.ranks_of_nodes)]

    @property
    def shape(self) -> str:
        """Return nodes and ranks on each, as ``4 × 2``."""
        return f"{len(self.ranks_of_nodes)} × {self.ranks_of_nodes[0]}"


@dataclass(frozen=True)
class Comparison:
    """Seconds of one reducer in one cell: measured, and predicted in two ways."""

    cell: Cell
    subject: str
    wire: str | None
    measured: float
    closed_form: float
    simulated: float | None


# ------------------------------------------------------------- measurements


def newest(pattern: str) -> list[Path]:
    """Return the files of the newest date that match ``DATE-pattern``."""
    files = sorted(RESULTS.glob(f"????-??-??-{pattern}"))
    return [file for file in files if file.name[:10] == files[-1].name[:10]]


def cluster_records() -> list[Path]:
    """Return the files of records of the day of the newest profiles, which are of the same links."""
    day = newest("profile-*.json")[0].name[:10]
    return sorted(RESULTS.glob(f"{day}-cluster*.jsonl"))


def gbit(rate: str) -> float:
    """Return a rate of ``tc`` in Gbit/s."""
    return bytes_per_second(rate) * 8 / 1e9


gradients_of = cache(Gradients)  # those of a size are drawn once
BenchCandidate = tuple[str, str | None]  # a reducer, and its codec if it takes one


@cache
def runs() -> list[tuple[Cell, dict[BenchCandidate, float]]]:
    """Return the median seconds of all reducers that one command measured in a cell with a profile.

    Dense reducers are in all cells of their size.
    """
    found: dict[tuple[str, Cell], dict[BenchCandidate, float]] = {}
    records = [json.loads(line) for path in cluster_records() for line in path.read_text().splitlines()]
    records = [each for each in records if each["bench"] == "reducers" and each["subject"] in REDUCERS]
    densities = sorted({each["case"]["density"] for each in records} - {None})
    for each in records:
        case, subject = each["case"], each["subject"]
        wire = (case["wire"] or "fp32") if "wire" in reducer_options(subject) else None
        for density in [case["density"]] if REDUCERS[subject].sparse else densities:
            cell = Cell(gbit(case["rate"]), tuple(case["ranks_of_nodes"]), case["size"], density)
            if (cell.gbit, sum(cell.ranks_of_nodes)) in profiles():
                run = found.setdefault((each["command"], cell), {})
                run[subject, wire] = each["seconds"]["median"]
    return [(cell, run) for (_, cell), run in found.items()]


@cache
def measured() -> dict[tuple[Cell, str, str | None], float]:
    """Return the median seconds of every reducer in every cell, of the last run that measured it."""
    return {(cell, *candidate): seconds for cell, run in runs() for candidate, seconds in run.items()}


@cache
def profiles() -> dict[tuple[float, int], Profile]:
    """Return what ``cloudtrain tune`` measured, by the rate of the cluster and its ranks."""
    paths = newest("profile-*.json")
    named = {path: path.stem.split("-") for path in paths}
    return {(gbit(rate), int(ranks)): Profile.load(path) for path, (*_, rate, ranks) in named.items()}


# ------------------------------------------------------------- predictions


def options_of(cell: Cell, wire: str | None) -> dict[str, Any]:
    """Return the options of a reducer; a dense one has none."""
    return {"density": cell.density, "wire": wire} if wire else {}


def closed_form(cell: Cell, subject: str, wire: str | None) -> float:
    """Return the seconds of a step by ``commlib.predict``, computing included."""
    links = {"network": cell.profile.network, "speeds": cell.profile.speeds}
    return commlib.predict(subject, cell.nodes, cell.size, **links, **options_of(cell, wire)).seconds


def on_simulated_ranks(cell: Cell, subject: str, wire: str | None, cores: int) -> float:
    """Return the seconds of a step on the virtual clock, on ranks that share ``cores``."""

    def body(comm: Communicator) -> float:
        candidate = Candidate(subject, wire)
        reducers = {candidate: make_reducer(subject, Topology(comm), cell.size, **options_of(cell, wire))}
        taken = interleave(comm, reducers, gradients_of(cell.size), STEPS, WALL, unchecked=reducers)
        return taken[candidate].seconds.median

    ranks = list(cell.ranks_of_nodes)
    return simulated.run(body, sum(ranks), ranks, cell.profile.network, cores=cores)[0]


def predict(cores: int) -> Iterator[Comparison]:
    """Yield every reducer in every cell; simulated with plain values, at the rates of ``SIMULATED``."""
    for cell, subject, wire in sorted(measured(), key=lambda each: each[:2]):
        if not REDUCERS[subject].sparse and cell.density != largest_density(cell):
            continue  # the same measurement as at that density
        is_simulated = wire in (None, "fp32") and (cell.gbit, cell.shape) in SIMULATED
        virtual = on_simulated_ranks(cell, subject, wire, cores) if is_simulated else None
        seconds = measured()[cell, subject, wire]
        yield Comparison(cell, subject, wire, seconds, closed_form(cell, subject, wire), virtual)


def largest_density(cell: Cell) -> float:
    """Return the largest density that was measured in a cell that is otherwise the same."""
    return max(row.density for row, _, _ in measured() if replace(row, density=cell.density) == cell)


# ------------------------------------------------------------- picks of the tuner


@dataclass(frozen=True)
class Pick:
    """The pick of the tuner in a cell and the fastest there, with the seconds of both."""

    cell: Cell
    picked: str
    best: str
    picked_seconds: float | None
    best_seconds: float

    @property
    def ratio(self) -> float:
        """Return how many times as long the pick takes as the best; infinite where it was not measured."""
        return self.picked_seconds / self.best_seconds if self.picked_seconds else float("inf")


# The reducers that there were when the records were made.
OF_THE_RECORDS = (
    *("dense", "torus2d", "allgather", "gtopk", "ssar_doubling", "ssar_split", "dsar_split", "oktopk"),
    *("hitopk", "hioktopk"),
)


def _is_recorded(candidate: tuner.Candidate) -> bool:
    return candidate.reducer in OF_THE_RECORDS and candidate.options == "{}"


def picks() -> list[Pick]:
    """Return the picks for all cells in which a run measured both codecs: the last such run."""
    last = {cell: run for cell, run in runs() if len({wire for _, wire in run if wire}) > 1}
    result = []
    for cell, run in sorted(last.items(), key=lambda each: each[0]):
        choice = tuner.choose(cell.profile, cell.nodes, cell.size, cell.density, among=_is_recorded)
        picked = (choice.reducer, choice.options.get("wire"))
        best = min(run, key=lambda each: run[each])
        result.append(Pick(cell, _named(*picked), _named(*best), run.get(picked), run[best]))
    return result


def _named(subject: str, wire: str | None) -> str:
    return subject if wire in (None, "fp32") else f"{subject} {wire}"


# ------------------------------------------------------------- tables and pictures


def error(predicted: float, seconds: float) -> float:
    """Return the relative error of a prediction."""
    return abs(predicted / seconds - 1)


def by_cluster(given: Sequence[Comparison]) -> str:
    """Return the table of median errors by rate and nodes."""
    groups = groupby(given, key=lambda each: (each.cell.gbit, each.cell.shape))
    rows = [(f"{rate:g} Gbit/s", shape, *_errors(list(group))) for (rate, shape), group in groups]
    rows.append(("all", "", *_errors(given)))
    return markdown(("rate", "nodes × ranks", "cases", "closed form", "simulated"), rows)


def by_reducer(given: Sequence[Comparison]) -> str:
    """Return the table of median errors, and of median ratios, by reducer."""
    rows = []
    for subject in OF_THE_RECORDS:
        own = [each for each in given if each.subject == subject]
        ratios = [median(each.closed_form / each.measured for each in own)]
        ratios.append(median(each.simulated / each.measured for each in own if each.simulated))
        rows.append((f"`{subject}`", *_errors(own), *(f"{ratio:.2f}" for ratio in ratios)))
    header = ("reducer", "cases", "closed form", "simulated", "closed form/measured", "simulated/measured")
    return markdown(header, rows)


def _errors(given: Sequence[Comparison]) -> tuple[str, str, str]:
    closed = median(error(each.closed_form, each.measured) for each in given)
    virtual = [error(each.simulated, each.measured) for each in given if each.simulated]
    return str(len(given)), f"{100 * closed:.0f} %", f"{100 * median(virtual):.0f} %" if virtual else NOTHING


def of_picks(given: Sequence[Pick]) -> str:
    """Return the table of the picks."""
    rows = []
    for pick in given:
        cell, seconds = pick.cell, pick.picked_seconds
        row = (
            *(f"{cell.gbit:g}", cell.shape, f"{cell.size / 1e6:.3g} M", f"{100 * cell.density:g} %"),
            *(f"`{pick.picked}`", f"{1e3 * seconds:.0f}" if seconds else "not measured"),
            *(f"`{pick.best}`", f"{1e3 * pick.best_seconds:.0f}", f"{pick.ratio:.2f}"),
        )
        rows.append(row)
    head = ["Gbit/s", "nodes × ranks", "entries", "density", "picked", "ms"]
    return markdown([*head, "fastest measured", "ms", "ratio"], rows)


def draw(given: Sequence[Comparison], path: Path) -> None:
    """Draw predicted over measured seconds, a mark a case."""
    with docs_picture(path, 9.5, 4.6) as figure:
        for axes, kind in zip(figure.subplots(1, 2, sharey=True), ("closed_form", "simulated"), strict=True):
            for subject, color in zip(OF_THE_RECORDS, COLORS, strict=True):
                own = [each for each in given if each.subject == subject and getattr(each, kind)]
                places = [(1e3 * each.measured, 1e3 * getattr(each, kind)) for each in own]
                axes.plot(*zip(*places, strict=True), "o", color=color, ms=3.5, label=subject, alpha=0.8)
            ends = [4, 5000]
            axes.plot(ends, ends, color="black", linewidth=0.8)
            low, high = ([share * end for end in ends] for share in (0.75, 1.25))
            axes.fill_between(ends, low, high, color="#eeeeee", zorder=0)
            axes.set(xscale="log", yscale="log", xlabel="ms measured", title=kind.replace("_", " "))
        figure.axes[0].set_ylabel("ms predicted; grey: within 25 %")
        figure.axes[0].legend(frameon=False, fontsize=7.5)


def load() -> list[Comparison]:
    """Return what ``--predict`` stored."""
    (path,) = newest("validation.json")
    rows = json.loads(path.read_text())["comparisons"]
    for row in rows:
        row["cell"] = Cell(**row["cell"] | {"ranks_of_nodes": tuple(row["cell"]["ranks_of_nodes"])})
    return [Comparison(**row) for row in rows]


def blocks() -> dict[str, str]:
    """Return the text between each pair of marks of the page, by the name of the marks."""
    given, chosen = load(), picks()
    good = sum(pick.ratio <= WITHIN for pick in chosen)
    share = f"{good} of {len(chosen)} picks ({100 * good / len(chosen):.0f} %)"
    return {
        "errors by cluster": by_cluster(given),
        "errors by reducer": by_reducer(given),
        "verdict": f"{share} take at most {WITHIN} times as long as the fastest.\n",
        "picks": of_picks(chosen),
    }


def main() -> None:
    """Predict, or write tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--predict", action="store_true", help="predict again, into benchmarks/results")
    if parser.parse_args().predict:
        source = cluster_records()[0]
        cores = json.loads(source.read_text().splitlines()[0])["machine"]["cores"]
        rows = [asdict(each) for each in predict(cores)]
        content = {"command": command(), "machine": machine(), "comparisons": rows}
        path = RESULTS / f"{source.name[:10]}-validation.json"
        path.write_text(json.dumps(content, indent=1) + "\n")
    rewrite(PAGE, blocks())
    draw(load(), PICTURES / "predicted.svg")


if __name__ == "__main__":
    main()
