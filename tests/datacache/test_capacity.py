"""Room: what a cache takes is known before, and all limits count."""

import os
from pathlib import Path

import pytest

from datacache.capacity import check_room, free_bytes, in_memory, readable, tightest
from datacache.errors import CacheFull
from tests.datacache.stores import SHM


def test_room_of_a_folder_that_is_not_there_is_that_of_the_one_above(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "there") == pytest.approx(free_bytes(tmp_path), rel=0.05)


def test_too_little_room_is_said_with_all_that_matters(tmp_path: Path) -> None:
    check_room(tmp_path, 1000, "two samples")
    with pytest.raises(CacheFull) as raised:
        check_room(tmp_path, 1 << 60, "12 samples")
    message = str(raised.value)
    for part in ("12 samples", readable(1 << 60), str(tmp_path), "the filesystem of", "cache gc"):
        assert part in message


@pytest.mark.skipif(not SHM.is_dir(), reason="no /dev/shm")
def test_a_tmpfs_is_memory_and_proc_is_not() -> None:
    assert in_memory(SHM / "not there")
    assert not in_memory(Path("/proc"))


def machine(root: Path, available_kib: int, groups: str, files: dict[str, str]) -> None:
    """Write what a machine would tell whose tmpfs holds ``root``; ``files``: of its control groups."""
    device = root.stat().st_dev
    mount = f"36 35 {os.major(device)}:{os.minor(device)} / /here rw,relatime shared:1 - tmpfs tmpfs rw\n"
    told = {f"sys/fs/cgroup/{name}": content for name, content in files.items()} | {
        "proc/self/mountinfo": mount,
        "proc/self/cgroup": groups,
        "proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable:   {available_kib} kB\n",
    }
    for name, content in told.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


VERSION_2 = {
    "job/step/memory.max": "max\n",
    "job/step/memory.current": "10\n",
    "job/memory.max": "5000\n",
    "job/memory.current": "4000\n",
    "job/memory.stat": "anon 3000\ninactive_file 700\nactive_file 300\n",
}
VERSION_1 = {
    "memory/job/memory.limit_in_bytes": "5000\n",
    "memory/job/memory.usage_in_bytes": "4000\n",
    "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
}
CONTAINER = {"memory/memory.limit_in_bytes": "5000\n", "memory/memory.usage_in_bytes": "5100\n"}


@pytest.mark.parametrize(
    ("groups", "files", "free", "named"),
    [
        ("0::/job/step\n", VERSION_2, 5000 - 4000 + 700, "job"),
        ("3:cpuset:/\n2:memory:/job\n0::/\n", VERSION_1, 5000 - 4000 + 500, "job"),
        ("2:memory:/outside/of/it\n", CONTAINER, 0, "memory"),
    ],
    ids=["version-2", "version-1", "inside-a-container"],
)
def test_a_control_group_bounds_a_tmpfs(
    tmp_path: Path, groups: str, files: dict[str, str], free: int, named: str
) -> None:
    machine(tmp_path, 1 << 20, groups, files)
    limit = tightest(tmp_path, tmp_path)
    assert limit.free == free
    assert "the control group" in limit.name and limit.name.endswith(f"/{named}") and "raise" in limit.remedy


def test_memory_bounds_a_tmpfs_and_not_a_disk(tmp_path: Path) -> None:
    machine(tmp_path, 3, "", {})
    limit = tightest(tmp_path, tmp_path)
    assert (limit.free, limit.name) == (3 * 1024, "the machine's memory")
    mounts = tmp_path / "proc/self/mountinfo"
    mounts.write_text(mounts.read_text().replace("tmpfs", "ext4"))
    assert tightest(tmp_path, tmp_path).name == f"the filesystem of {tmp_path}"
