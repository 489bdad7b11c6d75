"""A run: the loop over phases and epochs, with tests, checkpoints, and callbacks for all else."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from commlib import Topology
from commlib.transport.mpi import world
from datacache import Batch
from training.callbacks.callback import Callback, Event
from training.callbacks.calling import Callbacks
from training.callbacks.dawnbench import DawnBenchFiles
from training.callbacks.digests import Digests
from training.callbacks.metrics import Metrics
from training.callbacks.prometheus import Prometheus
from training.callbacks.skipped_steps import SkippedSteps
from training.callbacks.tracing import Profiler
from training.config.config import Config, load
from training.config.run_files import METRICS
from training.process.backend import prepare_tensorflow
from training.process.compile_kernels import announce_compiling
from training.process.devices import with_gpus
from training.process.job import LocalRank, Preempted, all_or_raise, on_rank0, terminations
from training.process.last_records import last_checkpoint
from training.process.progress import Progress
from training.run import events
from training.run.autotune import profile_for
from training.run.data import Data, load_data
from training.run.evaluation import NOT_TESTED, add_up, evaluate
from training.run.learner import Learner
from training.run.metrics import RunFolder, WeightsNotSaved, to_resume
from training.run.parts import import_parts
from training.run.phases import PhaseRun
from training.run.receipts import Receipts
from training.run.saving import TERMINATED, Saving
from training.run.stages import Step
from training.run.state import Position
from training.run.step_reports import StepReports
from training.run.summary import Ranks, Summary
from training.run.totals import EpochAccumulator


class Trainer:
    """One run of a configuration, or of a file that holds one, on all ranks of this job.

    ``topology`` and ``data`` are created if not given. ``config`` is the configuration with the choices from
    the profile written out, ``model`` the Keras model. ``learner``: what a step is. Raises a ``ValueError``
    of one line if the run is impossible. Callbacks also use ``rank``, ``size``, ``topology``, ``task``,
    ``learner``, ``phase``, ``position``, ``accumulator``, ``summary``, ``ranks``, ``folder`` (on rank 0),
    ``progress``, ``report`` and ``stop``.

    A second run in the same process can read the checkpoints of the first only after
    ``keras.utils.clear_session()``: they use Keras's names of weights, which number its layers.
    """

    def __init__(
        self,
        config: Config | str | Path,
        *,
        topology: Topology | None = None,
        data: Data | None = None,
        learner: type[Learner] = Learner,
    ) -> None:
        config = import_parts(config if isinstance(config, Config) else load(config))
        topology = topology or Topology(world(verify=config.verify), ranks_per_node=config.ranks_per_node)
        if topology.world.rank == 0:
            announce_compiling()
        data = data or load_data(config, topology)
        prepare_tensorflow(config, topology.world, LocalRank.of(topology.world))
        self.topology, self._why_not_on_gpus = with_gpus(topology, config.transport)
        self.data = data
        self.rank, self.size = topology.world.rank, topology.world.size
        self.learner = learner(config, self.topology, data, profile_for(config, self.topology))
        self.task = data.task
        self.config = self.learner.config
        self.model = self.learner.model
        watchdog = self.learner.watchdog
        self.learner.gradients.guard = lambda: watchdog.waiting(f"step {self.position.steps + 1}")
        phases = enumerate(self.config.phases)
        self.phases = [PhaseRun(number, phase, data, self.learner) for number, phase in phases]
        self.position = Position()
        self.summary = Summary(phases=[phase.result for phase in self.phases])
        self.accumulator = EpochAccumulator()
        self._saving: Saving | None = None
        self._reason_to_stop: str | None = None
        self._began = time.perf_counter()
        self._now = topology.world.now
        self._boundary = self._last = self._first_step_end = self._now()
        self.folder: RunFolder | None = None
        self.callbacks = Callbacks(
            _own_callbacks(self.config),
            [(each.name, each.make()) for each in self.config.callbacks],
            [Receipts()],
        )
        self._call(Callback.on_build)

    def fit(self) -> Summary:
        """Train, report progress, write the run's folder and return the summary; collective."""
        comm, folder = self.topology.world, None

        def open_folder() -> tuple[Path, bool]:
            nonlocal folder
            resumed = to_resume(self.config)
            folder = RunFolder(self.config, resumed)
            return folder.path.absolute(), resumed is not None

        path, resume = on_rank0(comm, open_folder)
        with folder or nullcontext(), Progress(silent=folder is None) as progress:
            self.begin(folder, progress, path, resume=resume)
            return self.run()

    def begin(
        self, folder: RunFolder | None, progress: Progress, path: Path, *, resume: bool = False
    ) -> None:
        """Prepare training; only rank 0 has a ``folder``, if anything is to be written; all know its path.

        ``resume``: from the newest checkpoint there; rank 0's value is used. Raises ``ValueError`` if that
        is of another model.
        """
        self.folder, self.progress = folder, progress
        resume = on_rank0(self.topology.world, lambda: resume)
        self.ranks = Ranks.of(self.topology)
        if folder is not None:
            on_gpus = self.topology.world.arrays is not np
            self.report(events.RunBegun.of(folder.identity, self.ranks, self.config, on_gpus=on_gpus))
        progress.say(events.introduction(self.data, self.learner))
        for line in self.task.notes(self.data.samples):
            progress.say(line)
        for event in events.choices(self.learner, self._why_not_on_gpus):
            self.report(event)
        for event in events.rounds(self.phases):
            self.report(event)
        resumed = False
        if self.config.checkpoints is not None:
            run = "" if folder is None else folder.identity
            self._saving = Saving(path, self.config.checkpoints, self.learner, run, self.callbacks)
            if resume:
                resumed = self.go_on(self._saving)
            elif self.config.resume != "never":
                progress.say(f"resume: no run of {self.config.name} is there to go on with: this one is new")
        # Last: if a checkpoint is refused, the folder is unchanged.
        all_or_raise(self.topology.world, lambda: self._call(Callback.on_run_begin))
        if resumed:
            self._call(Callback.on_resume)
        self._prepare()

    def run(self) -> Summary:
        """Train all remaining phases.

        With checkpoints, SIGTERM to any rank ends it after the step, with a checkpoint: all ranks raise
        :class:`training.process.job.Preempted`.
        """
        self._began = time.perf_counter() - self.summary.seconds
        try:
            self._train_phases()
            return self._end()
        except (Exception, Preempted) as error:
            self.callbacks.end(self, error)
            raise

    def _train_phases(self) -> None:
        try:
            with ExitStack() as stack:
                received = [] if self._saving is None else stack.enter_context(terminations())
                self.topology.flags = lambda: self._flags(received)
                while not self.summary.is_over and self.position.phase < len(self.phases):
                    self._train_phase(self.phases[self.position.phase])
        finally:
            for phase in self.phases:
                phase.close()
        if self._saving is not None:
            self._report_saved(self._saving.finish())

    def _flags(self, received: Sequence[int]) -> int:
        """Return the flags of this rank's next step."""
        return (TERMINATED if received else 0) | (0 if self._saving is None else self._saving.flags)

    def stop(self, reason: str) -> None:
        """End the run after this epoch, on all ranks, as one that has ended; ``reason`` is recorded."""
        self._reason_to_stop = reason

    @property
    def phase(self) -> PhaseRun:
        """The phase that is trained; at the end of the run, the last one."""
        return self.phases[min(self.position.phase, len(self.phases) - 1)]

    # ------------------------------------------------------------------------------------- before

    def go_on(self, saving: Saving, *, at_most: int | None = None) -> bool:
        """Resume from the newest checkpoint, of at most this step; return whether there is one."""
        resumption = saving.resume(self.phases, self.summary, at_most=at_most)
        if resumption is None:
            on_rank0(self.topology.world, lambda: self._check_none_is_lost(saving))
            self.progress.say("resume: there is no checkpoint yet: the run begins again")
            return False
        self.position = resumption.position
        self.accumulator = resumption.accumulator or self.accumulator
        self.report(resumption.event)
        return True

    def _check_none_is_lost(self, saving: Saving) -> None:
        """Raise ``ValueError`` where the run has recorded a checkpoint, and there is none."""
        steps = None if self.folder is None else last_checkpoint(self.folder.path / METRICS)
        if steps is not None:
            expected = f"the checkpoint of step {steps}, or one before it, in {saving.place}"
            raise ValueError(f"resume: expected {expected}, got none; resume=never begins a new run")

    def _prepare(self) -> None:
        """Compile the steps of all remaining phases, so that phase boundaries need no compilation."""
        start = time.perf_counter()
        for phase in self.phases[self.position.phase :]:
            phase.backward.prepare()
        self.report(events.Prepared(time.perf_counter() - start))

    # ------------------------------------------------------------------------------------- phases

    def _train_phase(self, phase: PhaseRun) -> None:
        self._switch_to(phase)
        self._call(Callback.on_phase_begin, phase)
        while self.position.phase_steps < phase.steps and not self.summary.is_over:
            if self.position.epoch > 0 or phase.epochs == 1:
                self._fill_ahead(phase.number + 1)
            self._train_epoch(phase)
        self._boundary = self._now()
        phase.close()
        self._call(Callback.on_phase_end, phase)
        if not self.summary.is_over:
            self.position = self.position.after_phase()

    def _switch_to(self, phase: PhaseRun) -> None:
        if phase.number == 0 or self.position.phase_steps > 0:
            return
        before, first = self.phases[phase.number - 1].result.reducer, phase.hyperparameters(0)
        if (self.learner.local is None) != (phase.phase.local_steps is None):
            self.report(events.Settled.of(phase, self.learner.residual_norm()))
            self.accumulator.sent += self.learner.settle(first).sent
        residual = self.learner.begin(phase.phase)
        if residual is not None and before is not None and phase.result.reducer is not None:
            self.report(events.Switched(before, phase.result.reducer, residual))

    def _fill_ahead(self, number: int) -> None:
        """Fill a phase's cache in the background, before its first epoch."""
        if number < len(self.phases) and self.data.cache_dirs.memory is not None:
            self.phases[number].fill_ahead()

    def _train_epoch(self, phase: PhaseRun) -> None:
        """Train on the remaining batches of an epoch, then test."""
        at = self.position
        if (density := phase.density(at.epoch)) is not None:
            self.learner.set_density(density)
        if at.step == 0:
            self.learner.restart_carried()
        self._last = self._now()
        self.learner.stopwatch.restart()
        for batch in self._batches(phase):
            self.train_step(phase, batch)
            if self.position.phase_steps == phase.steps:
                break
        if phase.number > 0 and self.position.phase_steps == len(self.accumulator.seconds):
            self._note_stall(phase)
        self._finish_epoch(phase)

    def _batches(self, phase: PhaseRun) -> Iterator[Batch]:
        """Yield the remaining batches of an epoch; the time until each is there is measured."""
        at, measure = self.position, self.learner.stopwatch.measure
        with measure("data_wait"):
            batches = phase.data.training_batches(at.run_epoch, at.step)
        while True:
            with measure("data_wait"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def train_step(self, phase: PhaseRun, batch: Batch) -> None:
        """Train on one batch; collective."""
        at, start = self.position, self._last
        hyperparameters = phase.hyperparameters(at.phase_steps)
        loss, report = self.learner.step(phase.backward, batch, hyperparameters)
        self._last = self._now()
        seconds, size = self._last - start, self.task.size(batch)
        step = Step(loss, report, seconds, self.learner.stopwatch.seconds, size, start, hyperparameters)
        self.learner.stopwatch.restart()
        self.accumulator.add(step)
        if at.phase_steps == 0:
            self._first_step_end = self._last
        self.position = at.after_step(phase.global_batch)
        self._call(Callback.on_step_end, step)
        if self._saving is not None:
            self._save_after_step(self._saving, phase, step)

    def restart_step_clock(self) -> None:
        """Let the seconds of the next step begin now: what was done since the last one is no part of it."""
        self._last = self._now()

    def _note_stall(self, phase: PhaseRun) -> None:
        """Record the time from the end of the previous phase to that of the first step, less a step's."""
        waited = self._first_step_end - self._boundary - float(np.median(self.accumulator.seconds))
        seconds = max(0.0, waited)  # a first step can be faster than the others
        phase.result.stall_seconds = seconds
        self.report(events.Stalled(phase.number, seconds))

    # --------------------------------------------------------------------------- what an epoch ends with

    def _finish_epoch(self, phase: PhaseRun) -> None:
        """Test, report and record the result of an epoch."""
        at, config = self.position, self.config
        last, number = at.phase_steps == phase.steps, at.run_epoch + 1
        tested = NOT_TESTED
        if last or number % config.evaluate_every == 0:
            tested = evaluate(self.learner, phase.data.test_batches())
            self._call(Callback.on_test_end, tested)
        seconds = self.summary.seconds = time.perf_counter() - self._began
        result = add_up(at.run_epoch, phase, self.learner, self.accumulator, tested, run_seconds=seconds)
        self.report(events.EpochEnded.of(result, self.task, self.phases, self.position))
        if tested.examples:
            self.report(events.Examples(at.run_epoch, tested.examples))
        self.accumulator = EpochAccumulator()
        self.position = at.after_epoch()
        is_best = self.summary.judge(result, self.task.metrics, config.target)
        if self.summary.reached and config.target is not None:
            self.progress.say(events.target_line(result, self.task, config.target))
        self._call(Callback.on_epoch_end, result)
        self._agree_to_stop(at.run_epoch)
        is_over = last or self.summary.is_over
        if is_over or is_best or (self._saving is not None and self._saving.is_due_after_epoch(number)):
            self._save(best=is_best)

    def _agree_to_stop(self, epoch: int) -> None:
        """End the run if a callback of any rank asks for it; collective."""
        reasons = self.topology.world.allgather_objects(self._reason_to_stop)
        self.summary.stopped = next((reason for reason in reasons if reason is not None), None)
        if self.summary.stopped is not None:
            self.report(events.Stopped(epoch, self.summary.stopped))

    def _save(self, *, best: bool = False) -> None:
        """Begin to write a checkpoint; collective."""
        if self._saving is None:
            return
        self.summary.seconds = time.perf_counter() - self._began
        self._report_saved(self._saving.start(self.position, self.summary, self.accumulator, best=best))

    def _save_after_step(self, saving: Saving, phase: PhaseRun, step: Step) -> None:
        """Go on with a checkpoint, and begin one that is due, after a step; collective."""
        flags = step.report.flags
        if step.hyperparameters.round_steps:  # within a round the flags are not those of all ranks
            self._report_saved(saving.proceed(flags))
        terminated = bool(flags & TERMINATED)
        if not saving.is_due_after_step(phase, self.position, terminated=terminated):
            return
        self._save()
        if terminated:
            self._report_saved(saving.finish())
            self.report(events.Terminated(self.position.steps))
            raise Preempted(self.position.steps)
        self.restart_step_clock()

    def _report_saved(self, saved: events.CheckpointSaved | None) -> None:
        if saved is not None:
            self.report(saved)
            self._call(Callback.on_checkpoint, saved.steps)

    def _end(self) -> Summary:
        """Save the weights first, since reporting may fail; collective."""
        summary = self.summary
        if self.learner.local is not None:
            self.learner.local.abandon_round()
        summary.seconds = time.perf_counter() - self._began
        summary.residual_norm = self.learner.residual_norm()
        if (problem := on_rank0(self.topology.world, self._save_weights)) is not None:
            raise WeightsNotSaved(problem)
        self.report(events.CacheRead(self.data.read_so_far()))
        self._call(Callback.on_run_end)
        return summary

    def _save_weights(self) -> str | None:
        """Write the weights that were tested; return the error, if any."""
        assert self.folder is not None
        try:
            with self.learner.tested():
                self.folder.save_weights(self.model)
        except WeightsNotSaved as error:
            return str(error)
        return None

    # ------------------------------------------------------------------------------------ reporting

    def _call(self, hook: Callable[..., None], *arguments: Any) -> None:
        self.callbacks.call(hook, self, *arguments)

    def report(self, event: Event) -> None:
        """Say the lines of an event, and give it to the callbacks of rank 0."""
        for line in event.lines():
            self.progress.say(line)
        if self.rank == 0:
            self._call(Callback.on_event, event)


def _own_callbacks(config: Config) -> list[Callback]:
    """Return the callbacks of the loop itself; the last one ends the records."""
    profiler = [] if config.trace is None else [Profiler(config.trace)]
    digests = [Digests(config.digest_every)] if config.digest_every else []
    target = [] if config.target is None else [DawnBenchFiles()]
    served = [] if config.metrics_port is None else [Prometheus(config.metrics_port)]
    return [*profiler, SkippedSteps(), *digests, StepReports(), *target, *served, Metrics()]
