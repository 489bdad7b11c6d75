"""Callbacks that do something to a run from inside, named by import paths."""

import os
import random
import signal
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
