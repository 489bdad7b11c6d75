"""Reducers beside MPI's and Horovod's all-reduces, on ranks of mpirun or on emulated clusters of set rates.

    mpirun -np 4 python -m benchmarks.reducers --size 1000000
    python -m benchmarks.reducers --cluster --size 14728266 --size 1000000 --rate 1gbit      # as root
    python -m benchmarks.reducers --memory      # what each reducer allocates, on simulated ranks

On a cluster a job for each of MPI's algorithms is timed first, and the best of them is what all-reduces use.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby, pairwise, product
from typing import Annotated

import typer
from typer import Option

from benchmarks.allreduce import ALLREDUCES, BUSY, FLOOR, KEEP_MEMORY, PEERS
from benchmarks.jobs import (
    ALGORITHMS,
    EmulatedCluster,
    Layout,
    cluster_until_end,
    environment,
    module,
    pass_on,
    record_of,
)
from benchmarks.memory import dense_vectors, traced
from commlib import Communicator, Topology
from commlib.errors import InvalidArgument, look_up
from commlib.transport import simulated
from commlib.tuning.probe import Gradients
from commlib.vectors import partition
from training.bench import reducers
from training.bench.record import Record, Seconds, report
from training.bench.reducers import (
    BASELINE,
    CLOCKS,
    WALL,
    Candidate,
    Measurement,
    Plan,
    has_ranks,
    label,
    percent,
    sent_and_entries,
)
from training.commands.printing import NOTHING, Table, milliseconds, times
from training.process.job import as_rank, usage_error

# Five reducers of 25.6 M entries, on eight ranks of one machine, fit in 24 GiB.
LARGEST_GROUP_ENTRIES = 5 * 25_600_000
LAYOUT = Layout(4, 2)  # of a cluster
TIMEOUT_SECONDS = 3600.0  # of a job on it
RATES = ("1gbit", "10gbit")
SIZES = (1_000_000, 14_728_266, 25_557_032)  # and VGG-16, ResNet-50
DENSITIES = (0.01, 0.001)
STEPS, PROBE_STEPS = 20, 5
STAGES = ("select", "intra", "inter", "combine")


def measure(plan: Plan, *, horovod: bool = True) -> Iterator[Record]:
    """Yield the records of all reducers, then those of the all-reduces.

    The peer of a reducer is the fastest all-reduce. Those that keep processors busy between their calls are
    measured last, on their own.
    """
    allreduces = [
        Candidate(name, kind=kind) for name, kind in ALLREDUCES.items() if horovod or name not in BUSY
    ]
    interleaved = [each for each in allreduces if each.name not in BUSY]
    floor = [each for each in allreduces if each.name == FLOOR]  # it computes no mean
    groups = [(group, *plan.interleave([*group, *interleaved], floor)) for group in groups_of(plan)]
    alone: dict[Candidate, Measurement] = {}
    for each in allreduces:
        if each.name in BUSY:
            alone |= plan.interleave([each])[1]
    for group, nodes, taken in groups:
        baselines = {each.name: (taken | alone)[each].seconds for each in allreduces}
        peer = min(PEERS.keys() & baselines, key=lambda name: baselines[name].median)
        more = {name: asdict(each) for name, each in baselines.items()}
        for candidate in group:
            record = plan.record(candidate, nodes, taken[candidate])
            yield record.beside(peer, baselines[peer], baselines=more)
    _, nodes, taken = groups[0]
    for each in allreduces:  # whose bytes and entries are unknown, and the stages but for the floor
        record = plan.record(each, nodes, (taken | alone)[each])
        stages = record.more["stages"] if each.name == FLOOR else None
        facts = {"bytes_of_all_ranks": None, "entries": None, "stages": stages}
        yield replace(record, bytes=None, more=facts)


def groups_of(plan: Plan) -> Iterator[Sequence[Candidate]]:
    """Yield the candidates in groups of about one length, each of which fits into memory."""
    candidates = list(plan.candidates())
    count = -(-len(candidates) * plan.gradients.size // LARGEST_GROUP_ENTRIES)
    for low, high in pairwise(partition(len(candidates), count)):
        yield candidates[low:high]


def with_peers(record: Record, peers: Sequence[Record]) -> Record:
    """Return a reducer's record against these peers as well, with the fastest of all as its peer."""
    if "baselines" not in record.more:
        return record
    baselines = record.more["baselines"] | {each.subject: asdict(each.seconds) for each in peers}
    names = [str(record.peer), *(each.subject for each in peers)]
    peer = min(names, key=lambda name: baselines[name]["median"])
    return record.beside(peer, Seconds(**baselines[peer]), baselines=baselines)


