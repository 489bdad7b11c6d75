"""Checkpoints that are saved, and found again, in one call."""

import json
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from training.checkpoint.folders import Checkpoint, Checkpoints, Saved

COMPLETE, SHARED, OWN = "COMPLETE", "shared.safetensors", "own-{:05d}.safetensors"


def save_whole(store: Checkpoints, step: int, shared: Any, own: Any, *, best: bool = False) -> Saved | None:
    store.start(step, shared, own, best=best)
    return store.finish()


def newest(store: Checkpoints) -> Checkpoint | None:
    """Return the newest checkpoint that all ranks can read; collective."""
    return next(store.complete(), None)


def manifest_of(folder: Path) -> Any:
    return json.loads((folder / COMPLETE).read_text().splitlines()[0])


def write_manifest(folder: Path, body: Any) -> None:
    """Write a manifest, or a text in its place, with the digest of that, as another program would."""
    text = body if isinstance(body, str) else json.dumps(body)
    (folder / COMPLETE).write_text(f"{text}\n{xxh3_128_hexdigest(text.encode())}\n")
