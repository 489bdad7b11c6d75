"""``cloudtrain bench reducers``: seconds, bytes and entries of a step, on simulated or real ranks.

Reducers alternate on the same gradients, and the result of the first step is checked in float64.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from operator import attrgetter
from statistics import fmean, median
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib import REDUCERS, Communicator, Link, LinkBytes, Network, Reducer, Report, Topology, make_reducer
from commlib.agreement import differing, digest
from commlib.density import check_density
from commlib.errors import InvalidArgument, look_up
from commlib.prediction import predict
from commlib.reducers import StageSeconds, reducer_options
from commlib.transport import simulated
from commlib.transport.mpi import WORLD_SIZES
from commlib.tuning.probe import Gradients
from commlib.vectors import Float32
from commlib.wire import make_codec
from training.bench.record import Record, Seconds, WrongResult, busiest, median_bytes, report
from training.commands.printing import NOTHING, Table, milliseconds, times
from training.process.job import all_or_exit, as_rank, usage_error

SIZE, QUICK_SIZE = 1_000_000, 100_000
STEPS, WARM_UP_STEPS = 5, 2
DENSITY = 0.01
RANKS, RANKS_PER_NODE = 8, 4  # simulated
VIRTUAL, WALL = "virtual", "wall"
# The clock of simulated ranks, and that of real ones, where a barrier ends a step.
CLOCKS = {
    VIRTUAL: "of the messages, as the α-β model predicts, slowest rank",
    WALL: "from barrier to barrier, slowest rank",
}
BASELINE = "dense"
LINKS = ("intra", "inter")
FLOAT32_ROUNDING = 2.0**-24

Nodes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Candidate:
    """A reducer; ``wire``: a codec in place of its default; ``kind``: a class that is not in ``REDUCERS``."""

    name: str
    wire: str | None = None
    kind: type[Reducer] | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.wire}" if self.wire else self.name

    @property
    def sparse(self) -> bool:
        return (self.kind or REDUCERS[self.name]).sparse

    def make(self, topology: Topology, size: int, density: float) -> Reducer:
        """Return a reducer of this size and density, else with its defaults."""
        wire = {"wire": self.wire} if self.wire else {}
        options = {"density": density, **wire} if self.sparse else wire
        constructor: Callable[..., Reducer] = self.kind or partial(make_reducer, self.name)
        return constructor(topology, size, **options)


# ---- Steps ----


@dataclass(frozen=True)
class Measurement:
    """The seconds of a step of one reducer on the slowest rank, and its reports, ``[step][rank]``."""

    seconds: Seconds
    reports: Sequence[Sequence[Report]]

    @property
    def entries(self) -> dict[str, int]:
        """Return the entries selected, on the average rank, and applied."""
        return {name: round(self._over_steps(name, fmean)) for name in ("selected", "applied")}

    @property
    def stages(self) -> dict[str, dict[str, float]]:
        """Return the seconds of each stage by the transport's clock: minimum, mean and maximum over ranks."""
        over: dict[str, Callable[[Sequence[float]], float]] = {"min": min, "mean": fmean, "max": max}
        return {
            stage.name: {name: self._over_steps(f"seconds.{stage.name}", each) for name, each in over.items()}
            for stage in fields(StageSeconds)
        }

    def _over_steps(self, name: str, over_ranks: Callable[[Sequence[float]], float]) -> float:
        read = attrgetter(name)
        return median(over_ranks(list(map(read, ranks))) for ranks in self.reports)


def interleave(
    comm: Communicator,
    reducers: Mapping[Candidate, Reducer],
    gradients: Gradients,
    steps: range,
    clock: str,
    *,
    unchecked: Collection[Candidate] = (),
) -> dict[Candidate, Measurement]:
    """Reduce the gradient of each step with each reducer; return the measurements of ``steps``. Collective.

    The steps before ``steps.start`` are the warm-up. The first result is checked but for ``unchecked``.
    """
    taken: dict[Candidate, list[tuple[float, Report]]] = {candidate: [] for candidate in reducers}
    for number in range(steps.stop):
        gradient = gradients.of(comm.rank, number)
        for candidate, reducer in reducers.items():
            comm.barrier()
            start = comm.now()
            mean = reducer.reduce(gradient)
            if clock == WALL:
                comm.barrier()
            seconds = comm.now() - start
            if number == 0 and candidate not in unchecked:
                check_first_step(str(candidate), comm, reducer, mean, gradients)
            if number in steps:
                assert reducer.last is not None
                taken[candidate].append((seconds, reducer.last))
    measured = {}
    for candidate, own in taken.items():
        of_steps = list(zip(*comm.allgather_objects(own), strict=True))
        slowest = Seconds.of([max(seconds for seconds, _ in ranks) for ranks in of_steps])
        measured[candidate] = Measurement(slowest, [[report for _, report in ranks] for ranks in of_steps])
    return measured


