"""Where record stores of tests are."""

import os
import shutil
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
