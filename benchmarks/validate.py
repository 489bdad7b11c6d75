"""Compare the cost model, the virtual clock and what ``auto`` picks with measurements: docs/validation.md.

    python -m benchmarks.validate --measure     # as root, 75 minutes alone: a visit to each emulated cluster
    python -m benchmarks.validate --simulate    # a part of it on simulated ranks: some minutes
    python -m benchmarks.validate               # the tables and the picture, from the last of both

A machine's speed changes: clusters may be visited again, and medians of all visits count. A visit first
measures links and kernels, and tries a few candidates in each case, as ``tune`` does. Then all
reducers and codecs that ``auto`` picks from take steps in turns, which predictions are held to, and at last
the fastest of them and what was picked take as many as in a trial, which picks are held to.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import accumulate, groupby, pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.convergence import recorded, write_records
from benchmarks.drawing.pages import CHANGED, layout_in_words, markdown, percent, rate_in_words, rewrite
from benchmarks.drawing.style import PALETTE, docs_picture
from benchmarks.jobs import DEFAULT, Layout, cluster_until_end, environment, module
from commlib import REDUCERS, Communicator, Network, Topology, make_reducer
from commlib.transport import simulated
from commlib.tuning import probe, tuner
from commlib.tuning.probe import Candidate, Gradients, Profile, processor
from commlib.tuning.tuner import Case
from training.bench.record import code_of, command, machine
from training.process.job import as_rank

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, PICTURES = DOCS / "validation.md", DOCS / "validation"
RECORDS = PICTURES / "cells.jsonl"  # what ``--measure`` appends
VIRTUAL = PICTURES / "simulated.jsonl"  # what ``--simulate`` writes
COLORS = (*PALETTE, "#999999", "#8c564b", "#bcbd22", "#17becf", "#e377c2", "#9467bd", "#aec7e8")

SMALL, VGG16 = 1_000_000, 14_728_266
FEW, ALL = ((SMALL, 0.01),), ((SMALL, 0.01), (SMALL, 0.001), (VGG16, 0.01))  # entries and densities
LAYOUTS = ("4x1", "4x2", "8x1")
CELLS = [
    *product(LAYOUTS, ("1gbit", "200mbit", "10gbit", "500mbit", "5gbit"), (0.0,), (ALL,)),
    *product(LAYOUTS, ("50mbit", "200mbit"), (20.0,), (FEW,)),
]
KIND = "validation"  # of the records
LEAST, MOST = 0.15, 1.5  # seconds of a candidate's steps, twice in a visit
FASTEST, LONGER = 6, tuner.LAST_SECONDS  # of the candidates, and the seconds of their steps at the end
AT_ONCE = 80_000_000  # entries of the candidates that take turns: all of them do not fit into memory
WITHIN = 1.1  # the most that a pick may take, relative to the fastest


def on_this_rank(comm: Communicator, cases: Sequence[tuple[int, float]]) -> None:
    """Measure links and kernels, then all candidates of each case; rank 0 prints what was found."""
    topology = Topology(comm)
    profile = probe.measure(topology)
    found = []
    for size, density in cases:
        case = Case(topology.nodes, size, density)
        tried = tuner.try_out(topology, profile, size, [density])
        generated = Gradients(size)
        gradients = [generated.of(comm.rank, step) for step in range(tuner.GRADIENTS)]
        del generated
        known = tuner.candidates(case.nodes)
        groups = -(-len(known) // max(2, AT_ONCE // size))
        ends = [len(known) * place // groups for place in range(groups + 1)]
        parts = [known[low:high] for low, high in pairwise(ends)]
        taken: dict[Candidate, list[float]] = {each: [] for each in known}
        for part in [*parts, *(known[place::groups] for place in range(groups))]:  # twice, in other groups
            own = tuner.seconds_in_turns(topology, case, part, gradients, least=LEAST, most=MOST)
            for each, steps in zip(part, own, strict=True):
                taken[each] += steps
        first = Visit(case, tried, {each: median(steps) for each, steps in taken.items()})
        fastest = sorted(first.pickable, key=lambda each: first.steps[each])[:FASTEST]
        last = list(dict.fromkeys([*fastest, first.picked, first.predicted]))
        longer = tuner.seconds_in_turns(topology, case, last, gradients, least=LONGER, most=MOST)
        rows = {"steps": _rows(taken), "longer": _rows(dict(zip(last, longer, strict=True)))}
        trials = [asdict(each) for each in tried.trials]
        found.append({"size": size, "density": density, "trials": trials, **rows})
    if comm.rank == 0:
        print(json.dumps({"profile": asdict(profile), "cases": found}), flush=True)


def _rows(taken: dict[Candidate, list[float]]) -> list[list[Any]]:
    return [
        [each.reducer, each.wire, each.options, median(own), tuner.spread(own), len(own)]
        for each, own in taken.items()
    ]


def measure() -> None:
    """Visit the clusters that have had the fewest visits; the records of other code or processors go."""
    here = code_of(KIND), processor()
    kept = [each for each in recorded(RECORDS) if (each["code"], each["machine"]["cpu"]) == here]
    write_records(RECORDS, kept)
    visits = Counter(tuple(each["cell"].values()) for each in kept)
    fewest = min(visits[each[:3]] for each in CELLS)
    with cluster_until_end() as cluster:
        for layout, rate, delay, cases in CELLS:
            if visits[layout, rate, delay] > fewest:
                continue
            shape = Layout.of(layout)
            cluster.up(shape.nodes, rate, delay)
            words = module("benchmarks.validate", "--on-ranks", json.dumps(cases))
            (found,) = cluster.objects(
                shape, words, environment(DEFAULT), 1200.0, f"{layout} {rate} {delay:g} ms"
            )
            cell = {"layout": layout, "rate": rate, "delay_ms": delay}
            told = {"code": here[0], "machine": machine(), "command": command()}
            line = {"bench": KIND, "cell": cell, **found, **told}
            with RECORDS.open("a") as file:
                file.write(json.dumps(line) + "\n")


SIMULATED = [{"layout": "4x2", "rate": rate, "delay_ms": 0.0} for rate in ("1gbit", "10gbit")]


def on_simulated_ranks(case: Case, network: Network, cores: int) -> dict[Candidate, float]:
    """Return the seconds of a step on the virtual clock, on ranks that share ``cores``."""
    gradients = Gradients(case.size)
    lengths = [len(node) for node in case.nodes]

    def body(comm: Communicator) -> dict[Candidate, float]:
        topology, found = Topology(comm), {}
        for candidate in tuner.candidates(topology.nodes):
            options = tuner.settings(case, candidate)
            with make_reducer(candidate.reducer, topology, case.size, **options) as reducer:
                drawn = (gradients.of(comm.rank, step) for step in range(3))
                _, *taken = [tuner.step_seconds(comm, reducer, each) for each in drawn]
            found[candidate] = min(taken)
        return found

    return simulated.run(body, sum(lengths), lengths, network, cores=cores)[0]


def simulate() -> None:
    """Simulate the cells of ``SIMULATED``, but for the large gradients."""
    with VIRTUAL.open("w") as file:
        for group in groups():
            if group.cell in SIMULATED and group.case.size == SMALL:
                found = on_simulated_ranks(group.case, group.visits[0].profile.network, group.cores)
                file.write(json.dumps([group.name, [[*astuple(each), found[each]] for each in found]]) + "\n")


@dataclass(frozen=True)
class Visit:
    """What was measured of a case: the profile with ``auto``'s trials, and the seconds of a step.

    ``steps``: of all candidates, in few steps. ``longer``: of some of them in as many as in a trial.
    """

    case: Case
    profile: Profile
    steps: dict[Candidate, float]
    longer: dict[Candidate, float] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[Candidate, float]:
        """Return the seconds of a step, in many steps if so many were taken."""
        return self.steps | self.longer

    @cached_property
    def expected(self) -> dict[Candidate, float]:
        """Return the seconds by today's closed forms, before any trial."""
        own = partial(tuner.predicted, self.profile, self.case, settled=False)
        return {each: own(each) for each in self.steps}

    @property
    def pickable(self) -> list[Candidate]:
        """Return those that ``auto`` may pick."""
        return list(filter(tuner.is_pickable, self.steps))

    @property
    def predicted(self) -> Candidate:
        """Return the fastest one by the closed forms."""
        return min(self.pickable, key=lambda each: self.expected[each])

    @cached_property
    def picked(self) -> Candidate:
        """Return the pick of ``auto``, after its trials."""
        case = self.case
        made = tuner.choose(self.profile, case.nodes, case.size, case.density)
        return next(each for each in self.steps if (each.reducer, each.given) == (made.reducer, made.options))

    @property
    def fastest(self) -> Candidate:
        return min(self.longer or self.pickable, key=lambda each: self.seconds[each])

    @property
    def dense_seconds(self) -> float:
        """Return the seconds of the fastest one that sends all entries."""
        return min(value for each, value in self.seconds.items() if not REDUCERS[each.reducer].sparse)

    def ratio(self, candidate: Candidate) -> float:
        """Return how many times as long a candidate takes as the fastest."""
        return self.seconds[candidate] / self.seconds[self.fastest]