def table_of(records: Sequence[Record]) -> Table:
    """Return the table of one size and the same ranks: a line a reducer, the all-reduces at the end."""
    if not any("baselines" in record.more for record in records):
        return reducers.table_of(records)
    records = sorted(records, key=lambda record: "baselines" not in record.more)
    case, runs = records[0].case, records[0].seconds.runs
    header = ["reducer", "density", "ms", "min\nms", "max\nms", "peer", "× peer", "× bare"]
    header += [f"{stage}\nms" for stage in STAGES]
    header += ["sent intra\nkB", "sent inter\nkB", "selected\nentries", "applied\nentries"]
    notes = [
        f"ms: {CLOCKS[WALL]}; median of {runs} steps. Of stages: mean over ranks.",
        "peer: the fastest of MPI's and Horovod's all-reduces; × peer, × bare: how many times as fast.",
        "bare: the bytes of hitopk through MPI's own collectives. sent: payload of the busiest rank",
    ]
    nodes = case["ranks_of_nodes"]
    title = f"{case['size']:,} entries, {sum(nodes)} ranks on {len(nodes)} nodes"
    if "rate" in case:
        title += f", {case['rate']}, all-reduce of MPI: {case['mpi_algorithm']}"
    return Table(title, header, [_row(each) for each in records], notes)


def _row(record: Record) -> list[str]:
    stages, bare = record.more["stages"] or {}, record.more.get("baselines", {}).get("bare")
    return [
        *(label(record), percent(record.case["density"])),
        *(milliseconds(getattr(record.seconds, which)) for which in ("median", "min", "max")),
        *(record.peer or NOTHING, times(record.ratio)),
        times(bare["median"] / record.seconds.median if bare else None),
        *(milliseconds(stages[stage]["mean"]) if stages else NOTHING for stage in STAGES),
        *sent_and_entries(record),
    ]


def memory(plan: Plan) -> Iterator[tuple[Candidate, float]]:
    """Yield what each reducer allocates on a rank, in vectors of the gradient's size."""

    def of(candidate: Candidate, gradients: Gradients, comm: Communicator) -> float:
        make = lambda metered: candidate.make(Topology(metered, own), gradients.size, plan.density)  # noqa: E731
        return dense_vectors(comm, make, gradients)

    ranks, own = plan.ranks or reducers.RANKS, plan.ranks_per_node or reducers.RANKS_PER_NODE
    few = Gradients(2000)
    for candidate in plan.candidates():
        simulated.run(partial(of, candidate, few), ranks, own)  # compiles kernels, which takes memory, too
        with traced():
            yield candidate, simulated.run(partial(of, candidate, plan.gradients), ranks, own)[0]


