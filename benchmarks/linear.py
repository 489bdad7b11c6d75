"""Linear models on sparse rows: sparse gradients against dense ones, or one rank against scikit-learn.

python -m benchmarks.linear --cluster     # 4 x 2 ranks of an emulated cluster; as root
python -m benchmarks.linear --simulated   # as many simulated ranks, each with a core of its own
python -m benchmarks.linear               # the ranks of mpirun, or alone: SGDClassifier and LIBLINEAR
"""

import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from typer import Option

from benchmarks.allreduce import MPIAllReduce
from benchmarks.jobs import Layout, cluster_until_end, environment, module, pass_on, record_of
from commlib import Communicator, Link, Network, Topology
from commlib.errors import InvalidArgument, look_up
from commlib.transport import simulated
from training.bench.record import Record, Seconds, WrongResult, busiest, median_bytes, report
from training.commands.printing import Table, times
from training.linear.config import Settings, checked
from training.linear.generated import SHAPES, generate
from training.linear.kernels import LOSSES
from training.linear.rows import Rows
from training.linear.solver import Model, Pass, Solver
from training.linear.solvers import SGD, SOLVERS, make_solver
from training.process.job import as_rank, usage_error

RATE, LAYOUT, ALGORITHM = "1gbit", Layout(4, 2), "ring"  # of the cluster, and of MPI's all-reduce on it
# Of simulated ranks: that of the cluster, and shared memory. Each rank has a core of its own.
NETWORK = Network(
    intra=Link.of(microseconds=10, gbit_per_second=100), inter=Link.of(microseconds=50, gbit_per_second=1)
)
ALONE_ROWS = 20_000
MPI = f"{MPIAllReduce.__module__}:{MPIAllReduce.__name__}"
MPI_ALLREDUCE = "mpi_allreduce"
DENSE = {"dense": "dense", "torus2d": "torus2d", MPI_ALLREDUCE: MPI}
SPARSE: dict[str, Any] = {
    f"{name}{'' if wire == 'fp32' else f' {wire}'}": {"name": name, "wire": wire}
    for name in ("allgather", "ssar_doubling", "ssar_split", "oktopk", "hitopk")
    for wire in ("fp32", "gap")
}
TIMEOUT_SECONDS = 3600.0  # of the job on a cluster
CANDIDATES = {**DENSE, **SPARSE}
AGREE = 1e-5  # of the objectives of all candidates, relative
LEARNING_RATE = 8.0


@dataclass(frozen=True)
class LinearCase:
    """Rows of a shape, and how a model is trained on them: so many passes of so many steps."""

    shape: str
    loss: str
    solver: str
    steps: int
    passes: int
    batch_size: int

    def settings(self, reducer: Any) -> Settings:
        rate = {"rate": LEARNING_RATE, "schedule": "power"}
        own = {"learning_rate": rate, "batch_size": self.batch_size} if self.solver == "sgd" else {}
        return checked({"loss": self.loss, "solver": self.solver, "l2": 1e-6, "reducer": reducer, **own})

    def rows(self, low: int, high: int) -> Rows:
        return generate(SHAPES[self.shape], low, high, seed=1)


def measure_ranks(comm: Communicator, case: LinearCase, candidates: Mapping[str, Any]) -> Iterator[Record]:
    """Yield a record for each candidate, the dense ones first; ``WrongResult`` where objectives differ."""
    topology = Topology(comm)
    own = case.steps * case.batch_size
    rows = case.rows(comm.rank * own, (comm.rank + 1) * own)
    few = case.rows(comm.rank * own, comm.rank * own + case.batch_size)
    for each in candidates.values():  # a first pass compiles and connects: the passes that count do not
        with closing(make_solver(topology, few, case.settings(each))) as solver:
            solver.run_pass()
    solvers = {name: make_solver(topology, rows, case.settings(each)) for name, each in candidates.items()}
    passes, values = _interleave(comm, solvers, case.passes)
    _check(values)
    records = {name: _record(case, topology, name, passes[name], values[name]) for name in solvers}
    dense = min((name for name in records if name in DENSE), key=lambda name: records[name].seconds.median)
    for name, record in records.items():
        if name in DENSE:
            yield record
            continue
        ours, theirs = (each.more["communication"] for each in (record, records[dense]))
        more = {"peer_communication": theirs, "communication_ratio": theirs["median"] / ours["median"]}
        yield record.beside(dense, records[dense].seconds, **more)


