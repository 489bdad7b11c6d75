"""What a job's machines and links can do, as measured once, kept in a file, and used to choose a reducer."""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from commlib.cost import Speeds
from commlib.errors import InvalidArgument
from commlib.network import Link, Network

FORMAT = 2  # of the file
WIRES = ("fp32", "gap+fp16")  # the codecs that are measured and chosen from


def processor() -> str:
    """Return what this machine's processor is called."""
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
        """Return what ``save`` wrote; ``InvalidArgument`` names the file that is none."""
        try:
            content = json.loads(path.read_text())
            return cls._of(content)
        except FileNotFoundError:
            raise InvalidArgument(f"{path}: no such profile") from None
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"{path}: expected a profile of format {FORMAT}, got something else ({error!r})"
            ) from error

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> "Profile":
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}")
        job = Job(**{key: tuple(value) for key, value in content["job"].items()})
        network = Network(**{name: Link(**link) for name, link in content["network"].items()})
        trials = [Trial(**each | {"candidate": Candidate(**each["candidate"])}) for each in content["trials"]]
        return cls(job, network, Speeds(**content["speeds"]), tuple(trials))

    def check(self, job: Job) -> None:
        """Raise ``InvalidArgument`` where the profile was measured in another job than this one."""
        if self.job != job:
            raise InvalidArgument(
                f"expected a profile of {job}, got one of {self.job}{_which(self.job, job)}"
            )


def _which(there: Job, here: Job) -> str:
    """Return what differs, where the summaries of both jobs are equal."""
    if str(there) != str(here):
        return ""
    return f" ({list(there.processors)} there, {list(here.processors)} here)"