@dataclass(frozen=True)
class Sweep:
    """Cases, and clusters to measure them on. ``algorithms``: of MPI's all-reduce; the best is used."""

    rates: Sequence[str]
    sizes: Sequence[int]
    densities: Sequence[float]
    steps: int
    reducers: Sequence[str]
    algorithms: Sequence[str]
    horovod: bool

    def __post_init__(self) -> None:
        for algorithm in self.algorithms:
            look_up(ALGORITHMS, "algorithm", algorithm)
        for size, density in product(self.sizes, self.densities):
            Plan(size=size, density=density, reducers=self.reducers)

    def records(self) -> Generator[Record, None, None]:
        """Yield the records; however this ends, the cluster is gone."""
        with cluster_until_end() as cluster:
            for rate in self.rates:
                cluster.up(LAYOUT.nodes, rate)
                for size in self.sizes:
                    for reported in self._of_size(cluster, size):
                        yield replace(reported, case=reported.case | {"rate": rate})

    def _of_size(self, cluster: EmulatedCluster, size: int) -> Iterator[Record]:
        """Yield the records of probing MPI's algorithms, then those with the best of them."""
        baseline = ("--reducer", BASELINE)
        horovod = () if self.horovod else ("--no-horovod",)
        probed = []
        for algorithm in self.algorithms if len(self.algorithms) > 1 else ():  # without TensorFlow
            for reported in self._run(cluster, size, algorithm, *baseline, "--no-horovod", steps=PROBE_STEPS):
                if reported.subject == BASELINE:
                    probed.append(reported)
                    yield replace(reported, bench="probe")
        # That with which MPI took the least against ``dense`` of the same job.
        fastest = min(probed, key=lambda each: each.ratio or 0.0, default=None)
        algorithm = fastest.case["mpi_algorithm"] if fastest else self.algorithms[0]
        retained = [
            replace(reported, subject=f"{reported.subject}, memory kept")
            for reported in self._run(cluster, size, algorithm, *baseline, *horovod, keeps_memory=True)
            if reported.subject in PEERS
        ]
        for number, density in enumerate(self.densities):
            candidates = Plan(reducers=self.reducers).candidates()  # dense ones with the first density only
            chosen = [f"--reducer={each.name}" for each in candidates if number == 0 or each.sparse]
            given = (*chosen, f"--density={density}", *horovod)
            for reported in self._run(cluster, size, algorithm, *given) if chosen else ():
                if number == 0 or reported.subject not in PEERS:
                    yield with_peers(reported, retained)
        yield from retained

    def _run(
        self,
        cluster: EmulatedCluster,
        size: int,
        algorithm: str,
        *arguments: str,
        steps: int | None = None,
        keeps_memory: bool = False,
    ) -> Iterator[Record]:
        """Yield the records of one job on all nodes; ``keeps_memory``: with ``KEEP_MEMORY``."""
        given = ["--size", str(size), "--steps", str(steps or self.steps), *arguments]
        words = module("benchmarks.reducers", "--json", *given)
        kept, settings = (", memory kept", KEEP_MEMORY) if keeps_memory else ("", {})
        what = f"{' '.join(given)} (all-reduce of MPI: {algorithm}{kept})"
        variables = environment(algorithm) | settings
        for reported in map(record_of, cluster.objects(LAYOUT, words, variables, TIMEOUT_SECONDS, what)):
            yield replace(reported, case=reported.case | {"mpi_algorithm": algorithm})


def show_by_place(records: Sequence[Record]) -> None:
    measured = [record for record in records if record.bench != "probe"]
    for _, own in groupby(measured, key=lambda record: (record.case["rate"], record.case["size"])):
        table_of(list(own)).print()


def main(
    cluster: Annotated[bool, Option(help="on emulated clusters (needs root)")] = False,
    rate: Annotated[list[str] | None, Option(help="of its links; may be repeated [1gbit, 10gbit]")] = None,
    algorithm: Annotated[str | None, Option(help="MPI's all-reduce on it [the fastest, probed]")] = None,
    size: Annotated[list[int] | None, Option(help="entries; --cluster: may be repeated")] = None,
    density: Annotated[list[float] | None, Option(help="to select; --cluster: may be repeated")] = None,
    reducer: Annotated[list[str] | None, Option(help="may be repeated [all]")] = None,
    steps: Annotated[int, Option(min=1, help="to time, after two to warm up")] = STEPS,
    horovod: Annotated[bool, Option(help="start TensorFlow and Horovod")] = True,
    memory_of: Annotated[bool, Option("--memory", help="allocations only, on simulated ranks")] = False,
    as_json: Annotated[bool, Option("--json")] = False,
) -> None:
    """Measure reducers beside MPI's and Horovod's all-reduces; see the module's docstring."""
    sizes, densities, names = (each or () for each in (size, density, reducer))
    try:
        if cluster:
            sweep = Sweep(
                rates=rate or RATES,
                sizes=sizes or SIZES,
                densities=densities or DENSITIES,
                steps=steps,
                reducers=names,
                algorithms=[algorithm] if algorithm else list(ALGORITHMS),
                horovod=horovod,
            )
        elif max(len(sizes), len(densities)) > 1:
            raise InvalidArgument("--size, --density: expected one of each without --cluster")
        else:
            one_size, one_density = next(iter(sizes), None), next(iter(densities), DENSITIES[0])
            plan = Plan(size=one_size, density=one_density, steps=steps, reducers=names)
    except ValueError as error:
        usage_error(str(error))
    if cluster:
        raise typer.Exit(pass_on(sweep.records(), as_json=as_json, show=show_by_place))
    if memory_of:
        for each, vectors in memory(plan):
            print(f"{each}: {vectors:.2f} vectors of the gradient's size")
        return
    if not has_ranks():
        usage_error("expected ranks of mpirun or horovodrun, --cluster or --memory")
    with as_rank() as comm:
        records = measure(replace(plan, comm=comm), horovod=horovod)
        show = lambda each: table_of(each).print()  # noqa: E731
        raise typer.Exit(report([records], as_json=as_json, show=show, comm=comm))


if __name__ == "__main__":
    typer.run(main)
