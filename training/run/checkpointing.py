"""The checkpoints of a run: when one is due, what it contains, and how the run resumes from it."""

import copy
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from commlib.errors import one_line
from datacache.escaping import without_secrets
from datacache.order import Order
from datacache.storage import Storage
from training.callbacks.callback import Callback, Callbacks, RunEvent, RunView
from training.checkpoint.folders import SHARED, Checkpoint, Checkpoints, Saved, own_file
from training.checkpoint.places import Folder, Location, Objects, Place
from training.checkpoint.serialization import Damaged, parsed
from training.config.records import FILE_URLS, Checkpointing
from training.config.run_files import CHECKPOINTS, METRICS, last_checkpoint
from training.config.secrets import resolved
from training.process.job import Preempted, all_or_raise, on_rank0, terminations
from training.results import EpochAccumulator, Position, Step, Summary
from training.run import events
from training.run.build import Parts
from training.run.model import OtherRun
from training.run.phases import PhaseRun

# Flags of a step (see commlib.Topology): this rank was sent SIGTERM; it still writes a checkpoint.
TERMINATED, WRITING = 1, 2


class ResumableRun(RunView, Protocol):
    """A run with the state that a checkpoint holds: of its parts, its callbacks and its loop."""

    parts: Parts
    callbacks: Callbacks
    phases: list[PhaseRun]
    position: Position
    accumulator: EpochAccumulator


class Checkpointer:
    """Writes the checkpoints of the run in ``folder``, and restores the newest.

    A checkpoint holds the states of the parts by name, and those of the loop and the callbacks. Checkpoints
    are written in the background, one at a time. The loop waits while the state is copied, and for a
    checkpoint that is incomplete when the next one is due or the run ends. From the flags of a step all ranks
    learn whether any rank is still writing, and whether any was sent SIGTERM.

    ``identity``: the run's; rank 0's is used. All ranks call every method together; ``ValueError`` on all
    ranks if checkpoints cannot be kept in the configured place.
    """

    def __init__(self, run: ResumableRun, folder: Path, settings: Checkpointing, identity: str) -> None:
        self._run, self._settings, self._folder = run, settings, folder
        world = run.topology.world
        identity = on_rank0(world, lambda: identity)
        self.place = all_or_raise(world, lambda: place_of(folder, settings, identity, world.host))
        self._checkpoints = Checkpoints(
            self.place, world, run=identity, keep=settings.keep, per_host=settings.per_node
        )
        self._copy_seconds, self._latest = 0.0, -1  # of the latest, and its step

    # ------------------------------------------------------------------------------------- saving

    @property
    def flags(self) -> int:
        """The flags of this rank's next step."""
        return WRITING if self._checkpoints.is_working else 0

    @contextmanager
    def until_terminated(self) -> Iterator[None]:
        """Exchange SIGTERM and unfinished writes by the flags of steps inside the block."""
        with terminations() as received:
            self._run.topology.flags = lambda: (TERMINATED if received else 0) | self.flags
            yield

    def after_step(self, phase: PhaseRun, step: Step) -> None:
        """Continue a checkpoint, and begin one that is due; raise :class:`Preempted` after SIGTERM."""
        at, flags = self._run.position, step.report.flags
        flags_of = at.steps - (phase.phase.outer.delay if phase.phase.outer else 0)  # when the exchange began
        is_known = bool(step.hyperparameters.round_steps) and flags_of > self._latest
        if is_known and not flags & WRITING and self._checkpoints.is_under_way:
            # Within a round the flags are not those of all ranks. No rank waits for another one's disk.
            self._report(self._checkpoints.proceed(), 0.0)
        terminated = bool(flags & TERMINATED)
        # The checkpoint of an epoch's last step waits for the test.
        ends_epoch = at.step == phase.epoch_steps or at.phase_steps == phase.steps
        if ends_epoch or not (terminated or _divides(self._settings.every_steps, at.steps)):
            return
        self.save()
        if terminated:
            self.finish()
            self._run.report(events.terminated(at.steps))
            raise Preempted(at.steps)
        self._run.restart_step_clock()

    def after_epoch(self, number: int, *, is_best: bool, is_over: bool) -> None:
        """Begin a checkpoint if one is due after epoch ``number`` of the run, the first of which is 1."""
        settings, steps = self._settings, self._run.position.steps
        is_due = _divides(settings.every_epochs, number) or _divides(settings.every_steps, steps)
        if is_best or is_over or is_due:
            self.save(best=is_best)

    def save(self, *, best: bool = False) -> None:
        """Begin to write a checkpoint."""
        self.finish()
        start, run = time.perf_counter(), self._run
        shared, own = states_of(run.parts)
        loop = {"position": asdict(run.position), "summary": asdict(run.summary)}
        loop["callbacks"] = copy.deepcopy(run.callbacks.state_dict())
        if self._settings.per_node:  # other ranks save them, too
            loop = on_rank0(run.topology.world, lambda: loop)
        shared |= loop
        own["accumulator"] = run.accumulator.as_tree()
        self._copy_seconds = time.perf_counter() - start
        self._latest = run.position.steps
        self._checkpoints.start(run.position.steps, shared, own, best=best)

    def finish(self) -> None:
        """Wait for the checkpoint that is under way, if there is one."""
        start = time.perf_counter()
        saved = self._checkpoints.finish()
        self._report(saved, time.perf_counter() - start)

    def _report(self, saved: Saved | None, wait_seconds: float) -> None:
        if saved is not None:
            times = (self._copy_seconds, saved.write_seconds, wait_seconds)
            self._run.report(events.checkpoint_saved(saved.step, *times))
            self._run.callbacks.call(Callback.on_checkpoint, self._run, saved.step)

    # ----------------------------------------------------------------------------------- resuming

    def resume(self, *, at_most: int | None = None) -> bool:
        """Resume from the newest usable checkpoint; return whether there is one.

        ``at_most``: the latest step to resume from. Damaged checkpoints are skipped with a warning. Raises
        ``ValueError`` if none is usable (without ``at_most``), or one is of another model or optimizer.
        """
        rank, stored = self._run.topology.world.rank, self._checkpoints
        for checkpoint in stored.complete(at_most=at_most):
            found = stored.usable(checkpoint.step, partial(_contents, checkpoint, rank))
            if found is None:
                continue
            event = stored.usable(checkpoint.step, partial(self._restore, checkpoint, found))
            if event is not None:
                self._run.summary.restore(found.summary)
                self._run.callbacks.load_state_dict(found.callbacks)
                self._run.report(event)
                return True
        if at_most is None and (count := stored.count()):
            where = "; on disks of nodes, only by as many ranks on the same hosts"
            raise ValueError(
                f"resume: expected a checkpoint that can be used{where if self._settings.per_node else ''}, "
                f"got none among the {count} in {self.place}; resume=never begins a new run"
            )
        on_rank0(self._run.topology.world, self._check_none_is_lost)
        self._run.progress.say("resume: there is no checkpoint yet: the run begins again")
        return False

    def _check_none_is_lost(self) -> None:
        """Raise ``ValueError`` where the run has recorded a checkpoint, and there is none."""
        steps = None if self._run.folder is None else last_checkpoint(self._folder / METRICS)
        if steps is not None:
            expected = f"the checkpoint of step {steps}, or one before it, in {self.place}"
            raise ValueError(f"resume: expected {expected}, got none; resume=never begins a new run")

    def _restore(self, checkpoint: Checkpoint, found: "_Contents") -> RunEvent:
        run, at = self._run, found.position
        phase = run.phases[min(at.phase, len(run.phases) - 1)]
        self._run.parts.step.begin(phase.phase)
        # The density is a setting of the reducer: it is set to that of the checkpoint's epoch first.
        density = phase.density(at.epoch if at.step else max(0, at.epoch - 1))
        self._run.parts.step.begin_epoch(density, is_new=False)
        lines = restore(self._run.parts, checkpoint)
        run.position = phase.converted(at)
        run.accumulator = found.accumulator or run.accumulator
        return events.resumed(checkpoint.path.name, lines + _moved(at, run.position, phase), run.position)


