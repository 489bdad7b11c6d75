"""Which reducer is the fastest where, and how sure that is: docs/which.md.

    python -m benchmarks.which --measure    # as root, half an hour alone: emulated clusters
    python -m benchmarks.which --predict    # the map, and a part of it on simulated ranks; ten minutes
    python -m benchmarks.which              # the page and its picture, from the last of both

Predicted in closed form, as ``auto`` does without trials: computing as measured on a core for each rank, and
not at all, as where a GPU computes. Measured: the reducers and codecs that ``auto`` picks from, in turns.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import accumulate, pairwise, product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from matplotlib.patches import Patch, Rectangle

from benchmarks.drawing.pages import rewrite
from benchmarks.drawing.style import docs_picture
from benchmarks.drawing.tables import markdown
from benchmarks.jobs import DEFAULT, Layout, cluster_until_end, environment, module, note
from commlib import REDUCERS, Communicator, Link, Network, Topology, make_reducer
from commlib.cost import Speeds
from commlib.transport import simulated
from commlib.tuning import probe, tuner
from commlib.tuning.probe import Candidate, Gradients, Profile
from commlib.tuning.tuner import Case
from training.bench.record import command, machine
from training.process.job import as_rank

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURES = ROOT / "docs" / "which.md", ROOT / "docs" / "which"
RECORDS = PICTURES / "cells.jsonl"  # what ``--measure`` appends
MAP = PICTURES / "map.jsonl"  # what ``--predict`` writes: machine and speeds, cells, cells on simulated ranks

# ---- The map ----

FLAT, NESTED = ((4, 1), (8, 1), (32, 1)), ((4, 8), (16, 8), (128, 8))  # nodes, ranks on each
INSIDE_GBIT = (25, 100, 400)
DELAYS = (1e-5, 1e-4, 1e-3, 1e-2, 5e-2)  # seconds
GBITS = (0.01, 0.1, 1, 10, 100)
DENSITIES = (1e-4, 1e-3, 1e-2, 1e-1)
SIZES = (1_000_000, 25_000_000, 340_000_000)
NO_SPEEDS = Speeds(0, 0, 0, 0, 0, 0, dict.fromkeys(probe.WIRES, 0.0))
DRAWN, DRAWN_SIZE, DRAWN_INSIDE = ((4, 1), (32, 1), (16, 8), (128, 8)), SIZES[1], INSIDE_GBIT[1]
COLORS = (
    *("#9ecae1", "#fdae6b", "#a1d99b", "#bcbddc", "#fc9272", "#d9d9d9", "#fde0a0", "#c7e9b4", "#e7cb94"),
    *("#f7b6d2", "#80cdc1", "#dfc27d", "#c2a5cf", "#e6f598"),
)
OTHER = "#ffffff"
WITHIN = 1.1  # the most that a prediction may take, relative to the fastest
SURE = 1.25  # 90 % of the predictions of docs/validation.md are off by less


@dataclass(frozen=True)
class Place:
    """A cell of the map: nodes, ranks on each, the links inside and between, density and entries."""

    nodes: int
    ranks: int
    inside_gbit: float
    delay: float
    gbit: float
    density: float
    size: int

    @property
    def case(self) -> Case:
        """Return the gradient that is reduced here."""
        ranks = [range(self.ranks * node, self.ranks * (node + 1)) for node in range(self.nodes)]
        return Case(ranks, self.size, self.density)

    @property
    def network(self) -> Network:
        """Return its links; a message inside a node begins after 10 µs."""
        inside = Link.of(microseconds=10, gbit_per_second=self.inside_gbit)
        return Network(inside, Link.of(microseconds=1e6 * self.delay, gbit_per_second=self.gbit))


@dataclass(frozen=True)
class Answer:
    """The fastest reducer of a cell, how many times as fast as the best dense one it is, and as the next."""

    winner: str
    over_dense: float
    over_next: float

    @classmethod
    def of(cls, seconds: dict[str, float]) -> "Answer":
        """Return the answer that these seconds of each reducer give."""
        first, second, *_ = sorted(seconds, key=lambda each: seconds[each])
        dense = min(value for name, value in seconds.items() if not is_sparse(name))
        return cls(first, dense / seconds[first], seconds[second] / seconds[first])


def is_sparse(name: str) -> bool:
    """Return whether the reducer of a name of :func:`named` is sparse."""
    return REDUCERS[name.split(",")[0]].sparse


def named(candidate: Candidate) -> str:
    """Return the reducer, and whether nodes add up first, without its codec.

    >>> named(Candidate("spardl", "fp32", '{"hierarchical": true}'))
    'spardl, hierarchical'
    """
    return candidate.reducer + ", hierarchical" * ("hierarchical" in json.loads(candidate.options))


def by_reducer(seconds: dict[Candidate, float]) -> dict[str, float]:
    """Return the seconds of each reducer with its fastest codec."""
    found: dict[str, float] = {}
    for candidate, value in seconds.items():
        found[named(candidate)] = min(value, found.get(named(candidate), value))
    return found


def places() -> Iterator[Place]:
    """Yield all cells of the map."""
    flat = [(*shape, DRAWN_INSIDE) for shape in FLAT]  # which have no links inside
    nested = [(*shape, inside) for shape in NESTED for inside in INSIDE_GBIT]
    for shape, *cell in product(flat + nested, DELAYS, GBITS, DENSITIES, SIZES):
        yield Place(*shape, *cell)


def predicted(profile: Profile, place: Place, *, computing: bool) -> Answer:
    """Return what closed forms say of a cell, with the profile's speeds of computing or without any."""
    speeds = profile.speeds if computing else NO_SPEEDS
    here = replace(profile, network=place.network, speeds=speeds, trials=())
    return Answer.of(by_reducer(tuner.expect(here, place.case)))


