"""Which reducer is the fastest where, and how sure that is: docs/which.md.

    python -m benchmarks.which --predict    # the map, and a part of it on simulated ranks; ten minutes
    python -m benchmarks.which              # the page and its picture, from the last map

Predicted in closed form, as ``auto`` does without trials: once with the reducers' computing as measured on a
core for each rank, once with none, as if a GPU did it. What was measured is in docs/validation.md.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from matplotlib.patches import Patch, Rectangle

from benchmarks.drawing.pages import markdown, percent, rewrite
from benchmarks.drawing.style import docs_picture
from benchmarks.validate import on_simulated_ranks
from commlib import REDUCERS, Link, Network, Topology, transport
from commlib.tuning import probe, tuner
from commlib.tuning.probe import Candidate, Profile
from commlib.tuning.tuner import Case
from training.bench.record import command, machine
from training.plan.site import NO_SPEEDS, nodes_of

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURES = ROOT / "docs" / "which.md", ROOT / "docs" / "which"
MAP = PICTURES / "map.jsonl"  # what ``--predict`` writes: machine and speeds, cells, cells on simulated ranks

FLAT, NESTED = ((4, 1), (8, 1), (32, 1)), ((4, 8), (16, 8), (128, 8))  # nodes, ranks on each
INSIDE_GBIT = (25, 100, 400)
DELAYS = (1e-5, 1e-4, 1e-3, 1e-2, 5e-2)  # seconds
GBITS = (0.01, 0.1, 1, 10, 100)
DENSITIES = (1e-4, 1e-3, 1e-2, 1e-1)
SIZES = (1_000_000, 25_000_000, 340_000_000)
DRAWN, DRAWN_SIZE, DRAWN_INSIDE = ((4, 1), (32, 1), (16, 8), (128, 8)), SIZES[1], INSIDE_GBIT[1]
COLORS = (
    *("#9ecae1", "#fdae6b", "#a1d99b", "#bcbddc", "#fc9272", "#d9d9d9", "#fde0a0", "#c7e9b4", "#e7cb94"),
    *("#f7b6d2", "#80cdc1", "#dfc27d", "#c2a5cf", "#e6f598"),
)
OTHER = "#ffffff"
SURE = 1.25  # most of the predictions of docs/validation.md are off by less


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
        return Case(nodes_of(self.nodes * self.ranks, self.ranks), self.size, self.density)

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
    """Return the reducer, and whether nodes add up first, without its codec: ``spardl, hierarchical``."""
    return candidate.reducer + ", hierarchical" * ("hierarchical" in json.loads(candidate.options))


def by_reducer(seconds: dict[Candidate, float]) -> dict[str, float]:
    """Return the seconds of each reducer with its fastest codec."""
    found: dict[str, float] = {}
    for candidate, value in seconds.items():
        found[named(candidate)] = min(value, found.get(named(candidate), value))
    return found


def places() -> Iterator[Place]:
    flat = [(*shape, DRAWN_INSIDE) for shape in FLAT]  # which have no links inside
    nested = [(*shape, inside) for shape in NESTED for inside in INSIDE_GBIT]
    for shape, *cell in product(flat + nested, DELAYS, GBITS, DENSITIES, SIZES):
        yield Place(*shape, *cell)


def predicted(profile: Profile, place: Place, *, computing: bool) -> Answer:
    """Return what closed forms say of a cell, with the profile's speeds of computing or without any."""
    speeds = profile.speeds if computing else NO_SPEEDS
    here = replace(profile, network=place.network, speeds=speeds, trials=())
    return Answer.of(by_reducer(tuner.expect(here, place.case)))


def simulated(place: Place) -> Answer:
    """Return what the virtual clock says of a cell, computing as it is measured, a core for each rank."""
    cores = place.nodes * place.ranks
    return Answer.of(by_reducer(on_simulated_ranks(place.case, place.network, cores)))


