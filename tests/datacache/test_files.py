"""Files of a cache are written durably: what a crash of the machine leaves is the old file or the new one."""

import os
from pathlib import Path

import pytest

from datacache.store.files import write_atomic


@pytest.mark.parametrize("is_private", [True, False])
def test_a_file_is_on_disk_before_it_gets_its_name_and_its_name_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_private: bool
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    synced: list[tuple[bytes, bytes]] = []  # what was synced, and what the file held then

    def sync(descriptor: int) -> None:
        found = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((b"folder" if found == tmp_path else found.read_bytes(), path.read_bytes()))

    monkeypatch.setattr(os, "fsync", sync)
    write_atomic(path, b"new", is_private=is_private)
    assert synced == [(b"new", b"old"), (b"folder", b"new")]