@dataclass(frozen=True)
class Group:
    """A case on a cluster, and the visits to it."""

    cell: dict[str, Any]
    case: Case
    cores: int
    visits: list[Visit]

    @property
    def name(self) -> list[Any]:
        """Return what tells it from others: layout, rate, latency, entries and density."""
        return [*self.cell.values(), self.case.size, self.case.density]

    @cached_property
    def expected(self) -> dict[Candidate, float]:
        """Return the seconds by today's closed forms, before any trial."""
        return _medians([each.expected for each in self.visits])

    @cached_property
    def steps(self) -> dict[Candidate, float]:
        """Return the seconds of a step."""
        return _medians([each.steps for each in self.visits])


@cache
def groups() -> list[Group]:
    found: dict[str, Group] = {}
    for record in recorded(RECORDS):
        ends = list(accumulate(record["profile"]["job"]["ranks_of_nodes"], initial=0))
        nodes = [range(low, high) for low, high in pairwise(ends)]
        for case in record["cases"]:
            own = Case(nodes, case["size"], case["density"])
            group = Group(record["cell"], own, record["machine"]["cores"], [])
            group = found.setdefault(str(group.name), group)
            tried = {"format": probe.FORMAT, **record["profile"], "trials": case["trials"]}
            steps = map(_seconds_of, (case["steps"], case.get("longer", [])))
            group.visits.append(Visit(own, Profile.of(tried), *steps))
    return list(found.values())


