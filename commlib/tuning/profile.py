"""The measured speeds of a job's links and machines, stored in a file and used to choose a reducer."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from commlib.cost import Speeds
from commlib.errors import InvalidArgument, one_line, shown
from commlib.network import Link, Network

FORMAT = 2  # of the file
LARGEST = 1 << 63  # bound of all numbers in a profile
WIRES = ("fp32", "gap+fp16")  # the codecs that are measured and chosen from


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@dataclass(frozen=True)
class Job:
    """What a profile belongs to: the hosts, their processors, and how many ranks each node has."""

    hosts: tuple[str, ...]
    processors: tuple[str, ...]
    ranks_of_nodes: tuple[int, ...]

    def __str__(self) -> str:
        ranks, nodes = sum(self.ranks_of_nodes), len(self.ranks_of_nodes)
        on = "1 node" if nodes == 1 else f"{nodes} nodes"
        return f"{ranks} rank{'s' * (ranks > 1)} on {on} of {', '.join(self.hosts)}"


@dataclass(frozen=True)
class Candidate:
    """A reducer and its wire codec; none for one that sends no entries."""

    reducer: str
    wire: str | None = None

    def __str__(self) -> str:
        return f"{self.reducer} with {self.wire}" if self.wire else self.reducer


@dataclass(frozen=True)
class Trial:
    """The median seconds of some steps of a reducer, on a gradient of ``size`` entries."""

    candidate: Candidate
    size: int
    density: float
    seconds: float


@dataclass(frozen=True)
class Profile:
    """Links and speeds of a job, and reducers that were tried there."""

    job: Job
    network: Network
    speeds: Speeds
    trials: tuple[Trial, ...] = ()

    def save(self, path: Path) -> None:
        """Write the profile to a file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.new")
        aside.write_text(json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n")
        aside.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Return what ``save`` wrote; ``InvalidArgument`` names the file that is none, in one line."""
        try:
            return cls._of(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise InvalidArgument(one_line(f"{path}: no such profile")) from None
        except (OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            what = f"({type(error).__name__}: {str(error) or 'nested too deep'})"
            raise InvalidArgument(
                one_line(f"{path}: expected a profile of format {FORMAT}, got something else {what}")
            ) from error

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> "Profile":
        if content["format"] != FORMAT:
            raise ValueError(f"format {shown(content['format'])}")
        job = Job(**{key: tuple(value) for key, value in content["job"].items()})
        _check("job.hosts", job.hosts, str)
        _check("job.processors", job.processors, str)
        _check("job.ranks_of_nodes", job.ranks_of_nodes, int)
        network = Network(**{name: _link(name, link) for name, link in content["network"].items()})
        speeds = Speeds(**content["speeds"])
        _check("speeds.code", [speeds.code], dict)
        named = {name: seconds for name, seconds in asdict(speeds).items() if name != "code"}
        _check("speeds", [*named.values(), *speeds.code.values()], float, int)
        if missing := [wire for wire in WIRES if wire not in speeds.code]:
            raise ValueError(f"speeds.code: expected {', '.join(WIRES)}, got no {missing[0]}")
        return cls(job, network, speeds, tuple(map(_trial, content["trials"])))

    def check(self, job: Job) -> None:
        """Raise ``InvalidArgument`` where the profile was measured in another job than this one."""
        if self.job != job:
            raise InvalidArgument(
                one_line(f"expected a profile of {job}, got one of {self.job}{_which(self.job, job)}")
            )


def _check(key: str, values: Sequence[Any], *kinds: type) -> None:
    """Raise ``ValueError`` for a value of another type, and for a number out of range."""
    for value in values:
        if type(value) not in kinds or (type(value) in (int, float) and not 0 <= value < LARGEST):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{key}: expected {names} from 0, got {shown(value)}")


def _link(name: str, content: Mapping[str, Any]) -> Link:
    _check(f"network.{shown(name)[1:-1]}", list(content.values()), float, int)
    return Link(**content)


def _trial(content: Mapping[str, Any]) -> Trial:
    """Return a trial, whose reducer and wire may be unknown: predicting it then raises an error."""
    trial = Trial(**{**content, "candidate": Candidate(**content["candidate"])})
    _check("trials.size", [trial.size], int)
    _check("trials.density, seconds", [trial.density, trial.seconds], float, int)
    _check("trials.candidate", [trial.candidate.reducer], str)
    _check("trials.candidate.wire", [trial.candidate.wire], str, type(None))
    if not (trial.size > 0 and 0 < trial.density <= 1 and trial.seconds > 0):
        raise ValueError(
            f"trials: expected a size, a density up to 1 and seconds above 0, got {shown(content)}"
        )
    return trial


def _which(there: Job, here: Job) -> str:
    """Return what differs, where the summaries of both jobs are equal."""
    if str(there) != str(here):
        return ""
    return f" ({list(there.processors)} there, {list(here.processors)} here)"