def _interleave(
    comm: Communicator, solvers: Mapping[str, Solver], passes: int
) -> tuple[dict[str, list[Pass]], dict[str, list[float]]]:
    """Return the passes of each candidate, of the slowest rank, and the objective after each."""
    taken: dict[str, list[Pass]] = {name: [] for name in solvers}
    values: dict[str, list[float]] = {name: [] for name in solvers}
    for number in range(passes):
        order = list(solvers) if number % 2 == 0 else list(solvers)[::-1]
        for name in order:
            comm.barrier()
            done = solvers[name].run_pass()
            values[name].append(solvers[name].value())
            ranks = comm.allgather_objects((done.seconds, done.communication, done.sent))
            seconds, communication = max(each[0] for each in ranks), max(each[1] for each in ranks)
            sent = busiest(each[2] for each in ranks)
            taken[name].append(replace(done, seconds=seconds, communication=communication, sent=sent))
    return taken, values


def _record(
    case: LinearCase, topology: Topology, name: str, passes: Sequence[Pass], values: Sequence[float]
) -> Record:
    steps, shape = passes[0].steps, SHAPES[case.shape]
    given, applied = (median(each.entries[side] for each in passes) / steps for side in (0, 1))
    return Record(
        bench="linear",
        case={
            **asdict(case),
            "features": shape.features,
            "rows": case.steps * case.batch_size * topology.world.size,
            "nodes": [len(node) for node in topology.nodes],
            "steps_of_pass": steps,
        },
        subject=name,
        seconds=Seconds.of([each.seconds for each in passes]),
        bytes=None if name == MPI_ALLREDUCE else median_bytes([each.sent for each in passes]),
        more={
            "communication": asdict(Seconds.of([each.communication for each in passes])),
            "entries": {"given": round(given), "applied": round(applied)},
            "objectives": list(values),
            "pass_seconds": [each.seconds for each in passes],
        },
    )


def _check(values: Mapping[str, Sequence[float]]) -> None:
    """Raise ``WrongResult`` where the objective of a candidate is not that of the first one."""
    (first, expected), *others = values.items()
    for name, found in others:
        for number, (own, other) in enumerate(zip(found, expected, strict=True), start=1):
            if not abs(own - other) <= AGREE * other:
                expected_of = f"the objective of {first} after pass {number}, {other}"
                raise WrongResult(f"{name}: expected {expected_of}, got {own}")


L2, ALONE_RATE, RUNS = 1e-6, 2.0, 7
ONCE = ("LIBLINEAR",)  # it takes long
MOST_PASSES = 100  # to the objective of a peer


