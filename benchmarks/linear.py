"""``cloudtrain bench linear``: sparse gradients against dense ones, and one rank against scikit-learn."""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from benchmarks.cluster import Layout, cluster_until_end, environment, note
from benchmarks.jobs import Failed
from benchmarks.linear_alone import ROWS
from benchmarks.linear_alone import measure as measure_alone
from benchmarks.linear_ranks import DENSE, MPI_ALLREDUCE, SPARSE, LinearCase
from benchmarks.linear_ranks import measure as measure_ranks
from commlib import Communicator, Link, Network
from commlib.errors import InvalidArgument, look_up
from commlib.transport import simulated
from training.bench.record import Record, command
from training.bench.reporting import JSONRecord, pass_on, report
from training.commands.printing import Table, times
from training.linear.generated import SHAPES
from training.linear.losses import LOSSES
from training.linear.solvers import SOLVERS
from training.process.hosts import Ranks
from training.process.job import as_rank, usage_error
from training.process.launch import cloudtrain, command_line

RATE, LAYOUT, ALGORITHM = "1gbit", Layout(4, 2), "ring"  # of the cluster, and of MPI's all-reduce on it
# Of simulated ranks: that of the cluster, and shared memory. Each rank has a core of its own.
NETWORK = Network(
    intra=Link.of(microseconds=10, gbit_per_second=100), inter=Link.of(microseconds=50, gbit_per_second=1)
)
QUICK_STEPS, QUICK_ROWS = 2, 2_000


@dataclass(frozen=True)
class LinearOptions:
    """The command's options. ``steps``: of a pass; ``rate``, ``timeout``: of the cluster.

    ``simulated``: on as many ranks as the cluster has, by the virtual clock.
    """

    shape: str = "url"
    loss: str = "logistic"
    solver: str = "sgd"
    reducers: Sequence[str] = ()
    steps: int = 10
    passes: int = 5
    batch_size: int = 1000
    quick: bool = False
    simulated: bool = False
    cluster: bool = False
    rate: str = RATE
    timeout: float = 3600.0

    def __post_init__(self) -> None:
        for table, kind, name in ((SHAPES, "shape", self.shape), (LOSSES, "loss", self.loss)):
            look_up(table, kind, name)
        look_up(SOLVERS, "solver", self.solver)
        for name in self.reducers:
            look_up({**DENSE, **SPARSE}, "reducer", name)
        if self.rate != RATE and not self.cluster:
            raise InvalidArgument("--rate: has an effect only with --cluster")
        if self.simulated and (self.cluster or MPI_ALLREDUCE in self.reducers):
            other = "--cluster" if self.cluster else f"--reducer {MPI_ALLREDUCE}"
            raise InvalidArgument(f"--simulated: expected none with {other}")
        for key in ("steps", "passes", "batch_size"):
            if getattr(self, key) < 1:
                raise InvalidArgument(
                    f"--{key.replace('_', '-')}: expected at least 1, got {getattr(self, key)}"
                )

    @property
    def case(self) -> LinearCase:
        """Return what is trained."""
        case = LinearCase(self.shape, self.loss, self.solver, self.steps, self.passes, self.batch_size)
        return replace(case, steps=QUICK_STEPS, passes=QUICK_STEPS) if self.quick else case

    def arguments(self) -> list[str]:
        """Return the arguments of the job on the cluster."""
        given = [each for name in self.reducers for each in ("--reducer", name)]
        numbers = ["--steps", str(self.steps), "--passes", str(self.passes)]
        more = ["--batch-size", str(self.batch_size), *(["--quick"] if self.quick else [])]
        kinds = ["--shape", self.shape, "--loss", self.loss, "--solver", self.solver]
        return ["bench", "linear", "--json", *kinds, *numbers, *given, *more]


def bench(as_json: bool, **options: Any) -> int:
    """Print the records, and return the exit status."""
    try:
        given = LinearOptions(**options)
    except ValueError as error:
        usage_error(str(error))
    if given.cluster:
        return pass_on(_on_cluster(given), as_json=as_json, show=_print_tables)
    if given.simulated:
        return report(_simulated(given), as_json=as_json, show=print_tables)
    with as_rank() as comm:
        return report(_here(comm, given), as_json=as_json, show=print_tables, comm=comm)


def _here(comm: Communicator, given: LinearOptions) -> Iterator[Record]:
    if comm.size > 1:
        return measure_ranks(comm, given.case, given.reducers)
    return measure_alone(comm, given.case, QUICK_ROWS if given.quick else ROWS)