def on_simulated_ranks(place: Place) -> Answer:
    """Return what the virtual clock says of a cell, computing as it is measured, a core for each rank."""
    gradients = Gradients(place.size)

    def body(comm: Communicator) -> dict[Candidate, float]:
        topology, found = Topology(comm), {}
        for candidate in tuner.candidates(between_nodes=place.ranks > 1):
            options = tuner.settings(place.case, candidate)
            with make_reducer(candidate.reducer, topology, place.size, **options) as reducer:
                taken = []
                for step in range(3):
                    gradient = gradients.of(comm.rank, step)
                    comm.barrier()
                    start = comm.now()
                    reducer.reduce(gradient)
                    taken.append(max(comm.allgather_objects(comm.now() - start)))
            found[candidate] = min(taken[1:])
        return found

    ranks = place.nodes * place.ranks
    return Answer.of(by_reducer(simulated.run(body, ranks, place.ranks, place.network, cores=ranks)[0]))


SIMULATED = [
    Place(*shape, 100, delay, gbit, density, SIZES[0])
    for shape in ((4, 1), (8, 1), (4, 8))
    for delay, gbit in ((1e-4, 1), (1e-4, 10), (1e-2, 0.1))
    for density in (1e-3, 1e-2)
]


def predict() -> None:
    """Write the map; speeds of computing are those of one rank alone on this machine, in processor time."""
    (profile,) = simulated.run(lambda comm: probe.measure(Topology(comm)), world_size=1, cores=1)
    rows = [
        (*astuple(place), *compact(predicted(profile, place, computing=True)),
         *compact(predicted(profile, place, computing=False)))
        for place in places()
    ]  # fmt: skip
    checked = [
        (
            *astuple(place),
            *compact(predicted(profile, place, computing=True)),
            *compact(on_simulated_ranks(place)),
        )
        for place in SIMULATED
    ]
    PICTURES.mkdir(exist_ok=True)
    first = {"command": command(), "machine": machine(), "speeds": asdict(profile.speeds)}
    with MAP.open("w") as file:
        for line in (first, *rows, *checked):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def compact(answer: Answer) -> tuple[str, float, float]:
    """Return an answer with two decimals, as the file of the map has it."""
    return answer.winner, round(answer.over_dense, 2), round(answer.over_next, 2)


