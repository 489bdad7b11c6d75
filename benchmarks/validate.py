"""Compare the cost model, the virtual clock and what ``auto`` picks with measurements: docs/validation.md.

    python -m benchmarks.validate --measure     # as root, 105 minutes alone: a visit to each emulated cluster
    python -m benchmarks.validate --simulate    # a part of it on simulated ranks: some minutes
    python -m benchmarks.validate               # the tables and the picture, from the last of both

A machine's speed changes: clusters may be visited again, and medians of all visits on one kind of processor
count. In each case a visit measures links and kernels and tries a few candidates, as ``tune`` does. Then all
reducers and codecs that ``auto`` picks from take steps in turns, which predictions are held to, the mean of
those from before and from a second profile after these steps. At last the fastest candidates and what was
picked take as many steps as in a trial, which picks are held to.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple
from itertools import pairwise, product
from statistics import median
from typing import Any

from benchmarks.convergence import recorded, write_records
from benchmarks.drawing.pages import rewrite
from benchmarks.drawing.validation import KIND, PAGE, PICTURES, RECORDS, VIRTUAL, Visit, blocks, draw, groups
from benchmarks.jobs import DEFAULT, Layout, cluster_until_end, environment, module
from commlib import Communicator, Network, Topology, make_reducer
from commlib.transport import simulated
from commlib.tuning import probe, tuner
from commlib.tuning.probe import Candidate, Gradients, processor
from commlib.tuning.tuner import Case
from training.bench.record import code_of, command, machine
from training.process.job import as_rank, usage_error

SMALL, VGG16 = 1_000_000, 14_728_266
FEW, ALL = ((SMALL, 0.01),), ((SMALL, 0.01), (SMALL, 0.001), (VGG16, 0.01))  # entries and densities
LAYOUTS = ("4x1", "4x2", "8x1")
CELLS = [
    *product(LAYOUTS, ("1gbit", "200mbit", "10gbit", "500mbit", "5gbit"), (0.0,), (ALL,)),
    *product(LAYOUTS, ("50mbit", "200mbit"), (20.0,), (FEW,)),
]
LEAST, MOST = 0.15, 1.5  # seconds of a candidate's steps, twice in a visit
FASTEST, LONGER = 6, tuner.LAST_SECONDS  # of the candidates, and the seconds of their steps at the end
AT_ONCE = 80_000_000  # entries of the candidates that take turns: all of them do not fit into memory


def on_this_rank(comm: Communicator, cases: Sequence[tuple[int, float]]) -> None:
    """Measure links, kernels and all candidates in each case; rank 0 prints what was found."""
    topology = Topology(comm)
    found = []
    for size, density in cases:
        case = Case(topology.nodes, size, density)
        profile = probe.measure(topology)
        tried = tuner.try_out(topology, profile, size, [density])
        generated = Gradients(size)
        gradients = [generated.of(comm.rank, step) for step in range(tuner.GRADIENTS)]
        del generated
        known = tuner.candidates(case.nodes)
        shares = -(-len(known) // max(2, AT_ONCE // size))
        ends = [len(known) * place // shares for place in range(shares + 1)]
        parts = [known[low:high] for low, high in pairwise(ends)]
        taken: dict[Candidate, list[float]] = {each: [] for each in known}
        for part in [*parts, *(known[place::shares] for place in range(shares))]:  # twice, in other shares
            own = tuner.seconds_in_turns(topology, case, part, gradients, least=LEAST, most=MOST)
            for each, steps in zip(part, own, strict=True):
                taken[each] += steps
        after = probe.measure(topology)
        first = Visit(case, tried, {each: median(steps) for each, steps in taken.items()})
        fastest = sorted(first.pickable, key=lambda each: first.steps[each])[:FASTEST]
        last = list(dict.fromkeys([*fastest, first.picked, first.predicted]))
        longer = tuner.seconds_in_turns(topology, case, last, gradients, least=LONGER, most=MOST)
        rows = {"steps": _rows(taken), "longer": _rows(dict(zip(last, longer, strict=True)))}
        profiles = {"profile": asdict(tried), "after": asdict(after)}
        found.append({"size": size, "density": density, **profiles, **rows})
    if comm.rank == 0:
        print(json.dumps({"cases": found}), flush=True)


def _rows(taken: dict[Candidate, list[float]]) -> list[list[Any]]:
    return [
        [each.reducer, each.wire, each.options, median(own), tuner.spread(own), len(own)]
        for each, own in taken.items()
    ]


def measure() -> None:
    """Visit the clusters that have had the fewest visits on this processor; records of other code go."""
    code = code_of(KIND)
    kept = [each for each in recorded(RECORDS) if each["code"] == code]
    write_records(RECORDS, kept)
    here = [each["cell"] for each in kept if each["machine"]["cpu"] == processor()]
    visits = Counter(tuple(cell.values()) for cell in here)
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
            told = {"code": code, "machine": machine(), "command": command()}
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
    """Simulate the cells of ``SIMULATED`` that were visited here, but for the large gradients."""
    visited = groups(processor())
    if not visited:
        usage_error(f"--simulate: expected a visit on {processor()}: --measure makes one")
    with VIRTUAL.open("w") as file:
        for group in visited:
            if group.cell in SIMULATED and group.case.size == SMALL:
                found = on_simulated_ranks(group.case, group.visits[0].profile.network, group.cores)
                file.write(json.dumps([group.name, [[*astuple(each), found[each]] for each in found]]) + "\n")


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