def measure_alone(comm: Communicator, case: LinearCase) -> Iterator[Record]:
    """Yield records against SGDClassifier, same passes, and to the objectives of it and of LIBLINEAR.

    All are on one core, in the processor's seconds.
    """
    from scipy import sparse

    given = case.rows(0, ALONE_ROWS)
    # As scikit-learn takes it: float32, which it does not copy, and 32-bit indices.
    parts = (given.matrix.values, given.matrix.columns, given.matrix.starts.astype(np.int32))
    matrix = sparse.csr_matrix(parts, shape=(len(given), given.features))
    same = {"loss": case.loss, "l2": L2, "batch_size": 1, "intercept": False}
    settings = checked({**same, "learning_rate": {"rate": ALONE_RATE, "schedule": "constant"}})
    own = _Own(Topology(comm), given, settings)
    own.fit(1)  # which compiles
    fits: dict[str, Callable[[], Any]] = {"own": partial(own.fit, case.passes)}
    for name, peer in _peers(case, ALONE_ROWS).items():
        fits[name] = lambda peer=peer: peer.fit(matrix, given.labels).coef_[0]
    samples: dict[str, list[float]] = {name: [] for name in fits}
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="sklearn")  # that a peer has not converged
        for number in range(RUNS):
            for name, fit in fits.items():
                if number == 0 or name not in ONCE:
                    start = time.process_time()
                    found[name] = fit()
                    samples[name].append(time.process_time() - start)
    values = {name: own.value(weights) for name, weights in found.items()}
    seconds = {name: Seconds.of(each) for name, each in samples.items()}
    facts = {**asdict(case), "rows": ALONE_ROWS, "features": SHAPES[case.shape].features, "batch_size": 1}
    del facts["steps"]

    def record(until: str, peer: str, taken: Seconds, objective: float, passes: int) -> Record:
        more = {"objective": objective, "peer_objective": values[peer]}
        ends = {"until": until, "passes": passes}
        return Record("linear", facts | ends, "one rank", taken, peer, seconds[peer], bytes=None, more=more)

    yield record("passes", "SGDClassifier", seconds["own"], values["own"], case.passes)
    to_end = replace(own, settings=checked({**same, "learning_rate": ALONE_RATE}))  # which adapts
    for name in fits:
        if name != "own":
            passes, reached, taken = to_end.until(values[name])
            yield record("objective", name, taken, reached, passes)


def _peers(case: LinearCase, rows: int) -> dict[str, Any]:
    """Return scikit-learn's; LIBLINEAR would regularize an intercept, so none of the solvers has one."""
    from sklearn.linear_model import LogisticRegression, SGDClassifier
    from sklearn.svm import LinearSVC

    is_logistic = case.loss == "logistic"
    sgd = SGDClassifier(
        loss="log_loss" if is_logistic else case.loss,
        alpha=L2,
        learning_rate="constant",
        eta0=ALONE_RATE,
        max_iter=case.passes,
        tol=None,
        fit_intercept=False,
        random_state=1,
    )
    same = {"C": 1 / (L2 * rows), "fit_intercept": False}
    if is_logistic:
        return {"SGDClassifier": sgd, "LIBLINEAR": LogisticRegression(solver="liblinear", tol=1e-2, **same)}
    return {"SGDClassifier": sgd, "LIBLINEAR": LinearSVC(loss=case.loss, tol=1e-1, **same)}


@dataclass
class _Own:
    """One rank of this project on some rows."""

    topology: Topology
    rows: Rows
    settings: Settings

    def fit(self, passes: int) -> Any:
        solver = SGD(self.topology, self.rows, self.settings)
        for _ in range(passes):
            solver.run_pass()
        return solver.model.weights

    def until(self, value: float) -> tuple[int, float, Seconds]:
        """Return after how many passes an objective is reached, what it is then, and the seconds of them."""
        start = time.process_time()
        solver = SGD(self.topology, self.rows, self.settings)
        taken = time.process_time() - start
        reached = solver.value()
        while reached > value and solver.passes < MOST_PASSES:
            start = time.process_time()
            solver.run_pass()
            taken += time.process_time() - start
            reached = solver.value()
        return solver.passes, reached, Seconds.of([taken])

    def value(self, weights: Any) -> float:
        solver = SGD(self.topology, self.rows, self.settings)
        solver.model = Model(self.settings, self.rows.features)
        solver.model.set_weights(np.asarray(weights, np.float32), 0.0)
        return solver.value()


def show(records: Sequence[Record]) -> None:
    for until, group in groupby(records, key=lambda record: record.case.get("until")):
        own = list(group)
        (of_ranks(own) if until is None else of_one_rank(own, until)).print()


def of_ranks(records: Sequence[Record]) -> Table:
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
    header = ["", "s a pass", "s in\nexchanges", "× as fast\nas dense", "exchanges", "entries\ngiven"]
    nodes = f"{len(case['nodes'])} × {case['nodes'][0]} ranks"
    where = ", simulated" if case.get("clock") == "virtual" else ""
    # Coordinate descent takes all rows of a rank in a step.
    batch = f"{case['batch_size']:,} of a rank in a step, " if case["solver"] == "sgd" else ""
    rows_of = f"{case['rows']:,} rows, {batch}{nodes}{where}"
    what = f"{case['shape']}, {case['loss']}, {case['solver']}: {rows_of}"
    notes = ["dense: the fastest of the dense ones; median of passes, each that of the slowest rank"]
    return Table(what, [*header, "of means", "objective"], rows, notes)