def states_of(parts: Parts) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states of all parts by name, those equal on all ranks and those of this rank; collective."""
    shared, own = dict[str, Any](), dict[str, Any]()
    for part in parts.stateful.values():
        # Within a round of local steps, the model's state is that of the common weights.
        with parts.exchange.common_weights() if part is parts.model else nullcontext():
            state = part.state_dict()
        shared |= state.shared
        own |= state.own
    return shared, own


def restore(parts: Parts, checkpoint: Checkpoint) -> list[str]:
    """Restore the parts from a checkpoint; return a line for each difference.

    The parts must be in the phase of the checkpoint already. Raises :class:`OtherRun`, for another model
    before anything is changed, and :class:`training.checkpoint.serialization.Damaged` if the contents are not
    the state of a run: another checkpoint can be restored after that.
    """
    exchange = parts.exchange.gradients.exchange
    before, lines = exchange.state_dict(), list[str]()
    shared: Any = checkpoint.shared
    try:
        with readable(checkpoint.path / SHARED):
            for part in parts.stateful.values():
                part.check_state(shared)
        with readable(checkpoint.path):
            for part in parts.stateful.values():
                lines += part.load_state_dict(checkpoint)
    except Damaged:
        exchange.load_state_dict(before)
        raise
    return lines


@contextmanager
def readable(file: Location) -> Iterator[None]:
    """Raise :class:`Damaged` where the bytes are right, and the contents are not those of a run."""
    try:
        yield
    except (OtherRun, Damaged):
        raise
    except KeyError as error:
        raise Damaged(f"{file}: expected {error} in the state of a run, got none") from error
    except ValueError as error:
        raise Damaged(f"{file}: {one_line(str(error))}") from error
    except (TypeError, AttributeError, IndexError) as error:
        raise Damaged(f"{file}: expected the state of a run, got {one_line(str(error))}") from error


@dataclass(frozen=True)
class _Contents:
    """The state of loop and callbacks in a checkpoint.

    ``accumulator``: ``None`` where another number of ranks wrote the checkpoint. ``callbacks``: by name.
    """

    position: Position
    summary: Summary
    callbacks: Mapping[str, Mapping[str, Any]]
    accumulator: EpochAccumulator | None


def _contents(checkpoint: Checkpoint, rank: int) -> _Contents:
    """Return the state of loop and callbacks; raise :class:`Damaged` if the checkpoint holds another."""
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

    Below ``checkpoints.path`` their folder is named ``run``, the run's identity, which does not change when
    the run's folder is renamed. ``ValueError`` if the storage cannot be used, as when its package is missing.
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
    order = phase.data.order
    line = f"a step takes {phase.global_batch} {order.unit} now: {before.samples} of the epoch are read, "
    if after.step == phase.epoch_steps:
        return [f"{line}too few are left for a step"]
    line += f"it goes on with step {after.step + 1} of {phase.epoch_steps}"
    if not isinstance(order, Order):  # those of texts depend on the size of a batch
        line += ", in another order: some may be read twice, and others not"
    return [line]
