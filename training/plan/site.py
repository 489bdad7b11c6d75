"""Where a run is planned to be: its ranks by node, the links between them, and what a node has."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from commlib import Network
from commlib.cost import Speeds
from commlib.folders import expanded
from commlib.network import node_of_ranks
from commlib.tuning.probe import WIRES, Job, Profile
from datacache import CacheDirs
from datacache.capacity import free_bytes, free_memory_bytes
from datacache.management import list_folders
from training.config.config import Config
from training.plan.cluster import ClusterFile, load_cluster
from training.run.autotune import path_for

GIB = 1 << 30
ON_GPUS = re.compile(" by (nccl|mpi)$")  # of a profile's processors, see commlib.tuning.probe.job_of
SHM_SHARE = 0.5  # of its memory, that Linux gives to a tmpfs without a size
# A cluster file has none: messages alone take time.
NO_SPEEDS = Speeds(add=0, fill=0, select=0, keep=0, place=0, entry=0, code=dict.fromkeys(WIRES, 0.0))


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

    ``profile``: of the links, if they are known; the profile of a cluster file has no speeds.
    """

    source: str
    nodes: Sequence[Sequence[int]]
    profile: Profile | None = None
    file: ClusterFile | None = None

    @cached_property
    def ranks(self) -> int:
        """Return how many ranks there are."""
        return sum(map(len, self.nodes))

    @property
    def ranks_of_node(self) -> int:
        """Return how many ranks the largest node has."""
        return max(map(len, self.nodes))

    @property
    def network(self) -> Network | None:
        """Return the links, if they are known."""
        return None if self.profile is None else self.profile.network

    @property
    def speeds(self) -> Speeds | None:
        """Return the speeds of the reducers' kernels, if they were measured."""
        return None if self.profile is None or self.file is not None else self.profile.speeds

    @property
    def has_gpus(self) -> bool:
        """Return whether each rank has a GPU on which gradients can stay."""
        if self.file is not None:
            return self.file.gpu_memory_gib is not None
        return self.profile is not None and any(map(ON_GPUS.search, self.profile.job.processors))

    def with_ranks(self, ranks: int) -> "Site":
        """Return a site of so many ranks with the same links, on nodes as large as the largest one."""
        return replace(self, nodes=nodes_of(ranks, self.ranks_of_node))

    def room(self, dirs: CacheDirs) -> Capacity:
        """Return what a node has: by the cluster file, or what is free here, with what is cached here."""
        if self.file is None:
            shm, disk = (None if path is None else _room_in(path) for path in (dirs.memory, dirs.disk))
            return Capacity(memory=free_memory_bytes(), shm=shm, disk=disk)
        file = self.file
        shm_gib = file.shm_gib or (file.memory_gib and SHM_SHARE * file.memory_gib)
        given = (file.memory_gib, file.gpu_memory_gib, shm_gib, file.disk_gib)
        return Capacity(*(None if each is None else int(each * GIB) for each in given))


def _room_in(folder: Path) -> int:
    """Return the bytes that a folder can have: what it has, and what is free."""
    return free_bytes(folder) + sum(each.bytes for each in list_folders(folder))


def nodes_of(ranks: int, ranks_per_node: int | Sequence[int]) -> list[list[int]]:
    """Return the world ranks of every node.

    >>> nodes_of(5, 2)
    [[0, 1], [2, 3], [4]]
    """
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of_ranks(ranks, ranks_per_node)):
        nodes.setdefault(node, []).append(rank)
    return list(nodes.values())


def site_of(config: Config, cluster: str | None, ranks: int | None) -> Site:
    """Return where a run is planned: by a cluster file, else a profile, else so many ranks of unknown links.

    ``ranks``: fewer than the cluster's, or of the default profile. Raises a ``ValueError`` of one line where
    that does not go together.
    """
    if cluster is not None:
        site = _on_cluster(cluster, ranks)
    elif (path := _profile_path(config, ranks)) is not None:
        site = _by_profile(path, ranks)
    else:
        count = ranks or 1
        return Site("no --cluster and no profile", nodes_of(count, config.ranks_per_node or count))
    _check_layout(config, site)
    return site


def _on_cluster(given: str, ranks: int | None) -> Site:
    file = load_cluster(given)
    if ranks is not None and ranks > file.ranks:
        raise ValueError(f"-np: expected at most the {file.ranks} ranks of {given}, got {ranks}")
    nodes = nodes_of(ranks or file.ranks, file.ranks_per_node)
    job = Job(tuple(f"node{number}" for number in range(len(nodes))), (), tuple(map(len, nodes)))
    return Site(f"cluster {given}", nodes, Profile(job, file.network, NO_SPEEDS), file)


def _profile_path(config: Config, ranks: int | None) -> Path | None:
    """Return the path of the configuration's profile, else of the default one of these ranks if it exists."""
    if config.profile is not None:
        return expanded(config.profile)
    if ranks is None:
        return None
    path = path_for(ranks, len(nodes_of(ranks, config.ranks_per_node or ranks)))
    return path if path.exists() else None


def _by_profile(path: Path, ranks: int | None) -> Site:
    profile = Profile.load(path)
    counts = profile.job.ranks_of_nodes
    if ranks not in (None, sum(counts)):
        raise ValueError(f"-np: expected the {sum(counts)} ranks of {path}, got {ranks}")
    return Site(f"profile {path}", nodes_of(sum(counts), counts), profile)


def _check_layout(config: Config, site: Site) -> None:
    """Raise a ``ValueError`` where the configuration emulates other nodes than those of the site."""
    if (given := config.ranks_per_node) is None:
        return
    counts = list(map(len, site.nodes))
    if list(map(len, nodes_of(site.ranks, given))) != counts:
        shown = counts[0] if len(set(counts)) == 1 else counts
        expected = f"expected {shown} as on the nodes of the {site.source}, or null"
        raise ValueError(f"ranks_per_node: {expected}; got {given}")
