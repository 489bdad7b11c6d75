"""``cloudtrain bench pto``: norms in parts on real ranks, against every rank computing all of them."""

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from benchmarks.interleaved import Interleaved, interleave
from benchmarks.jobs import lines
from benchmarks.norms import Tensors, check_squares
from benchmarks.shapes import SHAPES
from commlib import Topology
from commlib.errors import InvalidArgument, look_up
from pto import Norms, by_layer, by_slices, by_tensor
from pto.norms import Way
from training.bench.plan import has_ranks
from training.bench.record import Record, command
from training.bench.reporting import JSONRecord, pass_on, report
from training.bench.timing import WARM_UP_RUNS
from training.commands.printing import Table, milliseconds, times
from training.process.job import LocalRank, all_or_exit, as_rank, usage_error
from training.process.tf_logging import import_tensorflow

RANKS = (2, 4)
CALLS, QUICK_CALLS = 21, 5
QUICK_NETWORKS = ("resnet50",)
OF_LARS = "resnet50"  # whose whole step is measured, too

SLICES: Way = "slices"
LAYERS: Way = "layers"
AUTO: Way = "auto"
LOCAL: Way = "local"
GRAPH = "in graph"
NORMS_PEERS: Mapping[str, Sequence[str]] = {SLICES: (LOCAL,), LAYERS: (LOCAL,), AUTO: (LOCAL,)}
LARS_PEERS: Mapping[str, Sequence[str]] = {SLICES: (LOCAL, GRAPH), LOCAL: (GRAPH,)}
OPERATIONS = {"norms": "norms of weights and gradients", "lars": "a whole step of LARS"}
# The paper's way is not one of ``Norms``: it is here to be compared with.
PARTITIONS = {SLICES: by_slices, LAYERS: by_tensor, "by layer": by_layer}


@dataclass(frozen=True)
class Sweep:
    """The options, with the defaults filled in: networks, and numbers of ranks to measure them on."""

    ranks: Sequence[int]
    networks: Sequence[str]
    calls: int
    quick: bool

    @classmethod
    def of(cls, ranks: Sequence[int], networks: Sequence[str], steps: int | None, quick: bool) -> "Sweep":
        """Return the sweep; raise ``ValueError`` for an invalid option."""
        for each in ranks:
            if each < 2:
                raise InvalidArgument(f"--ranks: expected at least 2, got {each}")
        for name in networks:
            look_up(SHAPES, "network", name)
        if steps is not None and steps < 1:
            raise InvalidArgument(f"--steps: expected at least 1, got {steps}")
        return cls(
            ranks=ranks or RANKS,
            networks=networks or (QUICK_NETWORKS if quick else tuple(SHAPES)),
            calls=steps or (QUICK_CALLS if quick else CALLS),
            quick=quick,
        )

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of a job that measures it on its ranks."""
        networks = [each for name in self.networks for each in ("--network", name)]
        quick = ["--quick"] if self.quick else []
        return ["bench", "pto", "--json", *networks, "--steps", str(self.calls), *quick]


def bench(
    as_json: bool, *, ranks: Sequence[int], networks: Sequence[str], steps: int | None, quick: bool
) -> int:
    """Print what was measured, on rank 0, and return the exit status."""
    try:
        sweep = Sweep.of(ranks, networks, steps, quick)
    except ValueError as error:
        usage_error(str(error))
    return _as_rank(sweep, ranks, as_json) if has_ranks() else _start(sweep, as_json)


def _start(sweep: Sweep, as_json: bool) -> int:
    """Start jobs of each number of ranks, and print their records."""
    return pass_on(
        _measured(sweep),
        as_json=as_json,
        show=lambda reported: _print([Record.of(each) for each in reported]),
    )


def _measured(sweep: Sweep) -> Generator[JSONRecord, None, None]:
    for ranks in sweep.ranks:
        with closing(lines(ranks, sweep.arguments)) as printed:
            for line in printed:
                if line.startswith("{"):
                    yield json.loads(line) | {"command": command()}


def _as_rank(sweep: Sweep, wanted: Sequence[int], as_json: bool) -> int:
    """Measure as one rank of a job."""
    with as_rank() as comm:
        all_or_exit(comm, lambda: _expect_ranks(wanted, comm.size))
        return report(measure(sweep, Topology(comm)), as_json=as_json, show=_print, comm=comm)


def _expect_ranks(wanted: Sequence[int], size: int) -> None:
    if any(each != size for each in wanted):
        got = ", ".join(map(str, wanted))
        raise InvalidArgument(f"--ranks: expected the {size} ranks of this job, got {got}")


@dataclass(frozen=True)
class Setting:
    """The tensors of a network, on the ranks of a job."""

    sweep: Sweep
    topology: Topology
    network: str
    tensors: Tensors

    def norms(self, *ways: Way) -> dict[str, Norms]:
        """Return the candidates, planned."""
        return {way: Norms(self.tensors.sizes, self.topology.world, partition=way) for way in ways}

    def interleave(self, candidates: Mapping[str, Callable[[], object]]) -> dict[str, Interleaved]:
        """Return the measurements of each."""
        return interleave(self.topology, candidates, self.sweep.calls)

    def records(
        self, operation: str, taken: Mapping[str, Interleaved], peers: Mapping[str, Sequence[str]]
    ) -> Iterator[Record]:
        """Yield a record for each subject and each of its peers."""
        case = {
            "operation": operation,
            "network": self.network,
            "tensors": len(self.tensors.sizes),
            "size": sum(self.tensors.sizes),
            "ranks": self.topology.world.size,
            "ranks_of_nodes": [len(node) for node in self.topology.nodes],
            "warm_up_steps": WARM_UP_RUNS,
            "quick": self.sweep.quick,
        }
        for subject, of_subject in peers.items():
            own = taken[subject]
            for peer in of_subject:
                yield Record(
                    bench="pto",
                    case=case,
                    subject=subject,
                    seconds=own.wall,
                    peer=peer,
                    peer_seconds=taken[peer].wall,
                    bytes=own.bytes,
                    more=_of_processor(own, taken[peer]),
                )


def _of_processor(own: Interleaved, peer: Interleaved) -> dict[str, Any]:
    """Return the processor's seconds of a rank, the mean over ranks and of the busiest."""
    return {
        "cpu_seconds": asdict(own.cpu),
        "cpu_seconds_of_busiest": asdict(own.cpu_of_busiest),
        "peer_cpu_seconds": asdict(peer.cpu),
        "peer_cpu_seconds_of_busiest": asdict(peer.cpu_of_busiest),
        "cpu_ratio": peer.cpu.median / own.cpu.median,
    }


