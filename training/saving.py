"""The checkpoints of a run: when one is due, what of the run it holds, and how the run goes on with it."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.checkpoints import Checkpoint, Checkpoints
from training.events import CheckpointSaved, Resumed
from training.learner import Learner
from training.phases import PhaseRun
from training.records import Checkpointing
from training.state import Position, as_tree, own_state, restore, shared_state
from training.summary import Summary
from training.tally import Tally


@dataclass(frozen=True)
class Resumption:
    """Where a run goes on, and with what of its epoch: nothing where the world has another size than then."""

    position: Position
    tally: Tally | None
    event: Resumed


class Saving:
    """Makes the checkpoints of a run in the folder ``path``, and takes back the newest."""

    def __init__(self, path: Path, settings: Checkpointing, learner: Learner) -> None:
        self._settings, self._learner = settings, learner
        self._checkpoints = Checkpoints(path, learner.topology.world, keep=settings.keep)

    def is_due_after_step(self, phase: PhaseRun, at: Position) -> bool:
        """Return whether a checkpoint is made after this step; an epoch's last waits for the test."""
        ends = at.step == phase.epoch_steps or at.phase_steps == phase.steps
        return _divides(self._settings.every_steps, at.steps) and not ends

    def is_due_after_epoch(self, number: int) -> bool:
        """Return whether a checkpoint is made after epoch ``number`` of the run, the first of which is 1."""
        return _divides(self._settings.every_epochs, number)

    def save(self, position: Position, summary: Summary, tally: Tally, *, best: bool) -> CheckpointSaved:
        """Write a checkpoint; all ranks call it together."""
        start = time.perf_counter()
        shared = shared_state(self._learner)
        shared |= {"position": as_tree(position), "summary": asdict(summary)}
        own = own_state(self._learner) | {"tally": tally.as_tree()}
        self._checkpoints.save(position.steps, shared, own, best=best)
        return CheckpointSaved(position.steps, time.perf_counter() - start)

    def resume(self, phases: Sequence[PhaseRun], summary: Summary) -> Resumption | None:
        """Give learner and ``summary`` what the newest checkpoint holds, if there is one.

        All ranks call it together. Raises ``ValueError`` where it is of another model.
        """
        checkpoint = self._checkpoints.newest()
        if checkpoint is None:
            return None
        shared: Any = checkpoint.shared
        own: Any = checkpoint.own
        before = Position(**shared["position"])
        phase = phases[min(before.phase, len(phases) - 1)]
        lines = self._restore(checkpoint, phase, before)
        summary.restore(shared["summary"])
        position = phase.place(before)
        return Resumption(
            position,
            None if own is None else Tally.of(own["tally"]),
            Resumed(checkpoint.path.name, lines + _moved(before, position, phase), position),
        )

    def _restore(self, checkpoint: Checkpoint, phase: PhaseRun, at: Position) -> list[str]:
        """Give the learner what a checkpoint holds; return a line for what is not as it was."""
        self._learner.begin(phase.phase)
        # A density is a setting of the reducer: the state to come is of the epoch that it was made in.
        density = phase.density(at.epoch if at.step else max(0, at.epoch - 1))
        if density is not None:
            self._learner.set_density(density)
        return restore(self._learner, checkpoint)


def _divides(every: int | None, number: int) -> bool:
    return every is not None and number % every == 0


def _moved(before: Position, after: Position, phase: PhaseRun) -> list[str]:
    """Return a line that tells where an epoch goes on, where its steps take another number of samples."""
    if before == after:
        return []
    return [
        f"a step takes {phase.global_batch} samples now: {before.samples} of the epoch are read, it goes on "
        f"with step {after.step + 1} of {phase.epoch_steps}"
    ]
