"""Callbacks that do something to a run from inside, named by import paths."""

import itertools
import os
import pkgutil
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np

from training.callbacks.callback import Callback


class Terminated(Callback):
    """Sends a rank SIGTERM after a step."""

    def __init__(self, rank: int, step: int) -> None:
        self._rank, self._step = rank, step

    def on_step_end(self, run: Any, step: Any) -> None:
        if (run.rank, run.position.steps) == (self._rank, self._step):
            os.kill(os.getpid(), signal.SIGTERM)


class Killed(Callback):
    """Kills ranks, as ``kill -9`` does, at calls of functions, each once: before what they do, or after.

    ``kills``: by name the rank, the function as package.module:Name, by the name by which it is called, which
    of a process's calls of it, from 1 on, and whether after it. ``marks``: a folder of those that happened.
    """

    def __init__(self, kills: dict[str, tuple[int, str, int, bool]], marks: str) -> None:
        self._kills, self._marks = kills, Path(marks)

    def on_run_begin(self, run: Any) -> None:
        for name, (rank, function, call, after) in self._kills.items():
            if run.rank == rank and not (self._marks / name).exists():
                self._arm(self._marks / name, function, call, after)

    def _arm(self, mark: Path, function: str, number: int, after: bool) -> None:
        owner, _, name = function.replace(":", ".").rpartition(".")
        there = pkgutil.resolve_name(owner)
        whole, calls = getattr(there, name), itertools.count(1)

        def deadly(*values: Any, **named: Any) -> Any:
            is_it = next(calls) == number
            result = whole(*values, **named) if after or not is_it else None
            if is_it:
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(there, name, deadly)


def is_poisoned(step: int, share: float) -> bool:
    """Return whether the gradient of a step is: at random, and the same in every process."""
    return random.Random(f"step {step}").random() < share


class NotFinite(Callback):
    """Makes an entry of the gradient of one rank a NaN or an infinity, in a share of the steps."""

    def __init__(self, rank: int, share: float) -> None:
        self._rank, self._share = rank, share

    def on_run_begin(self, run: Any) -> None:
        if run.rank != self._rank:
            return
        gradients = run.parts.exchange.gradients
        assert not gradients.overlaps  # or it would be reduced elsewhere
        whole = gradients.reduce_flat

        def poisoned(gradient: Any, *others: Any) -> Any:
            step = run.position.steps
            if is_poisoned(step, self._share):
                gradient = np.array(gradient)
                gradient[step % len(gradient)] = (np.nan, np.inf, -np.inf)[step % 3]
            return whole(gradient, *others)

        gradients.reduce_flat = poisoned
