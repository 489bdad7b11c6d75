"""``cloudtrain bench reducers --cluster``: against all-reduces, on emulated clusters of set rates."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType, MappingProxyType
from typing import Any

from commlib.errors import InvalidArgument, look_up
from commlib.tf_logging import NOISE
from training.bench import emulated
from training.bench.allreduce import KEEP_MEMORY, PEERS
from training.bench.jobs import Failed
from training.bench.options import BASELINE, Options
from training.bench.record import Record, command
from training.bench.reporting import JSONRecord, pass_on, with_peers
from training.bench.tables import print_records
from training.process.job import usage_error
from training.process.launch import LEFT_ALREADY, RANK_TAG, SAID_ALREADY, Ranks, cloudtrain, command_line

SCRIPT = Path(emulated.__file__).with_name("__main__.py")

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
OWN = ("cloudtrain: ", "cluster: ")
GOES_ON = ("cloudtrain: warning: ", "cloudtrain: compiling kernels ")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


@dataclass(frozen=True)
class Sweep:
    """What is measured on which clusters: the options, with the defaults filled in."""

    options: Options
    nodes: int
    ranks_per_node: int
    rates: Sequence[str]
    sizes: Sequence[int]
    densities: Sequence[float]
    steps: int
    algorithms: Sequence[str]
    timeout: float

    @classmethod
    def of(cls, options: Options) -> "Sweep":
        """Return it; raise ``InvalidArgument`` where there is nobody to send anything to."""
        quick = options.quick
        sweep = cls(
            options=options,
            nodes=options.nodes or NODES,
            ranks_per_node=options.ranks_per_node or RANKS_PER_NODE,
            rates=options.rates or (QUICK_RATES if quick else RATES),
            sizes=options.sizes or (QUICK_SIZES if quick else SIZES),
            densities=options.densities or (QUICK_DENSITIES if quick else DENSITIES),
            steps=options.steps or (QUICK_STEPS if quick else STEPS),
            algorithms=[options.algorithm] if options.algorithm else list(ALGORITHMS),
            timeout=options.timeout or TIMEOUT_SECONDS,
        )
        for algorithm in sweep.algorithms:
            look_up(ALGORITHMS, "algorithm", algorithm)
        if sweep.ranks < 2:
            raise InvalidArgument("--nodes, --ranks-per-node: expected two ranks or more, got 1")
        return sweep

    @property
    def ranks(self) -> int:
        """Return the ranks of a job."""
        return self.nodes * self.ranks_per_node

    @property
    def hosts(self) -> str:
        """Return the nodes and how many ranks each has, as ``-H`` takes them."""
        return ",".join(f"node{number}:{self.ranks_per_node}" for number in range(1, self.nodes + 1))

    def probing(self, size: int) -> list[str]:
        """Return the words that time MPI's all-reduce against ours, without TensorFlow."""
        words = ["--size", str(size), "--steps", str(PROBE_STEPS), "--reducer", BASELINE, "--no-horovod"]
        return [*BENCH, *words, *self._quick]

    def keeping(self, size: int) -> list[str]:
        """Return the words that measure the all-reduces, for a job whose memory is kept."""
        words = ["--size", str(size), "--steps", str(self.steps), "--reducer", BASELINE]
        return [*BENCH, *words, *self._without_horovod, *self._quick]

    def measuring(self, size: int, density: float) -> list[str]:
        """Return the words that measure what has this density, none where nothing has.

        What has none is measured with the first density.
        """
        candidates = list(self.options.candidates())
        if density != self.densities[0]:
            candidates = [each for each in candidates if each.sparse]
        if not candidates:
            return []
        words = ["--size", str(size), "--density", str(density), "--steps", str(self.steps)]
        for name in dict.fromkeys(each.name for each in candidates):
            words += ["--reducer", name]
        wires = self.options.wires if any(each.sparse for each in candidates) else ()
        for wire in wires:
            words += ["--wire", wire]
        return [*BENCH, *words, *self._without_horovod, *self._quick]

    @property
    def _without_horovod(self) -> list[str]:
        return [] if self.options.horovod else ["--no-horovod"]

    @property
    def _quick(self) -> list[str]:
        return ["--quick"] if self.options.quick else []


