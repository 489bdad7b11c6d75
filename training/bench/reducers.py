"""``cloudtrain bench reducers``: seconds, bytes, entries and memory of a step, on simulated or real ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from commlib import Communicator, Reducer, cost
from commlib.errors import UnknownName
from commlib.transport.mpi import abort_on_error
from training.bench.checks import WrongResult
from training.bench.memory import dense_vectors, traced
from training.bench.plan import BASELINE, TRANSCRIPTIONS, Options, Plan, has_ranks
from training.bench.record import Record, milliseconds, print_lines, print_table, times
from training.bench.steps import CLOCKS, Measurement, take_turns
from training.job import FAILURE, LaunchError, complain, leave, refuse, together, world

Nodes = Sequence[Sequence[int]]


def bench(as_json: bool, **options: Any) -> int:
    """Print the records of all reducers, on rank 0, and return the exit status."""
    if not has_ranks():
        try:
            plan = Plan.of(Options(**options), None)
        except ValueError as error:
            refuse(str(error))
        return _print(plan, as_json, None)
    try:
        comm = world()
    except LaunchError as error:
        refuse(str(error))
    with abort_on_error():
        return _print(together(comm, lambda: Plan.of(Options(**options), comm)), as_json, comm)


def _print(plan: Plan, as_json: bool, comm: Communicator | None) -> int:
    """Measure on all ranks and print on rank 0."""
    speaks = comm is None or comm.rank == 0
    records = measure(plan)
    try:
        if as_json and speaks:
            print_lines(records)
        else:
            _print_records(list(records), silent=not speaks)
    except WrongResult as error:  # on all ranks, in the same step
        if speaks:
            complain(str(error))
        if comm is not None:
            leave(comm, FAILURE)
        return FAILURE
    return 0


def measure(plan: Plan) -> Iterator[Record]:
    """Yield the record of one reducer after the other, and of its peer where that is no reducer itself."""
    for name in plan.names:
        peer = plan.peer_of(name)
        contenders = [name] if peer is None else [name, peer]
        nodes, taken = plan.run(partial(_take_turns, plan, contenders))
        yield replace(
            _record(plan, name, nodes, taken[name]),
            peer=peer,
            peer_seconds=taken[peer].seconds if peer else None,
        )
        if peer in TRANSCRIPTIONS:
            yield _record(plan, peer, nodes, taken[peer])


def _take_turns(plan: Plan, names: Sequence[str], comm: Communicator) -> tuple[Nodes, dict[str, Measurement]]:
    topology = plan.topology(comm)
    reducers = {name: plan.make(name, topology) for name in names}
    return topology.nodes, take_turns(comm, reducers, plan.gradients, plan.steps, plan.clock)


def _record(plan: Plan, name: str, nodes: Nodes, taken: Measurement) -> Record:
    return Record(
        bench="reducers",
        case=plan.case(name, nodes),
        subject=name,
        seconds=taken.seconds,
        bytes=taken.bytes,
        more={
            "bytes_of_all_ranks": asdict(taken.bytes_of_all_ranks),
            "entries": taken.entries,
            # Stages are of the transport's clock: beside the processor's they would not add up.
            "stages": None if plan.clock is CLOCKS["cpu"] else taken.stages,
            "prediction": _prediction(plan, name, nodes),
            "memory": {"dense_vectors": _dense_vectors(plan, name)},
        },
    )


def _dense_vectors(plan: Plan, name: str) -> float:
    def make(comm: Communicator) -> Reducer:
        return plan.make(name, plan.topology(comm))

    with traced():
        held: float = plan.run(lambda comm: dense_vectors(comm, make, plan.gradients))
    return held


def _prediction(plan: Plan, name: str, nodes: Nodes) -> dict[str, Any] | None:
    """Return what the cost model says, or nothing of a reducer that it does not know."""
    try:
        prediction = cost.predict(name, nodes, plan.size, plan.density_of(name).get("density"), plan.network)
    except UnknownName:
        return None
    seconds = {"intra": prediction.intra, "inter": prediction.inter, "seconds": prediction.seconds}
    return seconds | {"sent": asdict(prediction.sent)}


def _print_records(records: Sequence[Record], *, silent: bool) -> None:
    """Print a table: a line a reducer."""
    if silent:
        return
    case, clock = records[0].case, CLOCKS[records[0].case["clock"]]
    nodes = case["ranks_of_nodes"]
    title = f"{case['size']:,} entries, {sum(nodes)} ranks on {len(nodes)} nodes, clock: {clock.name}"
    peer = next((record.peer for record in records if record.peer), BASELINE)
    header = ["reducer", "ms", f"× {peer}", "intra\nms", "inter\nms", "predicted\nms", "sent intra\nkB"]
    header += ["sent inter\nkB", "selected\nentries", "applied\nentries", "memory\nvectors"]
    notes = [
        f"ms: {clock.meaning}; median of {records[0].seconds.runs} steps. × {peer}: how many times as fast.",
        "predicted: by the cost model, messages only. sent: payload of the busiest rank.",
        "memory: what a rank holds beside its gradient, in vectors as long as that",
    ]
    print_table(title + ("  (quick)" if case["quick"] else ""), header, map(_row, records), notes)


def _row(record: Record) -> list[str]:
    more = record.more
    stages, prediction = more["stages"] or {}, more["prediction"]
    return [
        record.subject,
        milliseconds(record.seconds.median),
        times(record.ratio),
        *(milliseconds(stages[link]["max"]) if stages else "–" for link in ("intra", "inter")),
        milliseconds(prediction["seconds"]) if prediction else "–",
        *(f"{sent / 1e3:,.0f}" for sent in (record.bytes.intra, record.bytes.inter)),
        *(f"{more['entries'][name]:,}" for name in ("selected", "applied")),
        f"{more['memory']['dense_vectors']:.2f}",
    ]