def _seconds_of(rows: Iterable[Sequence[Any]]) -> dict[Candidate, float]:
    return {Candidate(*row[:3]): row[3] for row in rows}


def _medians(visits: Sequence[dict[Candidate, float]]) -> dict[Candidate, float]:
    return {each: median(visit[each] for visit in visits) for each in visits[0]}


@cache
def virtual() -> list[tuple[Group, dict[Candidate, float]]]:
    """Return the groups that were simulated, and the seconds of each candidate there."""
    by_name = {tuple(each.name): each for each in groups()}
    return [
        (by_name[tuple(name)], {Candidate(*row[:3]): row[3] for row in own})
        for name, own in recorded(VIRTUAL)
    ]


def errors(given: Iterable[Group], reducer: str | None = None) -> list[float]:
    """Return expected over measured seconds of all candidates, or of those of a reducer."""
    return [
        group.expected[each] / group.steps[each]
        for group in given
        for each in group.steps
        if reducer in (None, each.reducer)
    ]


def reducers() -> list[str]:
    """Return the reducers that were measured anywhere, in their order."""
    measured = {candidate.reducer for each in groups() for candidate in each.steps}
    return [name for name in REDUCERS if name in measured]


def by_cluster() -> str:
    rows = []
    for (layout, rate, delay), of_cell in groupby(groups(), key=lambda each: tuple(each.cell.values())):
        rows += [[layout_in_words(layout), rate_in_words(rate), f"{delay:g} ms", *summary(errors(of_cell))]]
    return markdown(["nodes × ranks", "rate", "latency", *SUMMARY], rows)


SUMMARY = ("medians", "off by, median", "within 25 %", "predicted/measured")


def summary(ratios: Sequence[float]) -> list[str]:
    off = [abs(each - 1) for each in ratios]
    within = sum(each <= 0.25 for each in off) / len(off)
    return [f"{len(ratios)}", percent(median(off)), percent(within), f"{median(ratios):.2f}"]


def by_reducer() -> str:
    """Return the table of errors by reducer, also of those on simulated ranks."""
    rows = []
    for reducer in reducers():
        on_virtual_clock = [
            value / group.steps[candidate]
            for group, found in virtual()
            for candidate, value in found.items()
            if candidate.reducer == reducer
        ]
        _, half, _, ratio = summary(on_virtual_clock)
        rows.append([f"`{reducer}`", *summary(errors(groups(), reducer)), half, ratio])
    return markdown(["reducer", *SUMMARY, "simulated, off by", "simulated/measured"], rows)