def check_first_step(
    name: str, comm: Communicator, reducer: Reducer, mean: Float32, gradients: Gradients
) -> None:
    """Raise :class:`WrongResult` on all ranks where step 0 lost something or the ranks disagree.

    ``P·mean + Σ residual = Σ gradients``, with no residual for dense reducers, is compared on rank 0.
    """
    disagreeing = differing(comm.allgather_ints([digest([mean.tobytes()])])[:, 0])
    problem = f"ranks {disagreeing} hold another mean than rank 0" if disagreeing else ""
    residuals = _sum_on_root(comm, reducer.residual)
    if residuals is not None and not problem:
        accounted = residuals + comm.size * mean.astype(np.float64)
        expected, magnitudes = gradients.sum_of(comm.size)
        # Each entry is added P times, divided once and multiplied once, each time rounded to float32 of at
        # most the sum of the magnitudes, or of the mean where that is larger (powersgd).
        allowed = (comm.size + 2) * FLOAT32_ROUNDING * (magnitudes + comm.size * np.abs(mean))
        if wrong := np.count_nonzero(~(np.abs(accounted - expected) <= allowed)):  # ~: a NaN is wrong, too
            of = f"{wrong} of {gradients.size} entries"
            problem = f"P·mean + Σ residual differs from Σ gradients in {of}"
    if problem := comm.allgather_objects(problem)[0]:
        raise WrongResult(f"{name}: {problem}")


def _sum_on_root(comm: Communicator, vector: Float32) -> npt.NDArray[np.float64] | None:
    """Return the sum over ranks in float64, on rank 0; nothing on the others."""
    if comm.rank != 0:
        comm.send(vector, 0).wait()
        return None
    total, arriving = vector.astype(np.float64), np.empty_like(vector)
    for source in range(1, comm.size):
        comm.receive(arriving, source).wait()
        total += arriving
    return total


# ---- The command ----


@dataclass(frozen=True)
class Plan:
    """A bench on the ranks of ``comm``, or on simulated ranks without it.

    ``None`` and empty sequences stand for the defaults. ``wires``: codecs of sparse reducers. Links: of
    simulated ranks and of the cost model.
    """

    comm: Communicator | None = None
    ranks: int | None = None
    ranks_per_node: int | None = None
    size: int | None = None
    density: float = DENSITY
    reducers: Sequence[str] = ()
    wires: Sequence[str] = ()
    steps: int | None = None
    inter_gbit: float = 25
    inter_microseconds: float = 30
    intra_gbit: float = 1200
    intra_microseconds: float = 10
    quick: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_node", "size", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgument(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
        check_density(self.density)
        for wire in self.wires:
            make_codec(wire)
        for name in self.reducers:
            look_up(REDUCERS, "reducer", name)
        if self.wires and not any(each.wire for each in self.candidates()):
            raise InvalidArgument(f"--wire: expected a --reducer with codecs, got {', '.join(self.reducers)}")
        _ = self.network
        if self.comm is not None and self.ranks not in (None, self.comm.size):
            raise InvalidArgument(f"-np: expected the {self.comm.size} ranks of this job, got {self.ranks}")

    @property
    def network(self) -> Network:
        """Return the links that the virtual clock and the cost model predict for."""
        intra = Link.of(microseconds=self.intra_microseconds, gbit_per_second=self.intra_gbit)
        inter = Link.of(microseconds=self.inter_microseconds, gbit_per_second=self.inter_gbit)
        return Network(intra, inter)

    def candidates(self) -> Iterator[Candidate]:
        """Yield the reducers to measure, sparse ones with each of the codecs."""
        for name in self.reducers or REDUCERS:
            for wire in (self.wires if "wire" in reducer_options(name) else ()) or (None,):
                yield Candidate(name, wire)

    @property
    def clock(self) -> str:
        return VIRTUAL if self.comm is None else WALL

    @cached_property
    def gradients(self) -> Gradients:
        return Gradients(self.size or (QUICK_SIZE if self.quick else SIZE))

    def interleave(
        self, candidates: Iterable[Candidate], unchecked: Collection[Candidate] = ()
    ) -> tuple[Nodes, dict[Candidate, Measurement]]:
        """Return the ranks of each node, and what was measured of each candidate."""

        def body(comm: Communicator) -> tuple[Nodes, dict[Candidate, Measurement]]:
            topology, size = Topology(comm, self.ranks_per_node), self.gradients.size
            reducers = {each: each.make(topology, size, self.density) for each in candidates}
            steps = range(WARM_UP_STEPS, WARM_UP_STEPS + (self.steps or STEPS))
            taken = interleave(comm, reducers, self.gradients, steps, self.clock, unchecked=unchecked)
            return topology.nodes, taken

        if self.comm is not None:
            return body(self.comm)
        ranks, own = self.ranks or RANKS, self.ranks_per_node or RANKS_PER_NODE
        return simulated.run(body, ranks, own, self.network)[0]

    def record(self, candidate: Candidate, nodes: Nodes, taken: Measurement, **case: Any) -> Record:
        """Return the record of a candidate; ``case``: further keys of its case."""
        own = {
            "size": self.gradients.size,
            "density": self.density if candidate.sparse else None,
            "wire": candidate.wire,
            "ranks_of_nodes": [len(node) for node in nodes],
            "clock": self.clock,
            "warm_up_steps": WARM_UP_STEPS,
            **case,
            "quick": self.quick,
        }
        sent = [[rank.traffic.sent for rank in ranks] for ranks in taken.reports]
        together = median_bytes([sum(ranks, LinkBytes()) for ranks in sent])
        most = median_bytes([busiest(ranks) for ranks in sent])
        more = {"bytes_of_all_ranks": asdict(together), "entries": taken.entries, "stages": taken.stages}
        return Record("reducers", own, candidate.name, taken.seconds, bytes=most, more=more)