SIMULATED = [
    Place(*shape, 100, delay, gbit, density, SIZES[0])
    for shape in ((4, 1), (8, 1), (4, 8))
    for delay, gbit in ((1e-4, 1), (1e-4, 10), (1e-2, 0.1))
    for density in (1e-3, 1e-2)
]


def predict() -> None:
    """Write the map; speeds of computing are those of one rank alone on this machine, in processor time."""
    (profile,) = transport.simulated.run(lambda comm: probe.measure(Topology(comm)), world_size=1, cores=1)
    lines: list[Any] = [{"command": command(), "machine": machine(), "speeds": asdict(profile.speeds)}]
    for cells, other in ((places(), partial(predicted, profile, computing=False)), (SIMULATED, simulated)):
        for place in cells:
            on_cores = predicted(profile, place, computing=True)
            lines.append((*astuple(place), *compact(on_cores), *compact(other(place))))
    PICTURES.mkdir(exist_ok=True)
    with MAP.open("w") as file:
        for line in lines:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def compact(answer: Answer) -> tuple[str, float, float]:
    """Return an answer with two decimals, as the file of the map has it."""
    return answer.winner, round(answer.over_dense, 2), round(answer.over_next, 2)


class Cell(NamedTuple):
    """A cell and two answers: computing on a core for each rank, and computing that takes no time.

    In place of the second the cells of ``SIMULATED`` have what simulated ranks say.
    """

    place: Place
    on_cores: Answer
    other: Answer


def head() -> dict[str, Any]:
    """Return the first line of the map: command, machine and speeds."""
    return json.loads(MAP.read_text().split("\n", 1)[0])


def cells() -> tuple[list[Cell], list[Cell]]:
    """Return the cells of the map, and those that were simulated, too."""
    _, *rows = map(json.loads, MAP.read_text().splitlines())
    found = [Cell(Place(*row[:7]), Answer(*row[7:10]), Answer(*row[10:])) for row in rows]
    return found[: -len(SIMULATED)], found[-len(SIMULATED) :]


def rounded(value: float, digits: int = 3) -> str:
    """Return so many digits, and those before the point where there are more: 2.35, 2,346."""
    return f"{value:.{digits}g}" if value < 10**digits else f"{value:,.0f}"


def without_sparse(given: Sequence[Cell]) -> str:
    """Return the first sentence of the page, and a table: where dense reducers are the fastest."""

    def dense(own: Sequence[Cell]) -> list[str]:
        answers = [each.on_cores for each in own], [each.other for each in own]
        return [percent(sum(not is_sparse(each.winner) for each in both) / len(own)) for both in answers]

    cores, free = dense(given)
    fast = sum(not is_sparse(each.on_cores.winner) for each in given if each.place.gbit == GBITS[-1])
    of_these = percent(fast / sum(not is_sparse(each.on_cores.winner) for each in given))
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
            row += [percent(len(own) / len(given)), f"{rounded(median(own))} ×" if own else "–"]
        agreed = [each for each in given if each.on_cores.winner == each.other.winner == name]
        sure = sum(min(each.on_cores.over_next, each.other.over_next) >= SURE for each in agreed)
        rows.append([*row, percent(sure / len(given))])
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


def draw_map(given: Sequence[Cell], path: Path) -> None:
    """Draw the winners where a core computes for each rank: a panel a cluster and density."""
    key_of = attrgetter("nodes", "ranks", "density", "delay", "gbit")
    wanted = {
        key_of(each.place): each.on_cores
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
        figure.legend(handles=patches, loc="lower center", ncols=5, fontsize=7)


def blocks() -> dict[str, str]:
    found, simulated_too = cells()
    return {
        "dense": without_sparse(found),
        "winners": of_winners(found),
        "simulated": of_simulated(simulated_too),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--predict", action="store_true")
    if parser.parse_args().predict:
        predict()
    rewrite(PAGE, blocks())
    draw_map(cells()[0], PICTURES / "map.svg")


if __name__ == "__main__":
    main()
