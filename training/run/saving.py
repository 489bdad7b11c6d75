"""The checkpoints of a run: when one is due, what it contains, and how the run resumes from it."""

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datacache.storage import Storage
from datacache.urls import without_secrets
from training.callbacks.calling import Callbacks
from training.checkpoint.folders import Checkpoints, Saved
from training.checkpoint.manifest import SHARED, own_file
from training.checkpoint.places import Folder, Objects, Place
from training.checkpoint.serialization import parsed
from training.checkpoint.stored import Checkpoint
from training.config.records import FILE_URLS, Checkpointing
from training.config.run_files import CHECKPOINTS
from training.config.secrets import resolved
from training.process.job import all_or_raise, on_rank0
from training.results import EpochAccumulator, Position, Summary
from training.run.events import CheckpointSaved, Resumed
from training.run.learner import Learner
from training.run.phases import PhaseRun
from training.run.state import own_state, readable, restore, shared_state


@dataclass(frozen=True)
class Resumption:
    """Where a run resumes; with the sums of its epoch so far, unless the number of ranks has changed."""

    position: Position
    accumulator: EpochAccumulator | None
    event: Resumed


# Flags of a step (see commlib.Topology): this rank was sent SIGTERM; it still writes a checkpoint.
TERMINATED, WRITING = 1, 2


class Saving:
    """Writes the checkpoints of the run in ``folder`` to its place, and restores the newest.

    They are written in the background, one at a time. The loop is held up by a copy of the state, and by a
    checkpoint that is not complete when the next one is due or the run ends. In between, ranks agree that all
    have written their files by the flags of the steps.

    ``run``: the identity of the run; that of rank 0 is used. ``callbacks``: whose states are saved, too.
    Collective; ``ValueError`` on all ranks where there can be no such place.
    """

    def __init__(
        self, folder: Path, settings: Checkpointing, learner: Learner, run: str, callbacks: Callbacks
    ) -> None:
        self._settings, self._learner, self._callbacks = settings, learner, callbacks
        world = learner.topology.world
        run = on_rank0(world, lambda: run)
        self.place = all_or_raise(world, lambda: place_of(folder, settings, run, world.host))
        self._checkpoints = Checkpoints(
            self.place, world, run=run, keep=settings.keep, per_host=settings.per_node
        )
        self._copy_seconds = 0.0  # of the latest

    @property
    def flags(self) -> int:
        """The flags of this rank's next step."""
        return WRITING if self._checkpoints.is_working else 0

    def is_due_after_step(self, phase: PhaseRun, at: Position, *, terminated: bool) -> bool:
        """Return whether a checkpoint is made after this step; an epoch's last waits for the test."""
        ends = at.step == phase.epoch_steps or at.phase_steps == phase.steps
        return (terminated or _divides(self._settings.every_steps, at.steps)) and not ends

    def is_due_after_epoch(self, number: int) -> bool:
        """Return whether a checkpoint is made after epoch ``number`` of the run, the first of which is 1."""
        return _divides(self._settings.every_epochs, number)

    def start(
        self, position: Position, summary: Summary, accumulator: EpochAccumulator, *, best: bool
    ) -> CheckpointSaved | None:
        """Begin to write a checkpoint; return the one before if that was not complete. Collective."""
        before, start = self.finish(), time.perf_counter()
        shared = shared_state(self._learner)
        shared |= self._of_loop(position, summary)
        own = own_state(self._learner) | {"accumulator": accumulator.as_tree()}
        self._copy_seconds = time.perf_counter() - start
        self._checkpoints.start(position.steps, shared, own, best=best)
        return before

    def _of_loop(self, position: Position, summary: Summary) -> dict[str, Any]:
        """Return what the checkpoint has of the loop: as rank 0 has it, where other ranks save it, too."""
        own = {"position": asdict(position), "summary": asdict(summary)}
        own["callbacks"] = copy.deepcopy(self._callbacks.state_dict())
        return on_rank0(self._learner.topology.world, lambda: own) if self._settings.per_node else own

    def proceed(self, flags: int) -> CheckpointSaved | None:
        """Go on with a checkpoint after a step with these flags of all ranks; return it if it is complete.

        Collective; no rank waits for another one's disk.
        """
        if flags & WRITING or not self._checkpoints.is_under_way:
            return None
        return self._event(self._checkpoints.proceed(), 0.0)

    def finish(self) -> CheckpointSaved | None:
        """Wait for the checkpoint that is under way, and return it, if there is one; collective."""
        start = time.perf_counter()
        saved = self._checkpoints.finish()
        return self._event(saved, time.perf_counter() - start)

    def _event(self, saved: Saved | None, wait_seconds: float) -> CheckpointSaved | None:
        if saved is None:
            return None
        return CheckpointSaved(saved.step, self._copy_seconds, saved.write_seconds, wait_seconds)

    def resume(
        self, phases: Sequence[PhaseRun], summary: Summary, *, at_most: int | None = None
    ) -> Resumption | None:
        """Restore learner and ``summary`` from the newest usable checkpoint, if there is one.

        ``at_most``: of this step or an earlier one, and none where there are only later ones. Collective. A
        damaged one is skipped with a warning; raises ``ValueError`` if none is usable, and if the checkpoint
        is of another model or optimizer.
        """
        rank, stored = self._learner.topology.world.rank, self._checkpoints.stored
        for checkpoint in stored.complete(at_most=at_most):
            found = stored.usable(checkpoint.step, partial(_contents, checkpoint, rank))
            if found is None:
                continue
            taken = stored.usable(checkpoint.step, partial(self._take_over, checkpoint, found, phases))
            if taken is not None:
                summary.restore(found.summary)
                self._callbacks.load_state_dict(found.callbacks)
                return taken
        if at_most is None and (count := stored.count()):
            where = "; on disks of nodes, only by as many ranks on the same hosts"
            raise ValueError(
                f"resume: expected a checkpoint that can be used{where if self._settings.per_node else ''}, "
                f"got none among the {count} in {self.place}; resume=never begins a new run"
            )
        return None

    def _take_over(
        self, checkpoint: Checkpoint, found: "_Contents", phases: Sequence[PhaseRun]
    ) -> Resumption:
        """Restore the learner from a checkpoint."""
        before = found.position
        phase = phases[min(before.phase, len(phases) - 1)]
        lines = self._restore(checkpoint, phase, before)
        position = phase.converted(before)
        event = Resumed(checkpoint.path.name, lines + _moved(before, position, phase), position)
        return Resumption(position, found.accumulator, event)

    def _restore(self, checkpoint: Checkpoint, phase: PhaseRun, at: Position) -> list[str]:
        """Restore the learner from a checkpoint; return a line for each difference."""
        self._learner.begin(phase.phase)
        # The density is a setting of the reducer: it is set to that of the checkpoint's epoch first.
        density = phase.density(at.epoch if at.step else max(0, at.epoch - 1))
        if density is not None:
            self._learner.set_density(density)
        return restore(self._learner, checkpoint)


