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
    """Kills a rank, as ``kill -9`` does, at a call of a function: before what it does, or after.

    ``function``: as package.module:Name; the name is that by which it is called. ``call``: the first is 1.
    ``mark``: a file that says that it has happened, as it does once.
    """

    def __init__(self, rank: int, function: str, call: int, after: bool, mark: str) -> None:
        self._rank, self._call, self._after, self._mark = rank, call, after, Path(mark)
        self._owner, _, self._name = function.replace(":", ".").rpartition(".")

    def on_run_begin(self, run: Any) -> None:
        if run.rank != self._rank or self._mark.exists():
            return
        owner = pkgutil.resolve_name(self._owner)
        whole, calls = getattr(owner, self._name), itertools.count(1)

        def deadly(*values: Any, **named: Any) -> Any:
            is_it = next(calls) == self._call
            result = whole(*values, **named) if self._after or not is_it else None
            if is_it:
                self._mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, self._name, deadly)


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
        gradients = run.learner.gradients
        assert not gradients.overlaps  # or it would be reduced elsewhere
        whole = gradients.reduce_flat

        def poisoned(gradient: Any, *others: Any) -> Any:
            step = run.position.steps
            if is_poisoned(step, self._share):
                gradient = np.array(gradient)
                gradient[step % len(gradient)] = (np.nan, np.inf, -np.inf)[step % 3]
            return whole(gradient, *others)

        gradients.reduce_flat = poisoned
