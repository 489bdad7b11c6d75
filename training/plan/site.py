"""Where a run is planned to be: its ranks by node, the links between them, and what a node has.

Cluster files say so for a cluster: YAML, checked as configurations are; those that ship are found by name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import model_validator

from commlib import Link, Network
from commlib.folders import expanded
from commlib.network import node_of_ranks
from commlib.tuning.probe import WIRES, Job, Profile
from commlib.work import Speeds
from datacache import CacheDirs
from datacache.capacity import free_bytes, free_memory_bytes
from datacache.management import list_folders
from training.config.config import Config
from training.config.reading import folder_of, located, problems_in_one_line, read
from training.config.schema import ConfigurationError, Count, Positive, Rate, Record, expect, is_number
from training.run.autotune import path_for

FOLDER = folder_of("clusters")
MOST_RANKS = 4096  # the bytes of each rank are added up
PAIRS = (("alpha", "beta"), ("microseconds", "gbit_per_second"))
GIB = 1 << 30
ON_GPUS = re.compile(" by (nccl|mpi)$")  # of a profile's processors, see commlib.tuning.probe.job_of
SHM_SHARE = 0.5  # of its memory, that Linux gives to a tmpfs without a size
# A cluster file gives no speeds of the reducers' kernels: of an exchange, only messages take time.
NO_SPEEDS = Speeds(add=0, fill=0, select=0, keep=0, place=0, entry=0, code=dict.fromkeys(WIRES, 0.0))

Incast = Annotated[float, expect("a number from 1", lambda value: is_number(value) and value >= 1)]


class LinkRecord(Record):
    """A link: ``alpha`` and ``beta``, or ``microseconds`` and ``gbit_per_second``."""

    alpha: Rate | None = None
    """Seconds until the first byte arrives."""
    beta: Rate | None = None
    """Seconds a byte."""
    microseconds: Rate | None = None
    gbit_per_second: Positive | None = None
    incast: Incast = 1.0
    """How many times as long a byte takes where several nodes send to one."""

    @model_validator(mode="after")
    def _is_given_in_one_way(self) -> "LinkRecord":
        given = self.model_dump(exclude={"incast"}, exclude_none=True)
        if set(given) not in map(set, PAIRS):
            ways = " or ".join(" and ".join(pair) for pair in PAIRS)
            raise ConfigurationError(f"expected {ways}, got {', '.join(sorted(given)) or 'none'}")
        return self

    @property
    def link(self) -> Link:
        given = self.model_dump(exclude={"incast"}, exclude_none=True)
        link = Link(**given) if "alpha" in given else Link.of(**given)
        return replace(link, incast=self.incast)


class Throughput(Record):
    """How much one rank trains on in a second, alone, and what that was measured for.

    Keys that are not given fit everything.
    """

    per_second: Positive
    """In ``unit``."""
    model: str | None = None
    """As a configuration names it."""
    configuration: str | None = None
    """The ``name`` of a configuration."""
    phase: Count | None = None
    """Its number, from 1."""
    input: str | None = None
    """As a plan shows it: ``224 px``, ``128 tokens``."""
    unit: str | None = None
    """What batches are counted in, as a plan shows it: ``samples``, ``tokens``, ``windows``, ``streams``."""
    precision: Literal["float32", "float16", "bfloat16"] | None = None

    @model_validator(mode="after")
    def _is_of_something(self) -> "Throughput":
        if self.model is None and self.configuration is None:
            raise ConfigurationError("expected model or configuration, got none")
        return self

    def fits(self, **facts: Any) -> bool:
        """Return whether all keys that are given equal these facts."""
        return self.model_dump(exclude={"per_second"}, exclude_none=True).items() <= facts.items()


class ClusterFile(Record):
    """A cluster of equal nodes."""

    nodes: Count
    ranks_per_node: Count
    intra: LinkRecord | None = None
    """The link between two ranks of a node."""
    inter: LinkRecord | None = None
    """The link between nodes, each of which has one card."""
    throughput: Sequence[Throughput] = ()
    """The first entry that fits a phase counts."""
    memory_gib: Positive | None = None
    """Of a node."""
    gpu_memory_gib: Positive | None = None
    """Of a rank's GPU. Without it models and gradients are in the node's memory."""
    shm_gib: Positive | None = None
    """Of a node, for ``cache.memory``; by default half of its memory, as Linux has it."""
    disk_gib: Positive | None = None
    """Of a node, for ``cache.disk``."""
    price_per_node_hour: Rate | None = None
    """In any currency."""

    @model_validator(mode="after")
    def _is_complete(self) -> "ClusterFile":
        if self.ranks > MOST_RANKS:
            raise ConfigurationError(
                f"expected at most {MOST_RANKS:,} ranks in all, got {self.ranks:,}", key="nodes"
            )
        for key, count in (("intra", self.ranks_per_node), ("inter", self.nodes)):
            if count > 1 and getattr(self, key) is None:
                raise ConfigurationError("missing, expected a link", key=key)
        return self

    @property
    def network(self) -> Network:
        """Return both links; a link that nothing uses has the default of ``Network``."""
        given = {"intra": self.intra, "inter": self.inter}
        return Network(**{name: each.link for name, each in given.items() if each is not None})

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def measured_for(config: Config, number: int, described: str, unit: str) -> dict[str, Any]:
    """Return what a throughput of phase ``number``, from 0, is measured for: keys of :class:`Throughput`."""
    phase = {"phase": number + 1, "input": described, "unit": unit, "precision": config.precision}
    return {"configuration": config.name, "model": config.model.name} | phase


def per_second(throughput: Sequence[Throughput], **facts: Any) -> float | None:
    """Return the throughput of a phase of these facts, by the first entry that fits."""
    return next((each.per_second for each in throughput if each.fits(**facts)), None)


def load_cluster(given: str | Path) -> ClusterFile:
    """Return the cluster of a YAML file, or of one that ships, by its name; raises ``ConfigurationError``."""
    content = read(located(given, "cluster", FOLDER))
    with problems_in_one_line(given):
        return ClusterFile.model_validate(content)


@dataclass(frozen=True)
class Capacity:
    """Bytes of a node's memory, tmpfs and disk, and of each rank's GPU; ``None``: not known."""

    memory: int | None = None
    gpu: int | None = None
    shm: int | None = None
    disk: int | None = None


@dataclass(frozen=True)
class Site:
    """The ranks of a run; ``nodes``: the world ranks of every node. ``source`` names file or profile.

    ``profile``: of the links, if known; that of a cluster file has no speeds. ``throughput``: of one rank.
    """

    source: str
    nodes: Sequence[Sequence[int]]
    profile: Profile | None = None
    file: ClusterFile | None = None
    throughput: Sequence[Throughput] = ()

    @cached_property
    def ranks(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def ranks_of_node(self) -> int:
        """Return how many ranks the largest node has."""
        return max(map(len, self.nodes))

    @property
    def network(self) -> Network | None:
        return None if self.profile is None else self.profile.network

    @property
    def speeds(self) -> Speeds | None:
        return None if self.profile is None or self.file is not None else self.profile.speeds

    def has_gradients_on_gpus(self, config: Config) -> bool:
        """Return whether each rank has a GPU, on which its gradients stay."""
        if config.transport == "mpi":
            return False
        if self.file is not None:
            return self.file.gpu_memory_gib is not None
        return self.profile is not None and any(map(ON_GPUS.search, self.profile.job.processors))

    def room(self, dirs: CacheDirs) -> Capacity:
        """Return a node's capacity: by the cluster file, else what is free here plus what the cache holds."""
        if (file := self.file) is None:
            shm, disk = (
                None if path is None else free_bytes(path) + sum(each.bytes for each in list_folders(path))
                for path in (dirs.memory, dirs.disk)
            )
            return Capacity(memory=free_memory_bytes(), shm=shm, disk=disk)
        shm_gib = file.shm_gib or (file.memory_gib and SHM_SHARE * file.memory_gib)
        given = (file.memory_gib, file.gpu_memory_gib, shm_gib, file.disk_gib)
        return Capacity(*(None if each is None else int(each * GIB) for each in given))


