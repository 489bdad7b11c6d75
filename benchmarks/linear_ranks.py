"""The part of ``cloudtrain bench linear`` on the ranks of a job: passes of all candidates in turn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from commlib import Communicator, LinkBytes, Topology
from training.bench.allreduce import MPIAllReduce
from training.bench.checks import WrongResult
from training.bench.record import Record
from training.bench.timing import Seconds
from training.linear.generated import SHAPES, generate
from training.linear.rows import Rows
from training.linear.settings import Settings, checked
from training.linear.solver import Pass, Solver
from training.linear.solvers import make_solver

MPI = f"{MPIAllReduce.__module__}:{MPIAllReduce.__name__}"
MPI_ALLREDUCE = "mpi_allreduce"
DENSE = {"dense": "dense", "torus2d": "torus2d", MPI_ALLREDUCE: MPI}
SPARSE: dict[str, Any] = {
    f"{name}{'' if wire == 'fp32' else f' {wire}'}": {"name": name, "wire": wire}
    for name in ("allgather", "ssar_doubling", "ssar_split", "oktopk", "hitopk")
    for wire in ("fp32", "gap")
}
AGREE = 1e-5  # of the objectives of all candidates, relative
RATE = 8.0


@dataclass(frozen=True)
class LinearCase:
    """Rows of a shape, and how a model is trained on them: so many passes of so many steps."""

    shape: str
    loss: str
    solver: str
    steps: int
    passes: int
    batch_size: int = 1000

    def settings(self, reducer: Any) -> Settings:
        """Return the settings of a candidate."""
        rate = {"rate": RATE, "schedule": "power"}
        own = {"learning_rate": rate, "batch_size": self.batch_size} if self.solver == "sgd" else {}
        return checked({"loss": self.loss, "solver": self.solver, "l2": 1e-6, "reducer": reducer, **own})

    def rows(self, low: int, high: int) -> Rows:
        """Return some rows of the data set."""
        return generate(SHAPES[self.shape], low, high, seed=1)


def measure(comm: Communicator, case: LinearCase, reducers: Sequence[str]) -> Iterator[Record]:
    """Yield a record for each candidate, the dense ones first; all ranks call it together.

    Raises ``WrongResult`` where objectives differ.
    """
    topology = Topology(comm)
    own = case.steps * case.batch_size
    rows = case.rows(comm.rank * own, (comm.rank + 1) * own)
    test = case.rows(comm.size * own, comm.size * own + case.batch_size)
    named = {**DENSE, **SPARSE}
    solvers = {name: make_solver(topology, rows, case.settings(named[name])) for name in reducers or named}
    passes, values = _interleave(comm, solvers, case.passes)
    records = {
        name: _record(case, topology, name, passes[name], values[name], _share_right(solver, test))
        for name, solver in solvers.items()
    }
    _check(values)
    dense = min((name for name in records if name in DENSE), key=lambda name: records[name].seconds.median)
    for name, record in records.items():
        yield _against(record, records[dense]) if name not in DENSE else record


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
            sent = max((each[2] for each in ranks), key=lambda each: (each.inter, each.intra))
            taken[name].append(replace(done, seconds=seconds, communication=communication, sent=sent))
    return taken, values


def _record(
    case: LinearCase,
    topology: Topology,
    name: str,
    passes: Sequence[Pass],
    values: Sequence[float],
    accuracy: float,
) -> Record:
    steps, shape = passes[0].steps, SHAPES[case.shape]
    given, applied = (median(each.entries[side] for each in passes) / steps for side in (0, 1))
    sent = LinkBytes(
        *(int(median(getattr(each.sent, link) for each in passes)) for link in ("intra", "inter"))
    )
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
        bytes=None if name == MPI_ALLREDUCE else sent,
        more={
            "communication": asdict(Seconds.of([each.communication for each in passes])),
            "entries": {"given": round(given), "applied": round(applied)},
            "objectives": list(values),
            "pass_seconds": [each.seconds for each in passes],
            "accuracy": accuracy,
        },
    )


def _against(record: Record, dense: Record) -> Record:
    ours, theirs = (each.more["communication"]["median"] for each in (record, dense))
    more = {"peer_communication": dense.more["communication"], "communication_ratio": theirs / ours}
    return replace(record, peer=dense.subject, peer_seconds=dense.seconds, more=record.more | more)


def _check(values: Mapping[str, Sequence[float]]) -> None:
    """Raise ``WrongResult`` where the objective of a candidate is not that of the first one."""
    (first, expected), *others = values.items()
    for name, found in others:
        for number, (own, other) in enumerate(zip(found, expected, strict=True), start=1):
            if not abs(own - other) <= AGREE * other:
                expected_of = f"the objective of {first} after pass {number}, {other}"
                raise WrongResult(f"{name}: expected {expected_of}, got {own}")


def _share_right(solver: Solver, rows: Rows) -> float:
    """Return the share of rows, the same on all ranks, whose label the model predicts."""
    return float(((solver.model.margins(rows) > 0) == (rows.labels > 0)).mean())
