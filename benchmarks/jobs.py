"""Jobs that a bench starts, with mpirun on this machine or on an emulated cluster, and what they print."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.emulated.__main__ import ADDRESSES, TIMED_OUT, exit_on_signal
from commlib import LinkBytes
from commlib.errors import InvalidArgument
from training.bench.record import Record, Seconds, command
from training.process.hosts import Ranks
from training.process.job import FAILURE, INTERRUPTED, log_error
from training.process.launch import KNOWN_ALREADY, RANK_TAG, command_line, is_noise

EMULATED = (sys.executable, "-m", "benchmarks.emulated")
MPIRUN = Path(sys.executable).with_name("mpirun")
# There may be more ranks than cores: a rank that waits yields its core.
FLAGS = (
    *("--allow-run-as-root", "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"),
    *("--mca", "mpi_yield_when_idle", "1"),
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
OWN = ("cloudtrain: ", "cluster: ")
NO_ERROR = ("cloudtrain: warning: ", "cloudtrain: compiling CPU kernels ")
# Open MPI's own choice may send twice as much between nodes as the best, which would flatter the candidates.
DEFAULT = "default"
ALGORITHMS = {DEFAULT: None, "ring": 4, "segmented ring": 5, "Rabenseifner": 6}


class Failed(Exception):
    """A cluster that does not come up, or a job that failed; the message is one line."""


def module(name: str, *words: str) -> list[str]:
    return [sys.executable, "-m", name, *words]


def output(
    command: Sequence[str], environment: Mapping[str, str], timeout: float | None = None
) -> Iterator[str]:
    """Yield the lines that a command prints, without tags of ranks; raises :class:`Failed` if it fails."""
    pipe, errors = subprocess.PIPE, list[str]()
    try:
        process = subprocess.Popen(
            command, env=environment, stdout=pipe, stderr=pipe, text=True, errors="replace"
        )
    except FileNotFoundError:
        raise Failed("mpirun is not installed next to this Python: run ./scripts/install.sh") from None
    with process:
        reading = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
        reading.start()
        try:
            for line in process.stdout:
                yield RANK_TAG.sub("", line)
        except BaseException:
            process.terminate()  # it ends all processes that it has started
            raise
        reading.join()
    if process.returncode == TIMED_OUT and timeout is not None:
        raise Failed(f"expected an end within {timeout:g} s, got none")
    if process.returncode != 0:
        raise Failed(f"status {process.returncode}: {error_line(errors)}")


def error_line(lines: Iterable[str]) -> str:
    """Return the line that reports an error: the first of our own, else the last before MPI's message."""
    untagged = (RANK_TAG.sub("", line).strip("\0\n ") for line in lines)
    before_banner = takewhile(lambda line: not KNOWN_ALREADY.match(line), untagged)
    reported = [line for line in before_banner if line.strip("-") and not is_noise(line)]
    errors = [line for line in reported if line.startswith(OWN) and not line.startswith(NO_ERROR)]
    own = [line.partition(": ")[2] for line in errors]
    return next(iter(own or reported[-1:]), "no error was reported")


def objects_in(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in lines if line.startswith("{"))


def on_this_machine(ranks: int, words: Sequence[str]) -> Iterator[Record]:
    """Run a command on so many ranks; yield the records that it prints; raise :class:`Failed` if it fails."""
    command = [str(MPIRUN), *FLAGS, "-np", str(ranks), *words]
    yield from map(record_of, objects_in(output(command, {**os.environ, **ONE_THREAD})))


@dataclass(frozen=True)
class Layout:
    """Nodes, and ranks on each, written as ``4x2``."""

    nodes: int
    ranks_per_node: int

    @classmethod
    def of(cls, text: str) -> "Layout":
        found = re.fullmatch(r"([1-9]\d{0,2})x([1-9]\d{0,2})", text)
        layout = cls(int(found[1]), int(found[2])) if found else None
        if layout is None or layout.ranks < 2 or layout.nodes > len(ADDRESSES):
            raise InvalidArgument(
                f"layout: expected nodes x ranks on each, as 4x2, two ranks or more, got {text}"
            )
        return layout

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def world(nodes: Sequence[int]) -> str:
    """Return in words how many ranks are on how many nodes: 4 nodes × 2 ranks, 2 nodes of 3 and 1 ranks."""
    if len(set(nodes)) == 1:
        return f"{len(nodes)} nodes × {nodes[0]} rank{'s' if nodes[0] > 1 else ''}"
    return f"{len(nodes)} nodes of {' and '.join(map(str, nodes))} ranks"


