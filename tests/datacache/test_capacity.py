"""Room: what a cache takes is known before, and all limits count."""

import os
from pathlib import Path

import pytest

from datacache.capacity import check_room, free_bytes, in_memory, readable, tightest
from datacache.errors import CacheFull

SHM = Path("/dev/shm")


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


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def machine(root: Path, place: Path, available_kib: int, groups: str, files: dict[str, str]) -> None:
    """Write what a machine would tell whose tmpfs holds ``place``."""
    device = place.stat().st_dev
    mount = f"36 35 {os.major(device)}:{os.minor(device)} / /here rw,relatime shared:1 - tmpfs tmpfs rw\n"
    write(
        root,
        {
            "proc/self/mountinfo": mount,
            "proc/self/cgroup": groups,
            "proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable:   {available_kib} kB\n",
            **files,
        },
    )


def test_the_group_of_version_2_bounds_a_tmpfs(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/job/step"
    files = {
        f"{group}/memory.max": "max\n",
        f"{group}/memory.current": "10\n",
        "sys/fs/cgroup/job/memory.max": "5000\n",
        "sys/fs/cgroup/job/memory.current": "4000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 3000\ninactive_file 700\nactive_file 300\n",
    }
    machine(tmp_path, tmp_path, 1 << 20, "0::/job/step\n", files)
    limit = tightest(tmp_path, tmp_path)
    assert limit.free == 5000 - 4000 + 700
    assert "sys/fs/cgroup/job" in limit.name
    assert "memory.max" in limit.remedy


def test_the_group_of_version_1_bounds_a_tmpfs(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/job"
    files = {
        f"{group}/memory.limit_in_bytes": "5000\n",
        f"{group}/memory.usage_in_bytes": "4000\n",
        f"{group}/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
    }
    machine(tmp_path, tmp_path, 1 << 20, "3:cpuset:/\n2:memory:/job\n0::/\n", files)
    assert tightest(tmp_path, tmp_path).free == 1500


def test_inside_a_container_the_group_that_can_be_seen_counts(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5100\n",
    }
    machine(tmp_path, tmp_path, 1 << 20, "2:memory:/outside/of/it\n", files)
    assert tightest(tmp_path, tmp_path).free == 0


def test_memory_bounds_a_tmpfs_and_not_a_disk(tmp_path: Path) -> None:
    machine(tmp_path, tmp_path, 3, "", {})
    limit = tightest(tmp_path, tmp_path)
    assert (limit.free, limit.name) == (3 * 1024, "the machine's memory")
    mounts = tmp_path / "proc/self/mountinfo"
    mounts.write_text(mounts.read_text().replace("tmpfs", "ext4"))
    assert tightest(tmp_path, tmp_path).name == f"the filesystem of {tmp_path}"