def of_one_rank(records: Sequence[Record], until: str) -> Table:
    rows = []
    for record in records:
        ours, theirs = record.more["objective"], record.more["peer_objective"]
        row = [
            str(record.peer),
            f"{record.case['passes']}",
            f"{record.seconds.median:.3f}",
            f"{record.peer_seconds.median:.3f}",
            times(record.ratio) if until == "passes" or ours <= theirs else "not reached",
            f"{ours:.6f}",
            f"{theirs:.6f}",
        ]
        rows.append(row)
    case = records[0].case
    kind = "the same passes" if until == "passes" else "to the peer's objective"
    what = f"{case['shape']}, {case['loss']}, one rank, {case['rows']:,} rows: {kind}"
    return Table(what, ["peer", "passes", "s", "peer s", "× as fast", "objective", "peer's"], rows)


def on_simulated(case: LinearCase) -> Iterator[Record]:
    """Yield the records of simulated ranks, whose seconds are of the processor and of the α-β model."""
    candidates = {name: each for name, each in CANDIDATES.items() if name != MPI_ALLREDUCE}
    ranks, own = LAYOUT.ranks, LAYOUT.ranks_per_node
    body = lambda comm: list(measure_ranks(comm, case, candidates))  # noqa: E731
    for record in simulated.run(body, ranks, own, network=NETWORK, cores=ranks)[0]:
        yield replace(record, case=record.case | {"rate": RATE, "clock": "virtual"})


def on_cluster(case: LinearCase) -> Generator[Record, None, None]:
    given = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(case).items()]
    words = module("benchmarks.linear", "--json", *given)
    what = f"{case.shape}, {case.loss}, {case.solver} on {LAYOUT} ranks at {RATE}"
    with cluster_until_end() as cluster:
        cluster.up(LAYOUT.nodes, RATE)
        for reported in cluster.objects(LAYOUT, words, environment(ALGORITHM), TIMEOUT_SECONDS, what):
            record = record_of(reported)
            yield replace(record, case=record.case | {"rate": RATE, "mpi_algorithm": ALGORITHM})


def main(
    shape: Annotated[str, Option(help="of the rows: url or webspam")] = "url",
    loss: Annotated[str, Option(help="logistic, hinge or squared_hinge")] = "logistic",
    solver: Annotated[str, Option(help="on ranks: sgd or coordinate")] = "sgd",
    steps: Annotated[int, Option(min=1, help="on ranks: batches of a pass")] = 10,
    passes: Annotated[int, Option(min=1, help="over the rows")] = 5,
    batch_size: Annotated[int, Option(min=1, help="on ranks: rows of a rank in a step")] = 1000,
    simulated_ranks: Annotated[bool, Option("--simulated", help="on simulated ranks")] = False,
    cluster: Annotated[bool, Option(help="on an emulated cluster (needs root)")] = False,
    as_json: Annotated[bool, Option("--json")] = False,
) -> None:
    """Train linear models on sparse rows; see the module's docstring."""
    try:
        look_up(SHAPES, "shape", shape)
        look_up(LOSSES, "loss", loss)
        look_up(SOLVERS, "solver", solver)
        if simulated_ranks and cluster:
            raise InvalidArgument("--simulated: expected no --cluster")
    except ValueError as error:
        usage_error(str(error))
    case = LinearCase(shape, loss, solver, steps, passes, batch_size)
    if cluster:
        raise typer.Exit(pass_on(on_cluster(case), as_json=as_json, show=show))
    if simulated_ranks:
        raise typer.Exit(report([on_simulated(case)], as_json=as_json, show=show))
    with as_rank() as comm:
        measured = measure_ranks(comm, case, CANDIDATES) if comm.size > 1 else measure_alone(comm, case)
        raise typer.Exit(report([measured], as_json=as_json, show=show, comm=comm))


if __name__ == "__main__":
    typer.run(main)
