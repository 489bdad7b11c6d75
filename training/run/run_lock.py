"""The lock of a run's folder: at most one process trains a run at a time."""

import fcntl
import io
import json
import os
import socket
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from training.process.job import log_error

LOCK = "lock"
_PATIENCE_SECONDS = 1.0  # a process that only checks the lock holds it for a moment


class RunIsAlive(ValueError):
    """Another process trains this run; one line names the folder, the process and its host."""


class RunLock:
    """The lock of a run's folder, held until :meth:`release` or the end of this process, however it ends.

    It is an ``flock`` on the file ``lock``, which only its owner may open, and which is never removed.
    Over NFS it holds between hosts where the mount passes locks on (all but ``nolock`` and ``local_lock``).
    Raises :class:`RunIsAlive` where another process holds it. A file system without locks causes a warning.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK
        self._file = io.FileIO(path, "r+", opener=_opened)
        if not self._is_taken(path):
            self._file.close()
            raise RunIsAlive(f"resume: {_holder(path)}")
        with suppress(OSError):  # the disk is full: the lock works without its contents
            self._note(f"{json.dumps(_of_this_process())}\n".encode())

    def _is_taken(self, path: Path) -> bool:
        try:
            return _locked(self._file.fileno(), fcntl.LOCK_EX, _PATIENCE_SECONDS)
        except OSError as error:
            log_error(f"warning: {path}: no lock to be had ({error.strerror}): others may join this run")
            return True

    def _note(self, content: bytes) -> None:
        self._file.truncate(0)
        self._file.write(content)

    def release(self) -> None:
        """Release the lock; idempotent."""
        if not self._file.closed:
            with suppress(OSError):
                self._note(b"")
            self._file.close()


def holder_of(folder: Path) -> str | None:
    """Return one line about the process that trains the run of a folder, ``None`` where none does."""
    path = folder / LOCK
    with suppress(OSError):  # there is no such file yet, or no locks: RunLock warns of that
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            is_free = _locked(descriptor, fcntl.LOCK_SH, 0.0)
        finally:
            os.close(descriptor)
        return None if is_free else _holder(path)
    return None


def _opened(path: str, _: int) -> int:
    # Opened for writing, too: NFS locks only such a file exclusively.
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _locked(descriptor: int, operation: int, patience_seconds: float) -> bool:
    """Try to take a lock for some time; return whether that succeeded."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        else:
            return True


def _of_this_process() -> dict[str, str | int]:
    since = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    return {"host": socket.gethostname(), "process": os.getpid(), "since": since}


def _holder(path: Path) -> str:
    """Return the process that trains a run, from the contents of its lock file."""
    try:
        found = json.loads(path.read_bytes())
        who = f"process {found['process']} on {found['host']}, since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    return f"expected a run that has stopped, got {path.parent}, which is being trained by {who}"
