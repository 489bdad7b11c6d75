"""LMDB environments: shared within a process, usable after a fork, never waited for without limit."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from datacache import environments, locks
from tests.datacache.processes import FORK, in_child

MAP_BYTES = 1 << 26


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    environments.create(tmp_path, MAP_BYTES)
    return tmp_path


def put(environment: environments.Environment, key: bytes, value: bytes) -> None:
    with environment.alone(5.0) as opened:
        assert opened is not None
        with opened.begin(write=True) as transaction:
            transaction.put(key, value)


def get(environment: environments.Environment, key: bytes) -> bytes | None:
    with environment.read() as transaction:
        value = transaction.get(key)
        return None if value is None else bytes(value)


def test_two_holders_share_one_environment(folder: Path) -> None:
    first, second = environments.hold(folder, MAP_BYTES), environments.hold(folder / ".", MAP_BYTES)
    assert first is second
    put(first, b"a", b"1")
    environments.release(first)
    assert get(second, b"a") == b"1"
    environments.release(second)
    assert second.lmdb is None
    third = environments.hold(folder, MAP_BYTES)
    assert third is not second
    assert get(third, b"a") == b"1"
    environments.release(third)


def test_given_back_while_a_thread_reads_it_is_closed_when_that_has_ended(folder: Path) -> None:
    environment = environments.hold(folder, MAP_BYTES)
    put(environment, b"a", b"x" * 100_000)
    with environment.read() as transaction:
        view = transaction.get(b"a")
        environments.release(environment)
        assert bytes(view) == b"x" * 100_000
        assert environment.lmdb is not None
    assert environment.lmdb is None


def test_threads_read_while_one_writes(folder: Path) -> None:
    environment = environments.hold(folder, MAP_BYTES)
    put(environment, b"a", bytes(5000))
    wrong: list[bytes | None] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            value = get(environment, b"a")
            if value is None or value != value[:1] * 5000:
                wrong.append(value)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(100):
        put(environment, b"a", bytes([number]) * 5000)
    stop.set()
    for thread in threads:
        thread.join(10)
    environments.release(environment)
    assert wrong == []


def test_a_forked_child_opens_its_own(folder: Path) -> None:
    environment = environments.hold(folder, MAP_BYTES)
    put(environment, b"a", b"1")

    def child() -> bool:
        seen = get(environment, b"a")
        put(environment, b"b", b"2")
        return seen == b"1" and get(environment, b"b") == b"2"

    before = environment.lmdb
    assert in_child(child)
    assert environment.lmdb is before
    assert get(environment, b"b") == b"2"
    put(environment, b"c", b"3")
    environments.release(environment)


def test_a_fork_waits_for_the_end_of_transactions(folder: Path) -> None:
    environment = environments.hold(folder, MAP_BYTES)
    put(environment, b"a", b"1")
    inside = threading.Event()

    def write_slowly() -> None:
        with environment.alone(5.0) as opened:
            assert opened is not None
            with opened.begin(write=True) as transaction:
                transaction.put(b"b", b"2")
                inside.set()
                time.sleep(0.3)

    thread = threading.Thread(target=write_slowly)
    thread.start()
    assert inside.wait(10)
    assert in_child(lambda: get(environment, b"b") == b"2")
    thread.join(10)
    environments.release(environment)


def test_a_child_does_not_keep_the_lock_of_a_parent_that_is_killed(folder: Path) -> None:
    forked, end = os.pipe(), os.pipe()

    def parent() -> None:
        os.close(end[1])
        with locks.exclusive(folder / "writer", 1.0):
            if os.fork() == 0:
                os.write(forked[1], b"forked")
            os.read(end[0], 1)  # until the test closes it: then both end
        os._exit(0)

    process = FORK.Process(target=parent)
    process.start()
    assert os.read(forked[0], 20) == b"forked"
    try:
        assert locks.take(folder / "writer") is None
        process.kill()
        process.join()  # without a limit: with one it would wait for the grandchild
        descriptor = locks.take(folder / "writer", timeout_seconds=5.0)
        assert descriptor is not None
        os.close(descriptor)
    finally:
        os.close(end[1])


def test_a_stopped_writer_is_not_waited_for_without_limit(folder: Path) -> None:
    ready = FORK.Event()

    def write_forever() -> None:
        environment = environments.hold(folder, MAP_BYTES)
        with environment.alone(5.0) as opened:
            assert opened is not None
            with opened.begin(write=True):
                ready.set()
                time.sleep(60)

    process = FORK.Process(target=write_forever)
    process.start()
    assert ready.wait(20)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    environment = environments.hold(folder, MAP_BYTES)
    try:
        start = time.monotonic()
        with environment.alone(0.2) as opened:
            assert opened is None
        assert time.monotonic() - start >= 0.2
        assert get(environment, b"a") is None  # reading goes on
    finally:
        process.kill()
        process.join(10)
    put(environment, b"a", b"1")  # the dead do not keep it
    environments.release(environment)


def test_a_thread_that_writes_is_not_waited_for_without_limit(folder: Path) -> None:
    environment = environments.hold(folder, MAP_BYTES)
    with environment.alone(1.0):
        found: list[object] = []

        def other() -> None:
            with environment.alone(0.1) as opened:
                found.append(opened)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)
        assert found == [None]
    environments.release(environment)


def test_killed_readers_leave_no_places_taken(folder: Path) -> None:
    environment = environments.hold(folder, MAP_BYTES)
    put(environment, b"a", b"1")

    def read_and_die() -> None:
        with environment.read():
            os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(5):
        process = FORK.Process(target=read_and_die)
        process.start()
        process.join(20)
        assert process.exitcode == -signal.SIGKILL
    with environment.alone(1.0) as opened:
        assert opened is not None
        assert opened.reader_check() == 1  # whoever opened cleared the place of the one before
        assert opened.reader_check() == 0
    environments.release(environment)


def test_all_processes_open_and_close_at_the_same_moment(folder: Path) -> None:
    def open_and_close() -> None:
        for number in range(30):
            environment = environments.hold(folder, MAP_BYTES)
            put(environment, b"%d" % os.getpid(), b"%d" % number)
            assert get(environment, b"%d" % os.getpid()) == b"%d" % number
            environments.release(environment)

    processes = [FORK.Process(target=open_and_close) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
