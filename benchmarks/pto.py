"""Norms in parts on real ranks, against every rank computing all of them; and whole steps of LARS with them.

python -m benchmarks.pto                # starts two and four ranks on this machine
mpirun -np 2 python -m benchmarks.pto   # on the ranks of this job
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import typer
from typer import Option

from benchmarks.jobs import module, on_this_machine, pass_on
from benchmarks.shapes import SHAPES, Shape
from commlib import Communicator, LinkBytes, Topology
from commlib.agreement import differing, digest
from commlib.tuning.probe import SEED
from commlib.vectors import Float32
from pto import Norms, by_layer, by_slices, by_tensor
from training.bench.record import WARM_UP_RUNS, Record, Seconds, WrongResult, busiest, cache_bytes, report
from training.bench.reducers import FLOAT32_ROUNDING, has_ranks
from training.commands.printing import Table, milliseconds, times
from training.process.job import LocalRank, all_or_exit, as_rank
from training.process.tf_logging import import_tensorflow

RANKS = (2, 4)
CALLS = 21
OF_LARS = "resnet50"  # whose whole step is measured, too

SLICES, LAYERS, AUTO, LOCAL = WAYS = ("slices", "layers", "auto", "local")
GRAPH = "in graph"
NORMS_PEERS = [(SLICES, LOCAL), (LAYERS, LOCAL), (AUTO, LOCAL)]
LARS_PEERS = [(SLICES, LOCAL), (SLICES, GRAPH), (LOCAL, GRAPH)]
OPERATIONS = {"norms": "norms of weights and gradients", "lars": "a whole step of LARS"}
# The paper's way is not one of ``Norms``: it is here to be compared with.
PARTITIONS = {SLICES: by_slices, LAYERS: by_tensor, "by layer": by_layer}
BLOCK_ENTRIES = 1 << 20
RATE, DECAY, TRUST = 0.1, 0.01, 0.001  # of LARS
STEP_ERROR = 1e-3  # sums of squares in float32, which the graph has, and the few operations after them
EPSILON = 2.0**-53  # the relative error of one float64 operation
# Of a sum that NumPy adds in pairs of halves down to 128 entries, which it adds eight at a time.
REFERENCE_OPERATIONS = 40


@dataclass(frozen=True)
class Calls:
    """Calls of a candidate by all ranks.

    ``wall``: seconds from barrier to barrier, on the slowest rank. ``cpu``, ``cpu_of_busiest``: of the
    processor, the mean over ranks and the most. ``bytes``: of the rank that sends most, in the last call.
    """

    wall: Seconds
    cpu: Seconds
    cpu_of_busiest: Seconds
    bytes: LinkBytes

    @classmethod
    def of(cls, calls: Sequence[Sequence[tuple[float, float, LinkBytes]]]) -> "Calls":
        cpu = [[each for _, each, _ in ranks] for ranks in calls]
        return cls(
            wall=Seconds.of([max(wall for wall, _, _ in ranks) for ranks in calls]),
            cpu=Seconds.of([fmean(ranks) for ranks in cpu]),
            cpu_of_busiest=Seconds.of([max(ranks) for ranks in cpu]),
            bytes=busiest(sent for _, _, sent in calls[-1]),
        )


def interleave(topology: Topology, candidates: Mapping[str, Callable[[], object]]) -> dict[str, Calls]:
    """Return ``CALLS`` calls of each candidate, after the first ones, which do not count; collective."""
    world = topology.world
    taken: dict[str, list[tuple[float, float, LinkBytes]]] = {name: [] for name in candidates}
    # In training the caches hold other data in between. Else the small part of a rank would stay in them.
    between = np.zeros(2 * cache_bytes() // 4, np.float32)
    for _ in range(WARM_UP_RUNS + CALLS):
        for name, candidate in candidates.items():
            between += 1
            before = topology.traffic
            world.barrier()
            start, used = world.now(), time.process_time()
            candidate()
            cpu = time.process_time() - used
            world.barrier()
            taken[name].append((world.now() - start, cpu, (topology.traffic - before).sent))
    reported = {name: world.allgather_objects(own[WARM_UP_RUNS:]) for name, own in taken.items()}
    return {name: Calls.of(list(zip(*each, strict=True))) for name, each in reported.items()}


def raise_if_wrong(comm: Communicator, name: str, problem: str) -> None:
    """Raise :class:`WrongResult` on all ranks where one of them has a problem."""
    if found := next(filter(None, comm.allgather_objects(problem)), ""):
        raise WrongResult(f"{name}: {found}")


@dataclass(frozen=True)
class Tensors:
    """Weights and gradients, float32, the same on all ranks."""

    weights: Sequence[Float32]
    gradients: Sequence[Float32]

    @classmethod
    def of(cls, shapes: Sequence[Shape]) -> "Tensors":
        """Draw them; each has a scale of its own."""
        generator = np.random.default_rng(SEED)
        block = generator.standard_normal(BLOCK_ENTRIES, np.float32)

        def drawn() -> list[Float32]:
            tensors = [np.resize(block, shape) for shape in shapes]
            for tensor in tensors:
                tensor *= np.float32(10 ** generator.uniform(-3, 0))
            return tensors

        return cls(drawn(), drawn())

    @property
    def sizes(self) -> list[int]:
        return [weight.size for weight in self.weights]


def _sum_of_squares(tensor: Float32) -> float:
    flat = tensor.reshape(-1)
    blocks = (flat[low : low + BLOCK_ENTRIES] for low in range(0, flat.size, BLOCK_ENTRIES))
    return math.fsum(float(np.square(block, dtype=np.float64).sum()) for block in blocks)


def check_squares(comm: Communicator, candidates: dict[str, Norms], tensors: Tensors) -> None:
    """Raise ``WrongResult`` on all ranks where sums are wrong, or not the same on all ranks."""
    of_both = (tensors.weights, tensors.gradients)
    # By rank 0 alone, independent of the candidates.
    expected = [[_sum_of_squares(each) for each in own] for own in of_both] if comm.rank == 0 else None
    # The bound of the kernel, then a sum over ranks, and the error of the reference.
    operations = np.array(tensors.sizes) / 64 + 7 + comm.size + REFERENCE_OPERATIONS
    for name, norms in candidates.items():
        squares = norms.squares(tensors.weights, tensors.gradients)
        others = differing(comm.allgather_ints([digest([squares.tobytes()])])[:, 0])
        problem = f"ranks {others} hold other sums of squares than rank 0" if others else ""
        if expected is not None and not problem:
            is_right = np.abs(squares - expected) <= operations * EPSILON * np.array(expected)
            wrong = np.count_nonzero(~is_right)  # ~: a NaN is wrong, too
            problem = f"{wrong} of {squares.size} sums of squares are wrong" if wrong else ""
        raise_if_wrong(comm, name, problem)


def lars_steps(
    comm: Communicator, tensors: Tensors, norms: Mapping[str, Norms | None]
) -> dict[str, Callable[[], object]]:
    """Return a step of LARS for each of ``norms``, checked by the formula, all on the same variables."""
    import keras
    import tensorflow as tf

    from pto.keras import LARS

    variables = [
        keras.Variable(weight, name="kernel" if weight.ndim > 1 else "gamma") for weight in tensors.weights
    ]
    gradients = [tf.constant(gradient) for gradient in tensors.gradients]
    steps = {}
    for name, each in norms.items():
        for variable, weight in zip(variables, tensors.weights, strict=True):
            variable.assign(weight)
        optimizer = LARS(RATE, weight_decay=DECAY, trust=TRUST, norms=each)
        optimizer.build(variables)
        steps[name] = tf.function(partial(optimizer.apply, gradients, variables))
        steps[name]()
        raise_if_wrong(comm, f"LARS, {name}", _fault_of_step(variables, tensors))
    return steps


def _fault_of_step(variables: Sequence[Any], tensors: Tensors) -> str:
    """Return the fault of the weights after one step, an empty text if there is none."""
    for number, (variable, weight, gradient) in enumerate(
        zip(variables, tensors.weights, tensors.gradients, strict=True)
    ):
        wide, slope = weight.astype(np.float64), gradient.astype(np.float64)
        step = RATE * slope
        if weight.ndim > 1:  # no bias and no normalisation
            size, steepness = np.linalg.norm(wide), np.linalg.norm(slope)
            step = RATE * TRUST * size / (steepness + DECAY * size) * (slope + DECAY * wide)
        expected = weight - step
        allowed = STEP_ERROR * np.abs(step) + 2 * FLOAT32_ROUNDING * np.abs(expected)
        if wrong := np.count_nonzero(~(np.abs(variable.numpy() - expected) <= allowed)):
            return f"{wrong} of {weight.size} weights of tensor {number} are wrong after a step"
    return ""


@dataclass(frozen=True)
class Setting:
    """The tensors of a network, on the ranks of a job."""

    topology: Topology
    network: str
    tensors: Tensors

    def norms(self, *ways: Any) -> dict[str, Norms]:
        return {way: Norms(self.tensors.sizes, self.topology.world, partition=way) for way in ways}

    def records(
        self, operation: str, candidates: Mapping[str, Callable[[], object]], pairs: Iterable[tuple[str, str]]
    ) -> Iterator[Record]:
        taken = interleave(self.topology, candidates)
        case = {
            "operation": operation,
            "network": self.network,
            "tensors": len(self.tensors.sizes),
            "size": sum(self.tensors.sizes),
            "ranks": self.topology.world.size,
            "ranks_of_nodes": [len(node) for node in self.topology.nodes],
            "warm_up_steps": WARM_UP_RUNS,
        }
        for subject, peer in pairs:
            own, beside = taken[subject], taken[peer]
            more = {
                "cpu_seconds": asdict(own.cpu),
                "cpu_seconds_of_busiest": asdict(own.cpu_of_busiest),
                "peer_cpu_seconds": asdict(beside.cpu),
                "peer_cpu_seconds_of_busiest": asdict(beside.cpu_of_busiest),
                "cpu_ratio": beside.cpu.median / own.cpu.median,
            }
            record = Record("pto", case, subject, own.wall, bytes=own.bytes, more=more)
            yield record.beside(peer, beside.wall)


def measure(topology: Topology) -> Iterator[Record]:
    """Yield the records of one network after the other; all ranks call it together."""
    for network, shapes in SHAPES.items():
        yield from _measure_norms(Setting(topology, network, Tensors.of(shapes())))
    # At the end: TensorFlow has threads of its own.
    yield from _measure_lars(Setting(topology, OF_LARS, Tensors.of(SHAPES[OF_LARS]())))


def _measure_norms(setting: Setting) -> Iterator[Record]:
    tensors, world = setting.tensors, setting.topology.world
    norms = setting.norms(*WAYS)
    check_squares(world, norms, tensors)
    squares = {way: partial(each.squares, tensors.weights, tensors.gradients) for way, each in norms.items()}
    balance = {name: cut(tensors.sizes, world.size).balance() for name, cut in PARTITIONS.items()}
    for record in setting.records("norms", squares, NORMS_PEERS):
        choice = norms[record.subject].choice
        yield replace(record, more=record.more | {"balance": balance, "choice": asdict(choice)})


def _measure_lars(setting: Setting) -> Iterator[Record]:
    import_tensorflow()
    import tensorflow as tf

    threads = LocalRank.of(setting.topology.world).threads
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    norms = {GRAPH: None, **setting.norms(LOCAL, SLICES)}
    steps = lars_steps(setting.topology.world, setting.tensors, norms)
    yield from setting.records("lars", steps, LARS_PEERS)


def tables(records: Sequence[Record]) -> Iterator[Table]:
    header = ["network", "way", "CPU\nms a rank", "busiest\nms", "baseline", "× less\nCPU", "ms", "× as fast"]
    cases = groupby(records, key=lambda each: (each.case["ranks"], each.case["operation"]))
    for (ranks, operation), group in cases:
        own = list(group)
        title = f"{OPERATIONS[operation]}, {ranks} ranks"
        yield Table(title, header, [_row(each) for each in own], list(_notes(own)))


def show(records: Sequence[Record]) -> None:
    for table in tables(records):
        table.print()


def _row(record: Record) -> list[str]:
    more = record.more
    cpu, of_busiest = (more[key]["median"] for key in ("cpu_seconds", "cpu_seconds_of_busiest"))
    return [
        *(record.case["network"], record.subject, milliseconds(cpu), milliseconds(of_busiest)),
        *(record.peer or "–", times(more["cpu_ratio"])),
        *(milliseconds(record.seconds.median), times(record.ratio)),
    ]


def _notes(records: Sequence[Record]) -> Iterator[str]:
    runs = records[0].seconds.runs
    yield f"ms: from barrier to barrier, slowest rank; CPU: of the process; medians of {runs} calls"
    for record in records:
        if record.subject == AUTO:
            loads = ", ".join(f"{name} {each:.3f}" for name, each in record.more["balance"].items())
            yield f"{record.case['network']}: {record.more['choice']['reason']}"
            yield f"{record.case['network']}: largest load over the mean: {loads}"


def main(as_json: Annotated[bool, Option("--json")] = False) -> None:
    """Time norms that ranks share, and steps of LARS with them; see the module's docstring."""
    if not has_ranks():
        words = module("benchmarks.pto", "--json")
        records = (record for ranks in RANKS for record in on_this_machine(ranks, words))
        raise typer.Exit(pass_on(records, as_json=as_json, show=show))
    with as_rank() as comm:
        topology = all_or_exit(comm, lambda: Topology(comm))
        raise typer.Exit(report([measure(topology)], as_json=as_json, show=show, comm=comm))


if __name__ == "__main__":
    typer.run(main)