def has_ranks() -> bool:
    """Return whether mpirun, horovodrun or srun has started this process with others."""
    return any(os.environ.get(name, "1") != "1" for name in WORLD_SIZES)


def bench(as_json: bool, **options: Any) -> int:
    """Print the records of all reducers, on rank 0, and return the exit status."""
    if not has_ranks():
        try:
            plan = Plan(**options)
        except ValueError as error:
            usage_error(str(error))
        return report([measure(plan)], as_json=as_json, show=_show)
    with as_rank() as comm:
        plan = all_or_exit(comm, lambda: Plan(comm, **options))
        return report([measure(plan)], as_json=as_json, show=_show, comm=comm)


def measure(plan: Plan) -> Iterator[Record]:
    """Yield the record of one reducer after the other, each beside dense."""
    peer = Candidate(BASELINE)
    for candidate in plan.candidates():
        nodes, taken = plan.interleave(dict.fromkeys((candidate, peer)))
        record = plan.record(candidate, nodes, taken[candidate], network=asdict(plan.network))
        record = replace(record, more=record.more | {"prediction": _prediction(plan, candidate, nodes)})
        yield record if peer == candidate else record.beside(peer.name, taken[peer].seconds)


def _prediction(plan: Plan, candidate: Candidate, nodes: Nodes) -> dict[str, Any] | None:
    """Return the prediction of the cost model, or ``None`` for a reducer that declares no cost."""
    if REDUCERS[candidate.name].cost is None:
        return None
    density = plan.density if candidate.sparse else None
    wire: dict[str, Any] = {"wire": candidate.wire} if candidate.wire else {}
    found = predict(candidate.name, nodes, plan.gradients.size, density, plan.network, **wire)
    seconds = {"intra": found.intra, "inter": found.inter, "seconds": found.seconds}
    return seconds | {"sent": asdict(found.sent)}


# ---- The table ----


def _show(records: Sequence[Record]) -> None:
    table_of(records).print()


def table_of(records: Sequence[Record]) -> Table:
    """Return the table of records of one size and the same ranks: a line a reducer."""
    first = records[0]
    case, clock = first.case, first.case["clock"]
    header = ["reducer", "density", "ms", f"× {BASELINE}", "intra\nms", "inter\nms", "predicted\nms"]
    header += ["sent intra\nkB", "sent inter\nkB", "selected\nentries", "applied\nentries"]
    links = [
        f"{each['alpha'] * 1e6:g} µs and {8 / each['beta'] / 1e9:g} Gbit/s {where}"
        for each, where in zip(case["network"].values(), ("inside nodes", "between them"), strict=True)
    ]
    notes = [
        f"ms: {CLOCKS[clock]}; median of {first.seconds.runs} steps. × {BASELINE}: how many times as fast.",
        f"predicted: by the cost model, messages only. Links: {', '.join(links)}.",
        "sent: payload of the busiest rank",
    ]
    nodes, quick = case["ranks_of_nodes"], "  (quick)" if case["quick"] else ""
    title = f"{case['size']:,} entries, {sum(nodes)} ranks on {len(nodes)} nodes, clock: {clock}{quick}"
    return Table(title, header, [_row(record) for record in records], notes)


def _row(record: Record) -> list[str]:
    stages, prediction = record.more["stages"], record.more["prediction"]
    return [
        *(label(record), percent(record.case["density"]), milliseconds(record.seconds.median)),
        times(record.ratio),
        *(milliseconds(stages[link]["max"]) if stages else NOTHING for link in LINKS),
        milliseconds(prediction and prediction["seconds"]),
        *sent_and_entries(record),
    ]


def label(record: Record) -> str:
    """Return the name, and the codec if it is not the reducer's own."""
    return " ".join(filter(None, (record.subject, record.case.get("wire"))))


def percent(density: float | None) -> str:
    """Return a density; dense reducers have none.

    >>> percent(0.01), percent(0.001), percent(None)
    ('1%', '0.1%', '–')
    """
    return NOTHING if density is None else f"{density * 100:g}%"


def sent_and_entries(record: Record) -> list[str]:
    """Return the cells of kB sent inside and between nodes, and of entries selected and applied."""
    sent, entries = record.bytes, record.more["entries"]
    bytes_of = [NOTHING] * 2 if sent is None else [f"{each / 1e3:,.0f}" for each in (sent.intra, sent.inter)]
    return [*bytes_of, *(f"{entries[name]:,}" if entries else NOTHING for name in ("selected", "applied"))]
