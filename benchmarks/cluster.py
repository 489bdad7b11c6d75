"""``cloudtrain bench reducers --cluster``: against all-reduces, on emulated clusters of set rates."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType, MappingProxyType
from typing import Any

from benchmarks.emulated.__main__ import ADDRESSES
from benchmarks.jobs import Failed, error_line, output
from commlib.errors import InvalidArgument, look_up
from training.bench.allreduce import KEEP_MEMORY, PEERS
from training.bench.options import BASELINE, Options
from training.bench.record import Record, command
from training.bench.reporting import JSONRecord, pass_on, with_peers
from training.bench.tables import table_of
from training.process.hosts import Ranks
from training.process.job import usage_error
from training.process.launch import cloudtrain, command_line

SCRIPT = (sys.executable, "-m", "benchmarks.emulated")

NODES, RANKS_PER_NODE = 4, 2
RATES, QUICK_RATES = ("1gbit", "10gbit"), ("1gbit",)
SIZES, QUICK_SIZES = (1_000_000, 14_728_266, 25_557_032), (1_000_000,)  # and VGG-16, ResNet-50
DENSITIES, QUICK_DENSITIES = (0.01, 0.001), (0.01,)
STEPS, PROBE_STEPS, QUICK_STEPS = 20, 5, 5
TIMEOUT_SECONDS = 3600.0
TIMED_OUT = 124

# Open MPI's own choice may send twice as much between nodes as the best, which would flatter the candidates.
DEFAULT = "default"
ALGORITHMS = {DEFAULT: None, "ring": 4, "segmented ring": 5, "Rabenseifner": 6}
BENCH = ("bench", "reducers", "--allreduce", "--json")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


@dataclass(frozen=True)
class Layout:
    """Nodes, and ranks on each.

    >>> Layout.of("4x2")
    Layout(nodes=4, ranks_per_node=2)
    """

    nodes: int
    ranks_per_node: int

    @classmethod
    def of(cls, text: str) -> "Layout":
        """Return what is written as ``4x2``."""
        found = re.fullmatch(r"([1-9]\d{0,2})x([1-9]\d{0,2})", text)
        if found is None:
            raise InvalidArgument(f"--layout: expected nodes x ranks on each, as 4x2, got {text!r}")
        layout = cls(int(found[1]), int(found[2]))
        if layout.nodes > len(ADDRESSES):
            raise InvalidArgument(f"--layout: expected at most {len(ADDRESSES)} nodes, got {text}")
        if layout.ranks < 2:
            raise InvalidArgument(f"--layout: expected two ranks or more, got {text}")
        return layout

    def __str__(self) -> str:
        """Return it as it is written."""
        return f"{self.nodes}x{self.ranks_per_node}"

    @property
    def ranks(self) -> int:
        """Return the ranks of a job."""
        return self.nodes * self.ranks_per_node

    @property
    def hosts(self) -> str:
        """Return the nodes and how many ranks each has, as ``-H`` takes them."""
        return ",".join(f"node{number}:{self.ranks_per_node}" for number in range(1, self.nodes + 1))


@dataclass(frozen=True)
class Sweep:
    """The options, with the defaults filled in: cases, and clusters to measure them on."""

    options: Options
    layout: Layout
    rates: Sequence[str]
    sizes: Sequence[int]
    densities: Sequence[float]
    steps: int
    algorithms: Sequence[str]
    timeout: float

    @classmethod
    def of(cls, options: Options) -> "Sweep":
        """Return the sweep; raise ``InvalidArgument`` if there is one rank only."""
        quick = options.quick
        sweep = cls(
            options=options,
            layout=Layout(options.nodes or NODES, options.ranks_per_node or RANKS_PER_NODE),
            rates=options.rates or (QUICK_RATES if quick else RATES),
            sizes=options.sizes or (QUICK_SIZES if quick else SIZES),
            densities=options.densities or (QUICK_DENSITIES if quick else DENSITIES),
            steps=options.steps or (QUICK_STEPS if quick else STEPS),
            algorithms=[options.algorithm] if options.algorithm else list(ALGORITHMS),
            timeout=options.timeout or TIMEOUT_SECONDS,
        )
        for algorithm in sweep.algorithms:
            look_up(ALGORITHMS, "algorithm", algorithm)
        if sweep.layout.ranks < 2:
            raise InvalidArgument("--nodes, --ranks-per-node: expected two ranks or more, got 1")
        return sweep

    def probing(self, size: int) -> list[str]:
        """Return the arguments of a job that times MPI's all-reduce against ours, without TensorFlow."""
        return self._arguments(size, PROBE_STEPS, "--reducer", BASELINE, "--no-horovod")

    def retaining(self, size: int) -> list[str]:
        """Return the arguments of a job that measures the all-reduces, whose freed memory is retained."""
        return self._arguments(size, self.steps, "--reducer", BASELINE, *self._without_horovod)

    def measuring(self, size: int, density: float) -> list[str]:
        """Return the arguments of a job that measures candidates of this density; none if there are none.

        Dense candidates are measured with the first density.
        """
        candidates = list(self.options.candidates())
        if density != self.densities[0]:
            candidates = [each for each in candidates if each.sparse]
        if not candidates:
            return []
        names = dict.fromkeys(each.name for each in candidates)
        wires = self.options.wires if any(each.sparse for each in candidates) else ()
        repeated = [("--reducer", name) for name in names] + [("--wire", wire) for wire in wires]
        given = [each for option in repeated for each in option]
        return self._arguments(size, self.steps, "--density", str(density), *given, *self._without_horovod)

    @property
    def _without_horovod(self) -> list[str]:
        return [] if self.options.horovod else ["--no-horovod"]

    def _arguments(self, size: int, steps: int, *more: str) -> list[str]:
        quick = ["--quick"] if self.options.quick else []
        return [*BENCH, "--size", str(size), "--steps", str(steps), *more, *quick]