class EmulatedCluster:
    """The emulated cluster of a state folder of its own."""

    def __init__(self, state: Path) -> None:
        self._words = [sys.executable, str(SCRIPT), "--state", str(state)]

    def up(self, nodes: int, rate: str) -> None:
        """Make it, or make it again where nodes or rate are others."""
        said = self._call("up", "--nodes", str(nodes), f"--rate={rate}")
        if said.returncode != 0:
            raise Failed(f"--cluster: {_last_line(said.stderr.splitlines())}")

    def down(self) -> None:
        """Remove it, if it is there."""
        self._call("down")

    def _call(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*self._words, *words], capture_output=True, text=True, check=False)

    def lines(self, words: Sequence[str], environment: Mapping[str, str], timeout: float) -> Iterator[str]:
        """Run a command on the first node and yield what it prints, line by line.

        Raises :class:`Failed` where it does not end, or not well.
        """
        words = [*self._words, "run", "--timeout", f"{timeout:g}", "--", *words]
        pipe, errors = subprocess.PIPE, list[str]()
        with subprocess.Popen(
            words, env=environment, stdout=pipe, stderr=pipe, text=True, errors="replace"
        ) as process:
            assert process.stdout is not None
            reading = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
            reading.start()
            try:
                for line in process.stdout:
                    yield RANK_TAG.sub("", line)
                reading.join()
            except BaseException:
                process.terminate()  # it ends what it has started
                raise
        if process.returncode == TIMED_OUT:
            raise Failed(f"expected an end within {timeout:g} s (--timeout), got none")
        if process.returncode != 0:
            raise Failed(f"status {process.returncode}: {_last_line(errors)}")


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
            cluster.up(sweep.nodes, rate)
        for rate in sweep.rates:
            cluster.up(sweep.nodes, rate)
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
    """Yield what probing tells of MPI's algorithms, then the records with the best of them."""
    probed = []
    for algorithm in sweep.algorithms if len(sweep.algorithms) > 1 else ():
        for reported in _run(sweep, cluster, sweep.probing(size), algorithm):
            if reported["subject"] == BASELINE:
                probed.append(reported)
                yield reported | {"bench": "probe"}
    algorithm = best_algorithm(probed) if probed else sweep.algorithms[0]
    kept = [
        reported | {"subject": f"{reported['subject']}, memory kept"}
        for reported in _run(sweep, cluster, sweep.keeping(size), algorithm, KEEP_MEMORY)
        if reported["subject"] in PEERS
    ]
    for density in sweep.densities:
        words = sweep.measuring(size, density)
        for reported in _run(sweep, cluster, words, algorithm) if words else ():
            if density == sweep.densities[0] or reported["subject"] not in PEERS:
                yield with_peers(reported, kept)
    yield from kept


def best_algorithm(probed: Iterable[JSONRecord]) -> str:
    """Return the algorithm with which MPI took the least against ``dense`` of the same job."""
    fastest = min(probed, key=lambda run: run["peer_seconds"]["median"] / run["seconds"]["median"])
    return str(fastest["case"]["mpi_algorithm"])


def _run(
    sweep: Sweep,
    cluster: EmulatedCluster,
    words: Sequence[str],
    algorithm: str,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[JSONRecord]:
    """Yield the records of one job on all nodes; ``settings`` are added to its environment."""
    job = command_line(Ranks(sweep.ranks, sweep.hosts), cloudtrain(*words))
    what = " ".join(words[words.index("--size") :])
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


def _last_line(lines: Iterable[str]) -> str:
    """Return the line that says what went wrong: the first of our own, else the last that is no noise."""
    untagged = (RANK_TAG.sub("", line).strip("\0\n ") for line in lines)
    before_banner = takewhile(lambda line: not SAID_ALREADY.match(line), untagged)  # which ends what MPI says
    reported = [line for line in before_banner if line.strip("-") and not _is_noise(line)]
    own = [line for line in reported if line.startswith(OWN) and not line.startswith(GOES_ON)]
    line = next(iter(own or reported[-1:]), "nothing was said")
    return line.removeprefix("cloudtrain: ").removeprefix("cluster: ")


def _is_noise(line: str) -> bool:
    return NOISE.search(line.encode()) is not None or LEFT_ALREADY.search(line) is not None


def note(line: str) -> None:
    """Tell the user what goes on, apart from what is measured."""
    print(f"cloudtrain: {line}", file=sys.stderr, flush=True)


def _print_tables(reported: Sequence[JSONRecord]) -> None:
    """Print a table for each rate and size."""
    records = [Record.of(each) for each in reported if each["bench"] != "probe"]
    for _, own in groupby(records, key=lambda record: (record.case["rate"], record.case["size"])):
        print_records(list(own))