def nodes_of(ranks: int, ranks_per_node: int | Sequence[int]) -> list[list[int]]:
    """Return the world ranks of every node.

    >>> nodes_of(5, 2)
    [[0, 1], [2, 3], [4]]
    """
    nodes = node_of_ranks(ranks, ranks_per_node)
    return [list(own) for _, own in groupby(range(ranks), nodes.__getitem__)]


def site_of(config: Config, cluster: str | None, ranks: int | None) -> Site:
    """Return where a run is planned: by a cluster file, else a profile, else so many ranks of unknown links.

    ``ranks``: at most the cluster's, else those of the profile. Raises a ``ValueError`` of one line where the
    configuration, ``cluster`` and ``ranks`` contradict each other.
    """
    given = config.ranks_per_node
    if cluster is not None:
        file = load_cluster(cluster)
        if ranks is not None and ranks > file.ranks:
            raise ValueError(f"-np: expected at most the {file.ranks} ranks of {cluster}, got {ranks}")
        nodes = nodes_of(ranks or file.ranks, file.ranks_per_node)
        job = Job(tuple(f"node{number}" for number in range(len(nodes))), (), tuple(map(len, nodes)))
        profile = Profile(job, file.network, NO_SPEEDS)
        site = Site(f"cluster {cluster}", nodes, profile, file, file.throughput)
    elif (path := _profile_path(config, ranks)) is not None:
        profile = Profile.load(path)
        of_profile = profile.job.ranks_of_nodes
        if ranks not in (None, sum(of_profile)):
            raise ValueError(f"-np: expected the {sum(of_profile)} ranks of {path}, got {ranks}")
        with problems_in_one_line(path):
            throughput = list(map(Throughput.model_validate, profile.throughput))
        nodes = nodes_of(sum(of_profile), of_profile)
        site = Site(f"profile {path}", nodes, profile, throughput=throughput)
    else:
        return Site("no --cluster and no profile", nodes_of(ranks or 1, given or ranks or 1))
    if given is not None and nodes_of(site.ranks, given) != site.nodes:
        counts = list(map(len, site.nodes))
        shown = counts[0] if len(set(counts)) == 1 else counts
        expected = f"expected {shown} as on the nodes of the {site.source}, got {given}"
        raise ValueError(f"ranks_per_node: {expected}; to plan all the same: ranks_per_node=null")
    return site


def _profile_path(config: Config, ranks: int | None) -> Path | None:
    """Return the path of the configuration's profile, else of the default one of these ranks if it exists."""
    if config.profile is not None:
        return expanded(config.profile)
    if ranks is None:
        return None
    path = path_for(ranks, len(nodes_of(ranks, config.ranks_per_node or ranks)))
    return path if path.exists() else None