class EmulatedCluster:
    """The emulated cluster of a state folder of its own."""

    def __init__(self, state: Path) -> None:
        self._command = [*SCRIPT, "--state", str(state)]

    def up(self, nodes: int, rate: str) -> None:
        """Make it, or make it again where nodes or rate are others."""
        result = self._call("up", "--nodes", str(nodes), f"--rate={rate}")
        if result.returncode != 0:
            raise Failed(f"--cluster: {error_line(result.stderr.splitlines())}")

    def down(self) -> None:
        """Remove it, if it is there."""
        self._call("down")

    def _call(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*self._command, *arguments], capture_output=True, text=True, check=False)

    def lines(self, command: Sequence[str], environment: Mapping[str, str], timeout: float) -> Iterator[str]:
        """Run a command on the first node and yield its output, line by line.

        Raises :class:`Failed` if it does not end, or fails.
        """
        command = [*self._command, "run", "--timeout", f"{timeout:g}", "--", *command]
        status, line = yield from output(command, environment)
        if status == TIMED_OUT:
            raise Failed(f"expected an end within {timeout:g} s (--timeout), got none")
        if status != 0:
            raise Failed(f"status {status}: {line}")


def bench(as_json: bool, **options: Any) -> int:
    """Print the records of all reducers on all clusters, and return the exit status."""
    try:
        sweep = Sweep.of(Options(**options))
    except ValueError as error:
        usage_error(str(error))
    return pass_on(_measured(sweep), as_json=as_json, show=_print_tables)


def _measured(sweep: Sweep) -> Generator[JSONRecord, None, None]:
    """Yield the records; however this ends, the cluster is gone."""
    with cluster_until_end() as cluster:
        for rate in sweep.rates[1:]:  # one that tc refuses is reported now, not after an hour
            cluster.up(sweep.layout.nodes, rate)
        for rate in sweep.rates:
            cluster.up(sweep.layout.nodes, rate)
            for size in sweep.sizes:
                for reported in _measured_size(sweep, cluster, size):
                    reported["case"] |= {"rate": rate}
                    reported["command"] = command()
                    yield reported


