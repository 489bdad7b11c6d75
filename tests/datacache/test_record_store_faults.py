"""Generations under kill -9, without room, with flipped bits: never a wrong record or an endless wait.

Real processes, forked, on a disk or in /dev/shm.
"""

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path

import numpy as np
import pytest

from datacache.capacity import free_bytes
from datacache.errors import CacheFull
from datacache.order import Ids
from datacache.store import locks, record_files, record_store
from datacache.store.record_store import Misses
from datacache.store.records import Bytes, bytes_of
from tests.datacache.processes import FORK, in_child
from tests.datacache.stores import Samples
from tests.extent import ALL

SAMPLES = Samples("faults", np.arange(5, 1205, 2), 9000)
IDS, FINGERPRINT, SIZES = SAMPLES.ids, SAMPLES.fingerprint, SAMPLES.sizes
make, put, read_right = SAMPLES.make, SAMPLES.put, SAMPLES.read_right
KILLS = 30 if ALL else 6


def start(target: Callable[..., object], *arguments: object) -> ForkProcess:
    process = FORK.Process(target=target, args=arguments)
    process.start()
    return process


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


def test_reading_what_is_there_needs_no_room(tmpfs: Path) -> None:
    ids, rest = IDS[:100], list(range(90, 100))
    with make(tmpfs / "cache", ids) as cache:
        put(cache, ids[:90])
        (tmpfs / "others").write_bytes(bytes(free_bytes(tmpfs)))

        def read() -> bool:
            own = make(tmpfs / "cache", ids)
            put(own, ids[90:])
            said = "100 samples: needs" in str(own.no_room)
            return said and own.is_full and read_right(own, ids) == Misses(rest, [])

        assert in_child(read)
    (tmpfs / "others").unlink()
    with make(tmpfs / "cache", ids) as cache:
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


# --- damaged files


def test_an_open_log_found_damaged_is_not_written_and_the_level_made_again(root: Path) -> None:
    with make(root) as cache, make(root) as other:
        put(cache, IDS[:300])
        assert len(read_right(other).missing) == 300
        put(cache, IDS[300:310])
        log = cache.folder / "log"
        with log.open("r+b") as file:  # as those who have it open see it, too
            content = bytearray(file.read())
            content[32 * 305 + 8] ^= 64
            file.seek(0)
            file.write(content)
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
        read, faulty = record_files._read, bytes_of(SAMPLES.records(IDS[4:5])[0])

        def failing(descriptor: int, starts: Ids, stops: Ids, into: Bytes) -> Ids:
            begins = np.array([0, *stops[:-1]])
            return np.where(stops - begins == faulty, begins, read(descriptor, starts, stops, into))

        monkeypatch.setattr(record_files, "_read", failing)
        same = [place for place, size in enumerate(SIZES.tolist()) if size == SIZES[4]]
        assert read_right(cache) == Misses([], same)
