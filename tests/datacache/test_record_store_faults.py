"""Generations under kill -9, without room, with flipped bits: never a wrong record or an endless wait.

Real processes, forked, on a disk or in /dev/shm.
"""

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path

import numpy as np
import pytest

from datacache.capacity import free_bytes
from datacache.errors import CacheFull
from datacache.store import locks, record_store
from datacache.store.record_store import Misses
from tests.datacache.processes import FORK, in_child
from tests.datacache.stores import SHM, Samples
from tests.extent import ALL

SAMPLES = Samples("faults", np.arange(5, 1205, 2), 9000)
IDS, FINGERPRINT, SIZES = SAMPLES.ids, SAMPLES.fingerprint, SAMPLES.sizes
make, put, read_right = SAMPLES.make, SAMPLES.put, SAMPLES.read_right
KILLS = 30 if ALL else 6
NO_SHM = pytest.mark.skipif(not SHM.is_dir(), reason="there is no /dev/shm")
NOT_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a filesystem takes root")


def start(target: Callable[..., object], *arguments: object) -> ForkProcess:
    process = FORK.Process(target=target, args=arguments)
    process.start()
    return process


@pytest.fixture(params=["disk", pytest.param("memory", marks=NO_SHM)])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path / "cache"
        return
    folder = SHM / f"cloudtrain-faults-{os.getpid()}-{tmp_path.name}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_killed_while_making_the_folder_it_is_made_by_the_next(root: Path) -> None:
    generator = np.random.default_rng(9)

    def open_and_close() -> None:
        while True:
            make(root).close()
            shutil.rmtree(root / f"gen-{FINGERPRINT}")

    for _ in range(KILLS):
        process = start(open_and_close)
        time.sleep(generator.uniform(0, 0.05))  # at any moment: nothing that is asserted depends on it
        process.kill()
        process.join(20)
        with make(root) as cache:
            assert cache.stored() == 0
        assert sorted(path.name for path in root.iterdir()) == [f"gen-{FINGERPRINT}", "lock"]
        shutil.rmtree(root)


def test_a_stopped_process_costs_a_put_and_not_the_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_store, "_PUT_SECONDS", 0.2)
    ready = FORK.Event()

    def hold() -> None:
        with make(root), locks.exclusive(root / f"gen-{FINGERPRINT}" / "writer", 5.0):
            ready.set()
            time.sleep(60)

    process = start(hold)
    assert ready.wait(20)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with make(root) as cache:
        with pytest.warns(UserWarning, match="another process blocks all writers") as said:
            for _ in range(3):
                put(cache, IDS[:10])
        assert len(said) == 1
        assert read_right(cache, IDS[:10]).missing == list(range(10))
        assert not cache.seal()
        process.kill()
        process.join(10)
        put(cache)
        assert cache.seal()


# --- without room


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Give a filesystem in memory of 2 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)], check=True)
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@NOT_ROOT
def test_reading_what_is_there_needs_no_room(small: Path) -> None:
    ids, rest = IDS[:100], list(range(90, 100))
    with make(small / "cache", ids) as cache:
        put(cache, ids[:90])
        (small / "others").write_bytes(bytes(free_bytes(small)))

        def read() -> bool:
            own = make(small / "cache", ids)
            put(own, ids[90:])
            said = "100 samples: needs" in str(own.no_room)
            return said and own.is_full and read_right(own, ids) == Misses(rest, [])

        assert in_child(read)
    (small / "others").unlink()
    with make(small / "cache", ids) as cache:
        put(cache, ids[90:])
        assert cache.seal()


def test_files_that_may_not_grow_are_said_once_and_reading_goes_on(root: Path) -> None:
    sizes = np.full(len(IDS), 10)  # planned too small

    def fill_until_full() -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with make(root, sizes=sizes) as cache:
            raised = 0
            for begin in range(0, len(IDS), 10):
                try:
                    put(cache, IDS[begin : begin + 10])
                except CacheFull as error:
                    raised += 1
                    assert str(cache.folder) in str(error)
            assert raised == 1 and cache.is_full and not cache.seal()
            assert 0 < cache.stored() < len(IDS)
            misses = read_right(cache)
            assert misses == Misses(np.searchsorted(IDS, cache.missing_ids()).tolist(), [])
        with make(root, sizes=sizes) as cache:
            return read_right(cache) == misses  # the next start finds the same

    assert in_child(fill_until_full)


# --- flipped bits


def flip(path: Path, bits: list[int]) -> None:
    """Flip bits where they are: of the file that others have open."""
    with path.open("r+b", buffering=0) as file:
        for bit in bits:
            file.seek(bit // 8)
            (byte,) = file.read(1)
            file.seek(bit // 8)
            file.write(bytes([byte ^ 1 << bit % 8]))


def test_of_1000_flipped_bits_all_are_caught_and_all_values_are_right(root: Path) -> None:
    SAMPLES.sealed(root)
    with make(root) as cache:
        data = cache.folder / "records"
        bits = random.Random(1).sample(range(8 * data.stat().st_size), 1000)
        flipped = np.array(bits) // 8
        ends = np.cumsum([len(record) for record in SAMPLES.records(IDS)])  # in the order of the ids
        hit = np.unique(np.searchsorted(ends, flipped, side="right")).tolist()
        assert len(hit) > 100
        flip(data, bits)
        misses = read_right(cache)
        assert misses == Misses([], hit)
        put_again = IDS[misses.damaged]
        cache.replace(put_again, SAMPLES.records(put_again))
        assert read_right(cache) == Misses([], [])
    with make(root) as cache:
        assert read_right(cache) == Misses([], [])


def test_an_open_log_found_damaged_is_not_written_and_the_level_made_again(root: Path) -> None:
    with make(root) as cache, make(root) as other:
        put(cache, IDS[:300])
        assert len(read_right(other).missing) == 300
        put(cache, IDS[300:310])
        log = cache.folder / "log"
        flip(log, [8 * 32 * 305 + 70])
        with pytest.warns(UserWarning, match="damaged, it is filled again at the next start"):
            assert read_right(other).missing == list(range(300, 600))  # what is known is read on
        put(other, IDS[310:])
        assert log.stat().st_size == 310 * 32
    with make(root) as cache:
        assert cache.stored() == 0
        put(cache)
        assert cache.seal()
        assert read_right(cache) == Misses([], [])


def test_a_disk_that_cannot_read_costs_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(tmp_path / "cache") as cache:
        put(cache)
        assert cache.seal()
        pread = os.pread

        def failing(descriptor: int, size: int, begin: int) -> bytes:
            if size == len(SAMPLES.records(IDS[4:5])[0]):
                raise OSError(5, "Input/output error")
            return pread(descriptor, size, begin)

        monkeypatch.setattr(os, "pread", failing)
        same = [place for place, size in enumerate(SIZES.tolist()) if size == SIZES[4]]
        assert read_right(cache) == Misses([], same)