@contextmanager
def cluster_until_end() -> Iterator[EmulatedCluster]:
    """Yield a cluster that is not up yet; however the block ends, it is gone."""
    before = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    with TemporaryDirectory(prefix="cloudtrain-bench-") as folder:
        cluster = EmulatedCluster(Path(folder) / "state")
        try:
            yield cluster
        finally:
            cluster.down()
            for number, handler in before.items():
                signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _measured_size(sweep: Sweep, cluster: EmulatedCluster, size: int) -> Iterator[JSONRecord]:
    """Yield the records of probing MPI's algorithms, then those with the best of them."""
    probed = []
    for algorithm in sweep.algorithms if len(sweep.algorithms) > 1 else ():
        for reported in _run(sweep, cluster, sweep.probing(size), algorithm):
            if reported["subject"] == BASELINE:
                probed.append(reported)
                yield reported | {"bench": "probe"}
    algorithm = best_algorithm(probed) if probed else sweep.algorithms[0]
    retained = [
        reported | {"subject": f"{reported['subject']}, memory kept"}
        for reported in _run(sweep, cluster, sweep.retaining(size), algorithm, KEEP_MEMORY)
        if reported["subject"] in PEERS
    ]
    for density in sweep.densities:
        arguments = sweep.measuring(size, density)
        for reported in _run(sweep, cluster, arguments, algorithm) if arguments else ():
            if density == sweep.densities[0] or reported["subject"] not in PEERS:
                yield with_peers(reported, retained)
    yield from retained


def best_algorithm(probed: Iterable[JSONRecord]) -> str:
    """Return the algorithm with which MPI took the least against ``dense`` of the same job."""
    fastest = min(probed, key=lambda run: run["peer_seconds"]["median"] / run["seconds"]["median"])
    return str(fastest["case"]["mpi_algorithm"])


def _run(
    sweep: Sweep,
    cluster: EmulatedCluster,
    arguments: Sequence[str],
    algorithm: str,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[JSONRecord]:
    """Yield the records of one job on all nodes; ``settings`` are added to its environment."""
    job = command_line(Ranks(sweep.layout.ranks, sweep.layout.hosts), cloudtrain(*arguments))
    what = " ".join(arguments[arguments.index("--size") :])
    note(f"{what} (all-reduce of MPI: {algorithm}{', memory kept' if settings else ''})")
    try:
        for line in cluster.lines(job, {**environment(algorithm), **settings}, sweep.timeout):
            if line.startswith("{"):
                reported = json.loads(line)
                reported["case"] |= {"mpi_algorithm": algorithm}
                yield reported
    except Failed as failure:
        raise Failed(f"--cluster: {what}: {failure}") from None


def environment(algorithm: str) -> dict[str, str]:
    """Return the environment of a job in which MPI and Horovod all-reduce by this algorithm."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_MCA_coll")}
    number = ALGORITHMS[algorithm]
    if number is None:
        return inherited | ONE_THREAD
    return inherited | {
        **ONE_THREAD,
        "OMPI_MCA_coll": "^han",  # which would choose for itself, on several nodes
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_allreduce_algorithm": str(number),
    }


def note(line: str) -> None:
    """Report progress, apart from what is measured."""
    print(f"cloudtrain: {line}", file=sys.stderr, flush=True)


def _print_tables(reported: Sequence[JSONRecord]) -> None:
    """Print a table for each rate and size."""
    records = [Record.of(each) for each in reported if each["bench"] != "probe"]
    for _, own in groupby(records, key=lambda record: (record.case["rate"], record.case["size"])):
        table_of(list(own)).print()