# ---- Cells that are measured ----

MEASURED_SIZE, MEASURED_DENSITY = 1_000_000, 0.01
MEASURED_STEPS, MEASURED_SECONDS = 15, 2.0  # of each candidate, fewer after so many seconds
CELLS = [
    *product(("4x1", "4x2", "8x1"), ("50mbit", "200mbit", "1gbit", "10gbit"), (0.0,)),
    *product(("4x1", "4x2", "8x1"), ("50mbit", "200mbit"), (20.0,)),
]


def on_this_rank(comm: Communicator) -> None:
    """Measure links and kernels, then all candidates in turns; rank 0 prints a record."""
    topology = Topology(comm)
    profile = probe.measure(topology)
    case = Case(topology.nodes, MEASURED_SIZE, MEASURED_DENSITY)
    candidates = tuner.candidates(between_nodes=max(map(len, case.nodes)) > 1)
    generated = Gradients(case.size)
    gradients = [generated.of(comm.rank, step) for step in range(tuner.GRADIENTS)]
    limits = {"steps": MEASURED_STEPS, "seconds": MEASURED_SECONDS}
    taken = tuner.seconds_in_turns(topology, case, candidates, gradients, **limits)
    rows = [
        {**asdict(each), "measured": median(own), "spread": tuner.spread(own), "runs": len(own)}
        for each, own in zip(candidates, taken, strict=True)
    ]
    if comm.rank == 0:
        print(json.dumps({"profile": asdict(profile), "candidates": rows}), flush=True)


def measure() -> None:
    """Measure the cells that are not in the records yet."""
    done = [each["case"] for each in records()]
    with cluster_until_end() as cluster:
        for layout, rate, delay in CELLS:
            case = {"layout": layout, "rate": rate, "delay_ms": delay}
            if case in done:
                continue
            shape = Layout.of(layout)
            cluster.up(shape.nodes, rate, delay)
            words = module("benchmarks.which", "--on-ranks")
            (found,) = cluster.objects(shape, words, environment(DEFAULT), 600.0, f"{layout} {rate} {delay}")
            line = {"bench": "which", "case": case, **found, "machine": machine(), "command": command()}
            with RECORDS.open("a") as file:
                file.write(json.dumps(line) + "\n")
            note(str(Verdict.of(line)))