class EmulatedCluster:
    """An emulated cluster; ``folder``: of its state, and of what its jobs read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self._command = [*EMULATED, "--state", str(self.state)]

    def up(self, nodes: int, rate: str, delay: float = 0.0) -> None:
        """Make it, or make it again where nodes, rate or the delay in ms are others."""
        result = self._call("up", "--nodes", str(nodes), f"--rate={rate}", f"--delay={delay:g}")
        if result.returncode != 0:  # the last line says why, one before it may say that it is built again
            raise Failed(error_line(result.stderr.splitlines()[-1:]))

    def down(self) -> None:
        self._call("down")

    def write(self, name: str, content: Any) -> str:
        """Write a file for jobs to read, in JSON, which is YAML, too; return its path."""
        file = self.folder / name
        file.write_text(json.dumps(content))
        return str(file)

    def _call(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*self._command, *arguments], capture_output=True, text=True, check=False)

    def objects(
        self, layout: Layout, words: Sequence[str], environment: Mapping[str, str], timeout: float, what: str
    ) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects that a command prints on all ranks; ``Failed`` names ``what`` it is."""
        print(f"cloudtrain: {what}", file=sys.stderr, flush=True)
        hosts = ",".join(f"node{number}:{layout.ranks_per_node}" for number in range(1, layout.nodes + 1))
        job = command_line(Ranks(layout.ranks, hosts, "eth0"), words, environment)
        command = [*self._command, "run", "--timeout", f"{timeout:g}", "--", *job]
        try:
            yield from objects_in(output(command, environment, timeout))
        except Failed as failure:
            raise Failed(f"{what}: {failure}") from None


@contextmanager
def cluster_until_end() -> Iterator[EmulatedCluster]:
    """Yield a cluster that is not up yet; however the block ends, it is removed.

    A failure ends this process with one line.
    """
    before = {number: signal.signal(number, exit_on_signal) for number in (signal.SIGTERM, signal.SIGHUP)}
    with TemporaryDirectory(prefix="cloudtrain-bench-") as folder:
        cluster = EmulatedCluster(Path(folder))
        try:
            yield cluster
        except Failed as failure:
            log_error(str(failure))
            sys.exit(FAILURE)
        finally:
            cluster.down()
            for number, handler in before.items():
                signal.signal(number, handler)


def environment(algorithm: str) -> dict[str, str]:
    """Return the environment of a job in which MPI and Horovod all-reduce by this algorithm."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_MCA_coll")}
    inherited |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if algorithm == DEFAULT:
        return inherited
    return inherited | {
        "OMPI_MCA_coll": "^han",  # which would choose for itself, on several nodes
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_allreduce_algorithm": str(ALGORITHMS[algorithm]),
    }


def ratio(other: float | None, own: float | None) -> float | None:
    """Return how many times as long another one takes, if there are both."""
    return None if other is None or own is None else other / own


def record_of(line: Mapping[str, Any]) -> Record:
    """Return the record whose ``line`` holds these keys; machine, settings and command go to ``more``."""
    own = {each.name for each in fields(Record)} & line.keys()
    more = {key: value for key, value in line.items() if key not in own | {"ratio"}}
    given: dict[str, Any] = {key: line[key] for key in own}
    for key, kind in {"seconds": Seconds, "peer_seconds": Seconds, "bytes": LinkBytes}.items():
        given[key] = given[key] and kind(**given[key])
    return Record(**given, more=more)


def pass_on(
    reported: Generator[Record, None, None], *, as_json: bool, show: Callable[[list[Record]], None]
) -> int:
    """Print the records of jobs, also those of a sweep that breaks off, and return the exit status."""
    so_far: list[Record] = []
    try:
        with closing(reported):
            for each in reported:
                so_far.append(each)
                if as_json:
                    print(replace(each, more=each.more | {"command": command()}).line(), flush=True)
    except Failed as failure:
        log_error(str(failure))
        return FAILURE
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if not as_json and so_far:
            show(so_far)
    return 0