def of_picks() -> str:
    visits = [visit for each in groups() for visit in each.visits]
    ratios = {
        "The closed forms alone": [each.ratio(each.predicted) for each in visits],
        "`auto`": [each.ratio(each.picked) for each in visits],
    }
    good = {who: sum(ratio <= WITHIN for ratio in own) for who, own in ratios.items()}
    return "".join(
        f"- {who}: at most {WITHIN} times as long as the fastest in {count} of {len(ratios[who])} cases "
        f"({percent(count / len(ratios[who]))}).\n"
        for who, count in good.items()
    )


def picks() -> str:
    """Return the table of picks, in that visit to each cluster in which ``auto``'s was the slowest."""
    rows = []
    for group in groups():
        layout, rate, delay, size, density = group.name
        each = max(group.visits, key=lambda visit: visit.ratio(visit.picked))
        row = [layout_in_words(layout), rate_in_words(rate), f"{delay:g} ms", f"{size / 1e6:.3g} M"]
        row += [f"{100 * density:g} %", f"{1e3 * each.dense_seconds:.0f}"]
        for candidate in (each.predicted, each.picked):
            row += [f"`{candidate}`", f"{1e3 * each.seconds[candidate]:.0f}", f"{each.ratio(candidate):.2f}"]
        rows.append([*row, f"`{each.fastest}`", f"{1e3 * each.seconds[each.fastest]:.0f}"])
    head = ["nodes × ranks", "rate", "latency", "entries", "density", "dense, ms"]
    return markdown([*head, "predicted", "ms", "×", "`auto`", "ms", "×", "fastest", "ms"], rows)


def of_wires() -> str:
    """Return the table of how often short messages are worth their processor time, by the links."""
    ratios: dict[tuple[str, float], list[float]] = {}
    for each in groups():
        found = ratios.setdefault((each.cell["rate"], each.cell["delay_ms"]), [])
        shorter = {one: replace(one, wire="gap+fp16") for one in each.steps if one.wire == "fp32"}
        found += [each.steps[one] / each.steps[short] for one, short in shorter.items()]
    rows = []
    for (rate, delay), own in ratios.items():
        faster = sum(ratio > 1.03 for ratio in own), sum(ratio < 0.97 for ratio in own)
        rows.append([rate_in_words(rate), f"{delay:g} ms", str(len(own)), *map(str, faster)])
    return markdown(["rate", "latency", "pairs", "`gap+fp16` is faster", "`fp32` is faster"], rows)


def draw(path: Path) -> None:
    closed = [(each, each.expected) for each in groups()]
    with docs_picture(path, 9.5, 4.6) as figure:
        titles = ("closed form", "simulated")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, title, found in zip(panels, titles, (closed, virtual()), strict=True):
            for name, color in zip(reducers(), COLORS, strict=True):
                places = [
                    (1e3 * group.steps[each], 1e3 * seconds[each])
                    for group, seconds in found
                    for each in group.steps
                    if each.reducer == name
                ]
                axes.plot(*zip(*places, strict=True), "o", color=color, ms=2.5, label=name, alpha=0.8)
            ends = [4, 5000]
            axes.plot(ends, ends, color="black", linewidth=0.8)
            low, high = ([share * end for end in ends] for share in (0.75, 1.25))
            axes.fill_between(ends, low, high, color="#eeeeee", zorder=0)
            axes.set(xscale="log", yscale="log", xlabel="ms measured", title=title)
        panels[0].set_ylabel("ms predicted; grey: within 25 %")
        panels[0].legend(fontsize=6.5)


def blocks() -> dict[str, str]:
    count, half, most, _ = summary(errors(groups()))
    older = CHANGED * any(each["code"] != code_of(KIND) for each in recorded(RECORDS))
    return {
        "errors": f"Of {int(count):,} predictions half are off by at most {half}, "
        f"and {most} by at most 25 %.{older}\n",
        "errors by cluster": by_cluster(),
        "errors by reducer": by_reducer(),
        "verdict": of_picks(),
        "picks": picks(),
        "wires": of_wires(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    for name in ("measure", "simulate"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--on-ranks", type=json.loads)
    given = parser.parse_args()
    if given.on_ranks:
        with as_rank() as comm:
            on_this_rank(comm, given.on_ranks)
    elif given.measure:
        measure()
    elif given.simulate:
        simulate()
    else:
        rewrite(PAGE, blocks())
        draw(PICTURES / "predicted.svg")


if __name__ == "__main__":
    main()
