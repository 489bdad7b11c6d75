"""Checkpoints while a run goes: its resumption, those that are due, and the one that SIGTERM asks for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from training.callbacks.callback import Callback
from training.config.run_files import METRICS
from training.process.job import Preempted, on_rank0, terminations
from training.process.last_records import last_checkpoint
from training.results import Step
from training.run import events
from training.run.phases import PhaseRun
from training.run.saving import TERMINATED, Saving

if TYPE_CHECKING:
    from training.run.trainer import Trainer


class Checkpointer:
    """Resumes ``run`` by ``saving``, has it saved when a checkpoint is due, and reports what is complete.

    All ranks call every method together.
    """

    def __init__(self, run: "Trainer", saving: Saving) -> None:
        self._run, self.saving = run, saving

    def resume(self, *, at_most: int | None = None) -> bool:
        """Resume from the newest checkpoint, of at most this step; return whether there is one."""
        run = self._run
        resumption = self.saving.resume(run.phases, run.summary, at_most=at_most)
        if resumption is None:
            on_rank0(run.topology.world, self._check_none_is_lost)
            run.progress.say("resume: there is no checkpoint yet: the run begins again")
            return False
        run.position = resumption.position
        run.accumulator = resumption.accumulator or run.accumulator
        run.report(resumption.event)
        return True

    def _check_none_is_lost(self) -> None:
        """Raise ``ValueError`` where the run has recorded a checkpoint, and there is none."""
        folder = self._run.folder
        steps = None if folder is None else last_checkpoint(folder.path / METRICS)
        if steps is not None:
            expected = f"the checkpoint of step {steps}, or one before it, in {self.saving.place}"
            raise ValueError(f"resume: expected {expected}, got none; resume=never begins a new run")

    @contextmanager
    def until_terminated(self) -> Iterator[None]:
        """Let ranks agree inside the block, by the flags of steps, on SIGTERM and on what is written."""
        with terminations() as received:
            self._run.topology.flags = lambda: self._flags(received)
            yield

    def _flags(self, received: Sequence[int]) -> int:
        """Return the flags of this rank's next step."""
        return (TERMINATED if received else 0) | self.saving.flags

    def after_step(self, phase: PhaseRun, step: Step) -> None:
        """Go on with a checkpoint, and begin one that is due; raise :class:`Preempted` after SIGTERM."""
        run, flags = self._run, step.report.flags
        if step.hyperparameters.round_steps:  # within a round the flags are not those of all ranks
            self._report(self.saving.proceed(flags))
        terminated = bool(flags & TERMINATED)
        if not self.saving.is_due_after_step(phase, run.position, terminated=terminated):
            return
        self.save()
        if terminated:
            self.finish()
            run.report(events.Terminated(run.position.steps))
            raise Preempted(run.position.steps)
        run.restart_step_clock()

    def after_epoch(self, number: int, *, is_best: bool, is_over: bool) -> None:
        """Begin to write a checkpoint if one is due after epoch ``number`` of the run, or it ``is_over``."""
        if is_best or is_over or self.saving.is_due_after_epoch(number):
            self.save(best=is_best)

    def save(self, *, best: bool = False) -> None:
        """Begin to write a checkpoint."""
        run = self._run
        run.count_seconds()
        self._report(self.saving.start(run.position, run.summary, run.accumulator, best=best))

    def finish(self) -> None:
        """Wait for the checkpoint that is under way, if there is one."""
        self._report(self.saving.finish())

    def _report(self, saved: events.CheckpointSaved | None) -> None:
        if saved is not None:
            self._run.report(saved)
            self._run.callbacks.call(Callback.on_checkpoint, self._run, saved.steps)