def _simulated(given: LinearOptions) -> Iterator[Record]:
    """Yield the records of simulated ranks, whose seconds are of the processor and of the α-β model."""
    reducers = given.reducers or [name for name in (*DENSE, *SPARSE) if name != MPI_ALLREDUCE]

    def body(comm: Communicator) -> list[Record]:
        return list(measure_ranks(comm, given.case, reducers))

    ranks, own = LAYOUT.ranks, LAYOUT.ranks_per_node
    for record in simulated.run(body, ranks, own, network=NETWORK, cores=ranks)[0]:
        yield replace(record, case=record.case | {"rate": RATE, "clock": "virtual"})


def _on_cluster(given: LinearOptions) -> Generator[JSONRecord, None, None]:
    """Yield the records of a job on the nodes; however this ends, the cluster is gone."""
    job = command_line(Ranks(LAYOUT.ranks, LAYOUT.hosts), cloudtrain(*given.arguments()))
    with cluster_until_end() as cluster:
        cluster.up(LAYOUT.nodes, given.rate)
        note(f"{given.shape}, {given.loss}, {given.solver} on {LAYOUT} ranks at {given.rate}")
        try:
            for line in cluster.lines(job, environment(ALGORITHM), given.timeout):
                if line.startswith("{"):
                    reported = json.loads(line)
                    reported["case"] |= {"rate": given.rate, "mpi_algorithm": ALGORITHM}
                    yield reported | {"command": command()}
        except Failed as failure:
            raise Failed(f"--cluster: {failure}") from None


def _print_tables(reported: Sequence[JSONRecord]) -> None:
    print_tables([Record.of(each) for each in reported])


def print_tables(records: Sequence[Record]) -> None:
    """Print a table of the candidates on ranks, or of one rank against scikit-learn."""
    for until, group in groupby(records, key=lambda record: record.case.get("until")):
        own = list(group)
        (of_ranks(own) if until is None else of_one_rank(own, until)).print()


def of_ranks(records: Sequence[Record]) -> Table:
    """Return the table of the candidates on ranks."""
    case = records[0].case
    rows = [
        [
            record.subject,
            f"{record.seconds.median:.3f}",
            f"{record.more['communication']['median']:.3f}",
            times(record.ratio),
            times(record.more.get("communication_ratio")),
            f"{record.more['entries']['given']:,}",
            f"{record.more['entries']['applied']:,}",
            f"{record.more['objectives'][-1]:.7f}",
        ]
        for record in records
    ]
    header = [
        "",
        "s a pass",
        "s in\nexchanges",
        "× as fast\nas dense",
        "exchanges",
        "entries\ngiven",
        "of means",
    ]
    nodes = f"{len(case['nodes'])} × {case['nodes'][0]} ranks"
    where = ", simulated" if case.get("clock") == "virtual" else ""
    rows_of = f"{case['rows']:,} rows, {batch_of(case)}{nodes}{where}"
    what = f"{case['shape']}, {case['loss']}, {case['solver']}: {rows_of}"
    notes = ["dense: the fastest of the dense ones; median of passes, each that of the slowest rank"]
    return Table(what, [*header, "objective"], rows, notes)


def batch_of(case: Mapping[str, Any]) -> str:
    """Return what says how many rows of a rank a step takes; coordinate descent takes all."""
    return f"{case['batch_size']:,} of a rank in a step, " if case["solver"] == "sgd" else ""


def of_one_rank(records: Sequence[Record], until: str) -> Table:
    """Return the table of one rank against scikit-learn."""
    rows = [
        [
            str(record.peer),
            f"{record.case['passes']}",
            f"{record.seconds.median:.3f}",
            "–" if record.peer_seconds is None else f"{record.peer_seconds.median:.3f}",
            times(record.ratio) if until == "passes" or _is_reached(record) else "not reached",
            f"{record.more['objective']:.6f}",
            f"{record.more['peer_objective']:.6f}",
        ]
        for record in records
    ]
    case = records[0].case
    kind = "the same passes" if until == "passes" else "to the peer's objective"
    what = f"{case['shape']}, {case['loss']}, one rank, {case['rows']:,} rows: {kind}"
    return Table(what, ["peer", "passes", "s", "peer s", "× as fast", "objective", "peer's"], rows)


def _is_reached(record: Record) -> bool:
    return bool(record.more["objective"] <= record.more["peer_objective"])
