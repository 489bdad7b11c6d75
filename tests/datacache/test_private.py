"""Folders that other users could have made are refused; ours are for nobody else."""

import os
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from datacache import Arrays, CacheDirs, DataCache, manifest_of
from datacache.errors import Untrusted
from datacache.store.files import append_line, check_folder, create_file, make_folder, open_file, read_file
from tests.datacache.processes import in_child
from training.config.records import Cache
from training.run.data import cache_dirs_of

STRANGER, VICTIM = 4321, 4322
IMAGES = np.random.default_rng(1).integers(0, 256, (20, 8, 8, 3)).astype(np.uint8)
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="to be another user takes root")


def cache_in(dirs: CacheDirs) -> DataCache:
    source = Arrays(IMAGES, np.arange(len(IMAGES)))
    return DataCache(source, manifest=manifest_of(source, dirs.disk, "pictures"), dirs=dirs)


@pytest.fixture
def shared() -> Iterator[Path]:
    """Give a folder like ``/dev/shm``, in which every user may make files, and its path is open to all."""
    folder = Path("/dev/shm") / f"cloudtrain-shared-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def is_refused(path: Path) -> bool:
    """Tell whether a folder is refused in one line: as a level, for manifests, and by training."""
    with pytest.raises(Untrusted, match="that no other user may write, found") as raised:
        cache_in(CacheDirs(memory=path))
    for place in (CacheDirs(disk=path), CacheDirs(disk=path, memory=path)):
        with pytest.raises(Untrusted):
            cache_in(place)
    with pytest.raises(
        ValueError, match=f"^cache: {path}: expected a folder of user {os.geteuid()} "
    ) as of_training:
        cache_dirs_of(Cache(memory=str(path)))
    return "\n" not in f"{raised.value}{of_training.value}"


def link(path: Path) -> None:
    path.with_name("elsewhere").mkdir(mode=0o700)
    path.symlink_to("elsewhere")


def open_to(mode: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        path.chmod(mode)

    return make


@pytest.mark.parametrize(
    "make", [link, open_to(0o777), open_to(0o770), open_to(0o1777), open_to(0o702)], ids=range(5)
)
def test_a_folder_that_others_may_change_is_refused(shared: Path, make: Callable[[Path], None]) -> None:
    make(shared / "cache")
    before = sorted(shared.rglob("*"))
    assert is_refused(shared / "cache")
    assert sorted(shared.rglob("*")) == before


@AS_ROOT
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_a_folder_that_a_stranger_made_first_is_refused_and_not_written(shared: Path, mode: int) -> None:
    folder = shared / f"cloudtrain-{VICTIM}"
    folder.mkdir()
    folder.chmod(mode)
    os.chown(folder, STRANGER, STRANGER)

    def victim() -> bool:
        os.seteuid(VICTIM)
        return is_refused(folder)

    assert in_child(victim)
    assert list(folder.iterdir()) == []


@AS_ROOT
def test_what_an_admin_made_may_be_used(shared: Path) -> None:
    (shared / "cache").mkdir(mode=0o755)

    def user() -> bool:
        os.seteuid(VICTIM)
        check_folder(shared / "cache")
        return True

    assert in_child(user)


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_whatever_the_umask_nobody_else_may_read_or_write_what_is_made(shared: Path, umask: int) -> None:
    def user() -> bool:
        if os.geteuid() == 0:
            os.seteuid(VICTIM)
        os.umask(umask)
        dirs = CacheDirs(shared / "a" / "disk", shared / "a" / "memory")
        for _ in range(2):
            cache = cache_in(dirs)
            cache.fill()
            cache._levels.memory.store.replace(np.array([1]), [(b"a record",)])
            cache.close()
        made = list((shared / "a").rglob("*"))
        modes = {(path.is_dir(), stat.S_IMODE(path.lstat().st_mode)) for path in made}
        return len(made) > 20 and modes == {(True, 0o700), (False, 0o600)}

    assert in_child(user)


@pytest.mark.parametrize(
    "name", ["records", "log", "writer", "in-use", "generation.json", "reads", "repairs", "lock"]
)
def test_links_in_a_folder_overwrite_nothing_and_are_said(tmp_path: Path, name: str) -> None:
    dirs = CacheDirs(memory=tmp_path / "memory")
    cache = cache_in(dirs)
    cache._levels.read(np.arange(10))
    cache.close()
    (folder,) = dirs.memory.glob("gen-*")
    path = dirs.memory / name if name == "lock" else folder / name
    target = tmp_path / "target"
    target.write_bytes(b"of the victim")
    if path.exists():
        path.unlink()
    path.symlink_to(target)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        cache = cache_in(dirs)
        samples = cache._levels.read(np.arange(20))
        if cache._levels.memory.store is not None:
            cache._levels.memory.store.replace(np.array([1]), [(b"a record",)])
        cache.close()
    assert all(np.array_equal(one, other) for one, other in zip(samples, IMAGES, strict=True))
    assert target.read_bytes() == b"of the victim"


def test_links_are_not_followed_by_what_keeps_manifests(tmp_path: Path) -> None:
    source = Arrays(IMAGES, np.arange(len(IMAGES)))
    dirs = tmp_path / "kept"
    manifest_of(source, dirs, "pictures")
    (path,) = dirs.glob("*.npz")
    path.unlink()
    (tmp_path / "target").write_bytes(b"of the victim")
    path.symlink_to(tmp_path / "target")
    assert len(manifest_of(source, dirs, "pictures")) == len(IMAGES)
    assert path.is_file()
    assert not path.is_symlink()
    assert (tmp_path / "target").read_bytes() == b"of the victim"


def test_a_file_is_opened_only_if_nobody_else_can_have_written_it(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    path = tmp_path / "a" / "b" / "file"
    create_file(path, b"1")
    append_line(path, "2")
    assert read_file(path) == b"12\n"
    path.chmod(0o644)  # as those before made them: their locks could be held by all who may read
    os.close(open_file(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o620)
    with pytest.raises(Untrusted, match="mode 0620"):
        read_file(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Untrusted, match="found something else"):
        read_file(tmp_path / "pipe")
