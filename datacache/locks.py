"""Locks on files between processes: always waited for with a limit, released by the kernel after a crash."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FIRST_NAP_SECONDS = 0.0002
_LONGEST_NAP_SECONDS = 0.02

_exclusive: set[int] = set()  # descriptors: a child that inherits one must not keep the lock alive


def take(path: Path, *, shared: bool = False, timeout_seconds: float = 0.0) -> int | None:
    """Return a descriptor that holds the lock until it is closed, or ``None`` if others held it all the time.

    The file is created if it is missing; nothing is written to it, so its folder may be read-only if not.
    """
    descriptor = _open(path)
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    deadline, nap = time.monotonic() + timeout_seconds, _FIRST_NAP_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, operation)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)
        except BaseException:
            os.close(descriptor)
            raise
        else:
            return descriptor


@contextmanager
def exclusive(path: Path, timeout_seconds: float) -> Iterator[bool]:
    """Hold the lock inside the block, which is told whether it was to be had."""
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


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)


def _forget_in_child() -> None:
    for descriptor in _exclusive:
        os.close(descriptor)
    _exclusive.clear()


os.register_at_fork(after_in_child=_forget_in_child)
