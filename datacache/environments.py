"""LMDB environments of this process: each file opened once, whoever asks, also with threads and after a fork.

LMDB forbids opening a file twice in one process and using an environment after a fork; closing one that a
thread still reads crashes; and its write lock is waited for without limit. All four are taken care of here.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from datacache import locks

DATA, LOCK, OPENING, WRITER = "data.mdb", "lock.mdb", "opening", "writer"
MOST_READERS = 4096  # transactions at the same time, of all processes of a node
LOCK_FILE_BYTES = 64 * (MOST_READERS + 8)

_OPENING_SECONDS = 20.0
_RETRY_SECONDS = 2.0
_FORK_SECONDS = 10.0

# Releases from 3.0 on bring a second engine, whose files neither LMDB 0.9 nor earlier releases can read.
_ENGINE = {"lib_version": 0} if int(lmdb.__version__.split(".")[0]) >= 3 else {}

_state = threading.Condition()  # guards everything below, and the counts of each environment
_known: dict[Path, "Environment"] = {}


class Environment:
    """One LMDB environment, opened at its first use; from :func:`hold`, given back with :func:`release`."""

    def __init__(self, folder: Path, map_bytes: int) -> None:
        self.folder, self.map_bytes = folder, map_bytes
        self.holders = 0
        self.users = 0  # blocks that use it now
        self.lmdb: lmdb.Environment | None = None
        self.writer = threading.Lock()

    @contextmanager
    def read(self) -> Iterator[lmdb.Transaction]:
        """Give a read transaction, whose values are views that end with the block."""
        with self._in_use() as environment, _begin_read(environment) as transaction:
            yield transaction

    @contextmanager
    def alone(self, timeout_seconds: float) -> Iterator[lmdb.Environment | None]:
        """Keep every other writer away; ``None`` if one kept us away for so long."""
        if not self.writer.acquire(timeout=timeout_seconds):
            yield None
            return
        writer = self.writer  # a forked child has another
        try:
            with locks.exclusive(self.folder / WRITER, timeout_seconds) as held:
                if not held:
                    yield None
                    return
                with self._in_use() as environment:
                    yield environment
        finally:
            if writer.locked():
                writer.release()

    @contextmanager
    def _in_use(self) -> Iterator[lmdb.Environment]:
        with _state:
            if self.lmdb is None:
                self.lmdb = _open(self.folder, self.map_bytes)
            self.users += 1
            environment = self.lmdb
        try:
            yield environment
        finally:
            with _state:
                self.users -= 1
                _close_unused(self)
                _state.notify_all()


def create(folder: Path, map_bytes: int) -> None:
    """Make an empty environment in a folder that nobody else knows yet.

    Its lock file is given its place at once: memory mapped from a file with holes ends the process when the
    filesystem is full.
    """
    with (folder / LOCK).open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, LOCK_FILE_BYTES)
    _lmdb(folder, map_bytes).close()


def hold(folder: Path, map_bytes: int) -> Environment:
    """Return the environment of a folder, the same to everybody in this process."""
    with _state:
        environment = _known.setdefault(folder.resolve(), Environment(folder.resolve(), map_bytes))
        environment.holders += 1
        return environment


def release(environment: Environment) -> None:
    """Give it back; it is closed when nobody holds or reads it any more."""
    with _state:
        environment.holders -= 1
        _close_unused(environment)


def _close_unused(environment: Environment) -> None:
    if environment.holders or environment.users:
        return
    if _known.get(environment.folder) is environment:
        del _known[environment.folder]
    if environment.lmdb is not None:
        with _opening(environment.folder):
            environment.lmdb.close()
        environment.lmdb = None


def _open(folder: Path, map_bytes: int) -> lmdb.Environment:
    """Open or create. It may fail when another process was killed at just that moment: once more, then."""
    deadline = time.monotonic() + _RETRY_SECONDS
    while True:
        try:
            with _opening(folder):
                opened = _lmdb(folder, map_bytes)
        except (lmdb.LockError, lmdb.InvalidError, lmdb.CorruptedError):
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)
        else:
            opened.reader_check()
            return opened


def _lmdb(folder: Path, map_bytes: int) -> lmdb.Environment:
    return lmdb.open(
        str(folder),
        map_size=map_bytes,
        max_readers=MOST_READERS,
        create=False,
        sync=False,  # once, when all is there
        metasync=False,
        **_ENGINE,  # type: ignore[arg-type]
    )


@contextmanager
def _opening(folder: Path) -> Iterator[None]:
    """Open and close one after the other: inside, LMDB waits for other processes without limit."""
    if not folder.exists():  # removed meanwhile; nobody else can open it
        yield
        return
    with locks.exclusive(folder / OPENING, _OPENING_SECONDS) as held:
        if not held:
            raise TimeoutError(f"{folder / OPENING}: locked by a process for more than {_OPENING_SECONDS} s")
        yield


def _begin_read(environment: lmdb.Environment) -> lmdb.Transaction:
    try:
        return environment.begin(buffers=True)
    except lmdb.ReadersFullError:
        environment.reader_check()  # frees the places of processes that were killed
        return environment.begin(buffers=True)


def _before_fork() -> None:
    """Wait until no thread is inside a transaction: the child could neither use nor close the environment."""
    _state.acquire()
    _state.wait_for(lambda: not any(known.users for known in _known.values()), _FORK_SECONDS)


def _in_parent() -> None:
    _state.release()


def _in_child() -> None:
    """Close what the parent opened, to be opened anew at its next use."""
    global _state
    for known in _known.values():
        if known.lmdb is not None and not known.users:
            known.lmdb.close()
        known.lmdb, known.users, known.writer = None, 0, threading.Lock()
    _state = threading.Condition()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
