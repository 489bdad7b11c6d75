"""File locks between processes: each wait has a limit, and the kernel releases them after a crash."""

import fcntl
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from datacache.store.files import open_file

_FIRST_NAP_SECONDS = 0.0002
_LONGEST_NAP_SECONDS = 0.02
_SILENT_SECONDS = 5.0  # of waiting, before a warning names the holders of the lock

_exclusive: set[int] = set()  # descriptors: a child that inherits one must not keep the lock alive


def take(path: Path, *, shared: bool = False, timeout_seconds: float = 0.0) -> int | None:
    """Return a descriptor that holds the lock until it is closed, or ``None`` after the timeout.

    The file is created if it is missing; an existing one may be in a read-only folder. A long wait is warned
    of once, with the processes that hold the lock: they may be stopped.
    """
    try:
        descriptor = open_file(path)
    except FileNotFoundError:
        descriptor = open_file(path, os.O_RDONLY | os.O_CREAT)  # which some read-only file systems refuse
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    start, nap, has_warned = time.monotonic(), _FIRST_NAP_SECONDS, False
    while True:
        try:
            fcntl.flock(descriptor, operation)
        except BlockingIOError:
            waited = time.monotonic() - start
            if waited >= timeout_seconds:
                os.close(descriptor)
                return None
            if waited >= _SILENT_SECONDS and not has_warned:
                has_warned = True
                warnings.warn(
                    f"{path}: locked by {_holders(descriptor)}, waiting for at most {timeout_seconds:g} s",
                    stacklevel=2,
                )
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)
        except BaseException:
            os.close(descriptor)
            raise
        else:
            return descriptor


@contextmanager
def exclusive(path: Path, timeout_seconds: float) -> Iterator[bool]:
    """Hold the lock inside the block; yield whether it was acquired before the timeout."""
    descriptor = take(path, timeout_seconds=timeout_seconds)
    if descriptor is None:
        yield False
        return
    _exclusive.add(descriptor)
    try:
        yield True
    finally:
        if descriptor in _exclusive:
            _exclusive.remove(descriptor)
            os.close(descriptor)


def _holders(descriptor: int) -> str:
    """Return the processes that hold a lock on a file, as far as ``/proc/locks`` shows them."""
    inode = f":{os.fstat(descriptor).st_ino}"
    processes: list[str] = []
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5].endswith(inode):
                processes.append(words[4])
    return f"process {', '.join(processes)}" if processes else "another process"


def _release_in_child() -> None:
    for descriptor in _exclusive:
        os.close(descriptor)
    _exclusive.clear()


os.register_at_fork(after_in_child=_release_in_child)
