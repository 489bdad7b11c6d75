"""Locks between processes: never waited for without limit, released by whoever is killed."""

import os
import signal
import time
from pathlib import Path

import pytest

from datacache.store import locks
from tests.datacache.processes import FORK


def test_a_child_does_not_keep_the_lock_of_a_parent_that_is_killed(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    def parent() -> None:
        with locks.exclusive(tmp_path / "writer", 1.0):
            if os.fork() == 0:
                os.write(writer, b"%d\n" % os.getpid())
                time.sleep(60)
                os._exit(0)
            time.sleep(60)

    process = FORK.Process(target=parent)
    process.start()
    grandchild = int(os.read(reader, 20))
    try:
        assert locks.take(tmp_path / "writer") is None
        process.kill()
        process.join()  # without a limit: with one it would wait for the grandchild
        descriptor = locks.take(tmp_path / "writer", timeout_seconds=5.0)
        assert descriptor is not None
        os.close(descriptor)
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_long_wait_is_said_once_with_the_process_that_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_SILENT_SECONDS", 0.05)
    ready = FORK.Event()

    def hold() -> None:
        with locks.exclusive(tmp_path / "lock", 1.0):
            ready.set()
            time.sleep(60)

    process = FORK.Process(target=hold)
    process.start()
    try:
        assert ready.wait(20)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.warns(UserWarning, match="locked by .*process.*, waiting for at most 0.3 s") as said:
            assert locks.take(tmp_path / "lock", timeout_seconds=0.3) is None
        assert len(said) == 1
    finally:
        process.kill()
        process.join(10)
