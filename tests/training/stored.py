"""Checkpoints that are saved, and found again, in one call."""

from typing import Any

from training.checkpoint.folders import Checkpoint, Checkpoints, Saved


def save_whole(store: Checkpoints, step: int, shared: Any, own: Any, *, best: bool = False) -> Saved | None:
    """Save a checkpoint, and return it when it is complete; collective."""
    store.start(step, shared, own, best=best)
    return store.finish()


def newest(store: Checkpoints) -> Checkpoint | None:
    """Return the newest checkpoint that all ranks can read; collective."""
    return next(store.complete(), None)
