"""How much room a folder has, and how much a cache needs: checked before anything is written.

A process that writes more to a tmpfs than its control group's memory limit leaves is killed without an error.
So the room of a tmpfs is the smallest of all limits: of the filesystem, the machine and the control groups.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datacache.errors import CacheFull

# A sample's entry in the log, and its two numbers in the index.
_INDEX_BYTES = 32 + 16
_SMALL_FILES_BYTES = 64 << 10

_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True)
class Limit:
    """A limit on the room in a folder: ``free`` bytes are left, and ``remedy`` says how to get more."""

    name: str
    free: int
    remedy: str


def store_bytes(sizes: npt.NDArray[np.int64]) -> int:
    """Return an upper bound of the bytes of a store with records of ``sizes`` bytes.

    >>> store_bytes(np.full(1000, 30_000)) / (1000 * 30_000) < 1.01
    True
    """
    return int(sizes.sum()) + _INDEX_BYTES * len(sizes) + _SMALL_FILES_BYTES


def free_bytes(path: Path) -> int:
    """Return how many bytes can still be written to a folder, which need not exist yet."""
    return tightest(path).free


def free_memory_bytes(system: Path = Path("/")) -> int:
    """Return how much memory processes can still take: of the machine, and of its control groups."""
    return min(limit.free for limit in (_machine_limit(system), *_group_limits(system)))


def check_room(path: Path, needed: int, what: str) -> None:
    """Raise :class:`CacheFull` unless ``needed`` bytes are free in ``path``."""
    limit = tightest(path)
    if needed > limit.free:
        raise CacheFull(
            f"{what}: needs {readable(needed)} in {path}, {readable(limit.free)} are left by {limit.name}; "
            f"{limit.remedy}"
        )


def tightest(path: Path, system: Path = Path("/")) -> Limit:
    """Return the smallest limit on the room in a folder; ``system``: the folder with ``proc`` and ``sys``."""
    path = existing(path)
    limits = [_filesystem_limit(path)]
    if in_memory(path, system):
        limits += [_machine_limit(system), *_group_limits(system)]
    return min(limits, key=lambda limit: limit.free)


def in_memory(path: Path, system: Path = Path("/")) -> bool:
    """Return whether a folder is on a filesystem in memory."""
    device = os.stat(existing(path)).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in (system / "proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0] in _MEMORY_FILESYSTEMS
    return False


def readable(number: int) -> str:
    """Return a number of bytes as text.

    >>> readable(999), readable(5 << 20), readable(3 << 40)
    ('999 bytes', '5.0 MiB', '3072.0 GiB')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"


def existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def _filesystem_limit(path: Path) -> Limit:
    found = os.statvfs(path)
    is_unlimited = found.f_blocks == 0  # a tmpfs without a size
    free = 1 << 62 if is_unlimited else found.f_bavail * found.f_frsize
    enlarge = "enlarge it (a container's /dev/shm: `--shm-size`)"
    remedy = f"free some (`cloudtrain cache gc`), choose another folder, or {enlarge}"
    return Limit(f"the filesystem of {path}", free, remedy)


def _machine_limit(system: Path) -> Limit:
    lines = (system / "proc/meminfo").read_text().splitlines()
    kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return Limit("the machine's memory", 1024 * kibibytes, "end other programs, or put this level on a disk")


def _group_limits(system: Path) -> list[Limit]:
    """Return the memory limits of the control groups, of either version, that this process is in."""
    limits = []
    for line in (system / "proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                limits += _groups_upwards(system / mount, group, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            limits += _groups_upwards(system / "sys/fs/cgroup/memory", group, *files)
    return limits


def _groups_upwards(mount: Path, group: str, limit_file: str, usage_file: str) -> list[Limit]:
    """Return the limits of a group and of its parents; inside a container only some are visible."""
    folder = mount / group.lstrip("/")
    limits = []
    for path in (each for each in (folder, *folder.parents) if each.is_relative_to(mount)):
        limit, usage = _number(path / limit_file), _number(path / usage_file)
        if limit is not None and usage is not None:
            free = max(0, limit - usage + _reclaimable(path))
            remedy = f"raise {path / limit_file} (the container's or the job's memory limit)"
            limits.append(Limit(f"the control group {path}", free, remedy))
    return limits


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # missing, or "max"
        return None


def _reclaimable(group: Path) -> int:
    """Return the bytes of file cache that the kernel frees first when a group's memory runs short."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split() for line in lines)
    return int(found.get("total_inactive_file", found.get("inactive_file", 0)))