def records() -> list[dict[str, Any]]:
    """Return the measured cells."""
    return [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []


@dataclass(frozen=True)
class Verdict:
    """A measured cell: the reducer predicted to be the fastest, and the fastest; seconds as measured.

    Predicted by today's closed forms from the profile that the record has.
    """

    case: dict[str, Any]
    picked: Candidate
    picked_seconds: float
    best: Candidate
    best_seconds: float
    dense_seconds: float

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Verdict":
        """Return the verdict on a record."""
        measured = {
            Candidate(row["reducer"], row["wire"], row["options"]): row["measured"]
            for row in record["candidates"]
        }
        profile = Profile.of({"format": probe.FORMAT, **record["profile"]})
        shape = profile.job.ranks_of_nodes
        ends = list(accumulate(shape, initial=0))
        nodes = [range(low, high) for low, high in pairwise(ends)]
        expected = tuner.expect(profile, Case(nodes, MEASURED_SIZE, MEASURED_DENSITY))
        picked, best = (min(measured, key=lambda each: by[each]) for by in (expected, measured))
        dense = min(value for each, value in measured.items() if not REDUCERS[each.reducer].sparse)
        return cls(record["case"], picked, measured[picked], best, measured[best], dense)

    @property
    def ratio(self) -> float:
        """Return how many times as long the predicted one takes as the fastest."""
        return self.picked_seconds / self.best_seconds


# ---- The page ----


class Cell(NamedTuple):
    """A cell and two answers: computing on a core for each rank, and computing that takes no time.

    In place of the second the cells of ``SIMULATED`` have what simulated ranks say.
    """

    place: Place
    on_cores: Answer
    other: Answer


def head() -> dict[str, Any]:
    """Return the first line of the map: command, machine and speeds."""
    found: dict[str, Any] = json.loads(MAP.read_text().split("\n", 1)[0])
    return found


def cells() -> tuple[list[Cell], list[Cell]]:
    """Return the cells of the map, and those that were simulated, too."""
    _, *rows = map(json.loads, MAP.read_text().splitlines())
    found = [Cell(Place(*row[:7]), Answer(*row[7:10]), Answer(*row[10:])) for row in rows]
    return found[: -len(SIMULATED)], found[-len(SIMULATED) :]


def share(part: int, whole: int) -> str:
    """Return a share in per cent.

    >>> share(1, 3)
    '33 %'
    """
    return f"{100 * part / whole:.0f} %"


def rounded(value: float, digits: int = 3) -> str:
    """Return so many digits, and those before the point where there are more.

    >>> rounded(2.345), rounded(2345.6)
    ('2.35', '2,346')
    """
    return f"{value:.{digits}g}" if value < 10**digits else f"{value:,.0f}"


def without_sparse(given: Sequence[Cell]) -> str:
    """Return the first sentence of the page, and a table: where dense reducers are the fastest."""

    def dense(own: Sequence[Cell]) -> list[str]:
        answers = [each.on_cores for each in own], [each.other for each in own]
        return [share(sum(not is_sparse(each.winner) for each in both), len(own)) for both in answers]

    cores, free = dense(given)
    fast = sum(not is_sparse(each.on_cores.winner) for each in given if each.place.gbit == GBITS[-1])
    of_these = share(fast, sum(not is_sparse(each.on_cores.winner) for each in given))
    where = f"{GBITS[-1]} Gbit/s between nodes"
    sentence = (
        f"No sparse reducer is the fastest in {cores} of the cells of this map where a core computes for "
        f"each rank ({of_these} of them with {where}), and in {free} where computing takes no time.\n"
    )
    rows = []
    for density in DENSITIES:
        places = [
            [each for each in given if (each.place.density, each.place.gbit) == (density, gbit)]
            for gbit in GBITS
        ]
        rows.append([f"{100 * density:g} %", *(", ".join(dense(own)) for own in places)])
    return f"{sentence}\n{markdown(['density', *(f'{gbit:g} Gbit/s' for gbit in GBITS)], rows)}"


def of_winners(given: Sequence[Cell]) -> str:
    """Return the table of winners: in how many cells, how far ahead of dense ones, and in how many surely."""
    answers = [[each.on_cores for each in given], [each.other for each in given]]
    found = Counter(each.winner for both in answers for each in both)
    rows = []
    for name, _ in found.most_common():
        row = [f"`{name}`"]
        for both in answers:
            own = [each.over_dense for each in both if each.winner == name]
            row += [share(len(own), len(given)), f"{rounded(median(own))} ×" if own else "–"]
        agreed = [each for each in given if each.on_cores.winner == each.other.winner == name]
        sure = sum(min(each.on_cores.over_next, each.other.over_next) >= SURE for each in agreed)
        rows.append([*row, share(sure, len(given))])
    head = ["fastest", "on cores", "over dense", "messages alone", "over dense", "sure"]
    return markdown(head, rows)


def of_simulated(given: Sequence[Cell]) -> str:
    """Return how often simulated ranks have the same winner as the closed forms."""
    others = [each for each in given if each.on_cores.winner != each.other.winner]
    close = sum(each.on_cores.over_next < SURE for each in others)
    return (
        f"In {len(given) - len(others)} of {len(given)} cells simulated ranks have the winner of the closed "
        f"form; in {close} of the other {len(others)} the closed form has the next one within a factor of "
        f"{SURE:g}.\n"
    )


def of_measured(verdicts: Sequence[Verdict]) -> str:
    """Return the table of measured cells."""
    good = sum(each.ratio <= WITHIN for each in verdicts)
    rows = []
    for each in verdicts:
        cell = each.case["layout"].replace("x", " × "), each.case["rate"], f"{each.case['delay_ms']:g} ms"
        picked = f"`{each.picked}`", f"{1e3 * each.picked_seconds:.0f}"
        best = f"`{each.best}`", f"{1e3 * each.best_seconds:.0f}"
        rows.append([*cell, f"{1e3 * each.dense_seconds:.0f}", *picked, *best, f"{each.ratio:.2f}"])
    head = ["nodes × ranks", "rate", "latency", "dense, ms", "predicted", "ms", "fastest", "ms", "ratio"]
    line = (
        f"In {good} of {len(verdicts)} the predicted one takes at most {WITHIN} times as long as the fastest."
    )
    return f"{markdown(head, rows)}\n{line}\n"


def draw_map(given: Sequence[Cell], path: Path) -> None:
    """Draw the winners where a core computes for each rank: a panel a cluster and density."""
    wanted = {
        (
            each.place.nodes,
            each.place.ranks,
            each.place.density,
            each.place.delay,
            each.place.gbit,
        ): each.on_cores
        for each in given
        if (each.place.size, each.place.inside_gbit) == (DRAWN_SIZE, DRAWN_INSIDE)
    }
    names = Counter(wanted[key].winner for key in wanted if key[:2] in DRAWN).most_common(len(COLORS))
    colors = {name: color for (name, _), color in zip(names, COLORS, strict=False)}
    with docs_picture(path, 9.5, 10.0) as figure:
        panels = figure.subplots(len(DRAWN), len(DENSITIES), sharex=True, sharey=True)
        for axes, (shape, density) in zip(panels.flat, product(DRAWN, DENSITIES), strict=True):
            for (x, delay), (y, gbit) in product(enumerate(DELAYS), enumerate(GBITS)):
                answer = wanted[(*shape, density, delay, gbit)]
                axes.add_patch(
                    Rectangle((x - 0.5, y - 0.5), 1, 1, color=colors.get(answer.winner, OTHER), lw=0)
                )
                axes.text(x, y, rounded(answer.over_dense, 2), ha="center", va="center", fontsize=6)
            axes.set(xlim=(-0.5, len(DELAYS) - 0.5), ylim=(-0.5, len(GBITS) - 0.5))
            axes.set_xticks(range(len(DELAYS)), ["10 µs", "0.1", "1", "10", "50 ms"], fontsize=7)
            axes.set_yticks(range(len(GBITS)), [f"{gbit:g}" for gbit in GBITS], fontsize=7)
            axes.set_title(f"{shape[0]} × {shape[1]}, {100 * density:g} %", fontsize=8)
        figure.supxlabel("latency between nodes\n\n\n\n", fontsize=8)  # room for the legend
        figure.supylabel("Gbit/s between nodes", fontsize=8)
        patches = [Patch(color=color, label=name) for name, color in colors.items()]
        figure.legend(handles=patches, loc="lower center", ncols=5, fontsize=7, frameon=False)


def blocks() -> dict[str, str]:
    """Return the text between each pair of marks of the page, by the name of the marks."""
    found, simulated_too = cells()
    return {
        "dense": without_sparse(found),
        "winners": of_winners(found),
        "simulated": of_simulated(simulated_too),
        "measured": of_measured(list(map(Verdict.of, records()))),
    }


def draw() -> None:
    """Write the tables and the picture of the page."""
    rewrite(PAGE, blocks())
    draw_map(cells()[0], PICTURES / "map.svg")


def main() -> None:
    """Measure, predict, or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    for name in ("measure", "predict", "on-ranks"):
        parser.add_argument(f"--{name}", action="store_true")
    given = parser.parse_args()
    if given.on_ranks:
        with as_rank() as comm:
            on_this_rank(comm)
    elif given.measure:
        measure()
    elif given.predict:
        predict()
    else:
        draw()


if __name__ == "__main__":
    main()
