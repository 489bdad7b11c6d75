"""Where record stores of tests are."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from datacache.capacity import in_memory
from tests.datacache.stores import SHM


@pytest.fixture(params=["disk", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Give the path of a folder that is not there yet, on a disk and in memory."""
    if request.param == "disk":
        if in_memory(tmp_path):
            pytest.skip("temporary files are in memory here")
        yield tmp_path / "cache"
        return
    if not SHM.is_dir():
        pytest.skip("no /dev/shm")
    folder = SHM / f"cloudtrain-test-{os.getpid()}-{tmp_path.name}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """Give a filesystem in memory of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a filesystem takes root")
    mount = tmp_path / "mount"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)], check=True)
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Give the URL of a folder that is not there yet."""
    return f"file://{tmp_path}/data" if request.param == "file" else f"memory://{uuid.uuid4().hex}"
