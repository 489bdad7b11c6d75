"""``cloudtrain bench reducers``: seconds, bytes, entries and memory of a step, on simulated or real ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from commlib import REDUCERS, Communicator, Reducer, predict
from training.bench.allreduce import BUSY, FLOOR, PEERS
from training.bench.memory import dense_vectors, traced
from training.bench.options import TRANSCRIPTIONS, BenchCandidate, Options
from training.bench.plan import Plan, has_ranks
from training.bench.record import Record
from training.bench.reporting import report
from training.bench.steps import CLOCKS, Measurement, interleave
from training.bench.tables import table_of
from training.process.job import all_or_exit, as_rank, usage_error

Nodes = Sequence[Sequence[int]]


def bench(as_json: bool, **options: Any) -> int:
    """Print the records of all reducers, on rank 0, and return the exit status."""
    if not has_ranks():
        try:
            plan = Plan.of(Options(**options), None)
        except ValueError as error:
            usage_error(str(error))
        return _report(plan, as_json, None)
    with as_rank() as comm:
        return _report(all_or_exit(comm, lambda: Plan.of(Options(**options), comm)), as_json, comm)


def _report(plan: Plan, as_json: bool, comm: Communicator | None) -> int:
    return report(measure(plan), as_json=as_json, show=lambda records: table_of(records).print(), comm=comm)


def measure(plan: Plan) -> Iterator[Record]:
    """Yield the record of one reducer after the other, and of its peer where that is no reducer itself."""
    if plan.allreduces:
        yield from _measure_against_allreduces(plan)
        return
    for candidate in plan.candidates:
        peer = plan.peer_of(candidate)
        nodes, taken = plan.run(partial(_interleave, plan, [candidate, *([peer] if peer else ())]))
        yield replace(
            _in_full(plan, candidate, nodes, taken[candidate]),
            peer=peer.name if peer else None,
            peer_seconds=taken[peer].seconds if peer else None,
        )
        if peer and peer.name in TRANSCRIPTIONS:
            yield _in_full(plan, peer, nodes, taken[peer])


def _measure_against_allreduces(plan: Plan) -> Iterator[Record]:
    """Yield the records of all reducers, then those of the all-reduces.

    The peer of a reducer is the fastest all-reduce. Those that keep processors busy between their calls are
    measured last, on their own.
    """
    interleaved = [each for each in plan.allreduces if each.name not in BUSY]
    groups = [
        (group, *plan.run(partial(_interleave, plan, [*group, *interleaved]))) for group in plan.groups()
    ]
    alone: dict[BenchCandidate, Measurement] = {}
    for each in plan.allreduces:
        if each.name in BUSY:
            alone |= plan.run(partial(_interleave, plan, [each]))[1]
    for group, nodes, taken in groups:
        baselines = {each.name: (taken | alone)[each].seconds for each in plan.allreduces}
        peer = min(PEERS.keys() & baselines, key=lambda name: baselines[name].median)
        for candidate in group:
            record = _record(plan, candidate, nodes, taken[candidate])
            more = record.more | {"baselines": {name: asdict(each) for name, each in baselines.items()}}
            yield replace(record, peer=peer, peer_seconds=baselines[peer], more=more)
    _, nodes, taken = groups[0]
    for each in plan.allreduces:
        yield _of_allreduce(plan, each, nodes, (taken | alone)[each])


def _interleave(
    plan: Plan, candidates: Sequence[BenchCandidate], comm: Communicator
) -> tuple[Nodes, dict[BenchCandidate, Measurement]]:
    topology = plan.topology(comm)
    reducers = {candidate: plan.make(candidate, topology) for candidate in candidates}
    unchecked = [BenchCandidate(FLOOR)]  # it computes no mean
    taken = interleave(comm, reducers, plan.gradients, plan.steps, plan.clock, unchecked=unchecked)
    return topology.nodes, taken


def _record(plan: Plan, candidate: BenchCandidate, nodes: Nodes, taken: Measurement) -> Record:
    return Record(
        bench="reducers",
        case=plan.case(candidate, nodes),
        subject=candidate.name,
        seconds=taken.seconds,
        bytes=taken.bytes,
        more={
            "bytes_of_all_ranks": asdict(taken.bytes_of_all_ranks),
            "entries": taken.entries,
            # Stages are of the transport's clock: next to the processor's they would not add up.
            "stages": None if plan.clock is CLOCKS["cpu"] else taken.stages,
        },
    )


def _in_full(plan: Plan, candidate: BenchCandidate, nodes: Nodes, taken: Measurement) -> Record:
    """Return the record with a prediction, and the memory that the reducer takes, for which it runs again."""
    record = _record(plan, candidate, nodes, taken)
    memory = {"dense_vectors": _dense_vectors(plan, candidate)}
    more = {"prediction": _prediction(plan, candidate, nodes), "memory": memory}
    return replace(record, more=record.more | more)


def _of_allreduce(plan: Plan, candidate: BenchCandidate, nodes: Nodes, taken: Measurement) -> Record:
    """Return the record of an all-reduce of MPI, whose bytes and stages are unknown."""
    stages = taken.stages if candidate.name == FLOOR else None
    more = {"bytes_of_all_ranks": None, "entries": None, "stages": stages}
    return replace(_record(plan, candidate, nodes, taken), bytes=None, more=more)


def _dense_vectors(plan: Plan, candidate: BenchCandidate) -> float:
    def make(comm: Communicator) -> Reducer:
        return plan.make(candidate, plan.topology(comm))

    with traced():
        held: float = plan.run(lambda comm: dense_vectors(comm, make, plan.gradients))
    return held


def _prediction(plan: Plan, candidate: BenchCandidate, nodes: Nodes) -> dict[str, Any] | None:
    """Return the prediction of the cost model, or ``None`` for a reducer that declares no cost."""
    reducer = REDUCERS.get(candidate.name)
    if reducer is None or reducer.cost is None:
        return None
    density = plan.options.density if candidate.sparse else None
    wire: dict[str, Any] = {"wire": candidate.wire} if candidate.wire else {}
    prediction = predict(candidate.name, nodes, plan.options.size, density, plan.options.network, **wire)
    seconds = {"intra": prediction.intra, "inter": prediction.inter, "seconds": prediction.seconds}
    return seconds | {"sent": asdict(prediction.sent)}