@dataclass(frozen=True)
class _Contents:
    """A checkpoint's data besides the learner. ``accumulator``: if the number of ranks is the same.

    ``callbacks``: their states by name.
    """

    position: Position
    summary: Summary
    callbacks: dict[str, dict[str, Any]]
    accumulator: EpochAccumulator | None


def _contents(checkpoint: Checkpoint, rank: int) -> _Contents:
    """Return it; raise :class:`Damaged` if the checkpoint contains something else."""
    shared: Any = checkpoint.shared
    own: Any = checkpoint.own
    with readable(checkpoint.path / SHARED):
        position = parsed(Position, json.dumps(shared["position"]))
        summary = parsed(Summary, json.dumps(shared["summary"]))
        callbacks = {name: dict(state) for name, state in shared["callbacks"].items()}
    with readable(checkpoint.path / own_file(rank)):
        accumulator = None if own is None else parsed(EpochAccumulator, json.dumps(own["accumulator"]))
    return _Contents(position, summary, callbacks, accumulator)


def place_of(folder: Path, settings: Checkpointing, run: str, host: str) -> Place:
    """Return where the checkpoints of the run in ``folder`` are, for the ranks of ``host``.

    Elsewhere than there, they are in a folder named after the identity ``run``, which stays when a folder is
    renamed. ``ValueError`` where a storage cannot be had at all, such as one whose package is missing.
    """
    if settings.path is None:
        return Folder(folder / CHECKPOINTS)
    path = str(resolved(settings.path))
    if not settings.is_url:
        for protocol in FILE_URLS:
            path = path.removeprefix(protocol)
        own = Path(path).expanduser() / run
        return Folder(own / host if settings.per_node else own)
    try:
        return Objects(Storage(f"{path.rstrip('/')}/{run}", **resolved(settings.storage)))
    except Exception as error:
        raise ValueError(f"checkpoints.path: {without_secrets(f'{path}: {error}')}") from None


def _divides(every: int | None, number: int) -> bool:
    return every is not None and number % every == 0


def _moved(before: Position, after: Position, phase: PhaseRun) -> list[str]:
    """Return a line with the step at which an epoch resumes if the global batch size has changed."""
    if before == after:
        return []
    return [
        f"a step takes {phase.global_batch} {phase.data.order.unit} now: {before.samples} of the epoch are "
        f"read, it goes on with step {after.step + 1} of {phase.epoch_steps}"
    ]