def measure(sweep: Sweep, topology: Topology) -> Iterator[Record]:
    """Yield the records of one network after the other; all ranks call it together."""
    for network in sweep.networks:
        yield from _measure_norms(Setting(sweep, topology, network, Tensors.of(SHAPES[network]())))
    if OF_LARS in sweep.networks and not sweep.quick:  # at the end: TensorFlow has threads of its own
        yield from _measure_lars(Setting(sweep, topology, OF_LARS, Tensors.of(SHAPES[OF_LARS]())))


def _measure_norms(setting: Setting) -> Iterator[Record]:
    tensors, world = setting.tensors, setting.topology.world
    norms = setting.norms(SLICES, LAYERS, AUTO, LOCAL)
    check_squares(world, norms, tensors)
    taken = setting.interleave(
        {way: partial(each.squares, tensors.weights, tensors.gradients) for way, each in norms.items()}
    )
    balance = {name: cut(tensors.sizes, world.size).balance() for name, cut in PARTITIONS.items()}
    for record in setting.records("norms", taken, NORMS_PEERS):
        choice = norms[record.subject].choice
        yield replace(record, more=record.more | {"balance": balance, "choice": asdict(choice)})


def _measure_lars(setting: Setting) -> Iterator[Record]:
    import_tensorflow()
    import tensorflow as tf

    threads = LocalRank.of(setting.topology.world).threads
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    from benchmarks.lars import lars_steps

    norms = {GRAPH: None, **setting.norms(LOCAL, SLICES)}
    steps = lars_steps(setting.topology.world, setting.tensors, norms)
    yield from setting.records("lars", setting.interleave(steps), LARS_PEERS)


def tables(records: Sequence[Record]) -> Iterator[Table]:
    """Yield a table for each operation and number of ranks."""
    header = ["network", "way", "CPU\nms a rank", "busiest\nms", "baseline", "× less\nCPU", "ms", "× as fast"]
    for (ranks, operation), group in groupby(records, key=lambda each: _key(each, "ranks", "operation")):
        own = list(group)
        quick = "  (quick)" if own[0].case["quick"] else ""
        title = f"{OPERATIONS[operation]}, {ranks} ranks{quick}"
        yield Table(title, header, [_row(each) for each in own], list(_notes(own)))


def _print(records: Sequence[Record]) -> None:
    for table in tables(records):
        table.print()


def _key(record: Record, *names: str) -> tuple[Any, ...]:
    return tuple(record.case[name] for name in names)


def _row(record: Record) -> list[str]:
    more = record.more
    return [
        record.case["network"],
        record.subject,
        milliseconds(more["cpu_seconds"]["median"]),
        milliseconds(more["cpu_seconds_of_busiest"]["median"]),
        record.peer or "–",
        times(more["cpu_ratio"]),
        milliseconds(record.seconds.median),
        times(record.ratio),
    ]


def _notes(records: Sequence[Record]) -> Iterator[str]:
    runs = records[0].seconds.runs
    yield f"ms: from barrier to barrier, slowest rank; CPU: of the process; medians of {runs} calls"
    for record in records:
        if record.subject == AUTO:
            loads = ", ".join(f"{name} {each:.3f}" for name, each in record.more["balance"].items())
            yield f"{record.case['network']}: {record.more['choice']['reason']}"
            yield f"{record.case['network']}: largest load over the mean: {loads}"
