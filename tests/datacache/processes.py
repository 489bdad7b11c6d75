"""Forked processes, for tests."""

import multiprocessing
import os
from collections.abc import Callable

FORK = multiprocessing.get_context("fork")


def in_child(function: Callable[[], bool]) -> bool:
    """Return what the function returned in a forked process."""
    child = FORK.Process(target=lambda: os._exit(0 if function() else 1))
    child.start()
    child.join(60)
    assert child.exitcode is not None, "the child hangs"
    return child.exitcode == 0
