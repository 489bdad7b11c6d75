"""A run: the loop over phases and epochs, with tests, checkpoints, and callbacks for all else."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from commlib import Topology
from commlib.trace import Recorder
from commlib.transport.mpi import world
from datacache import Batch
from training.callbacks.callback import Callback, Event
from training.config.config import Config, load
from training.process.backend import prepare_tensorflow
from training.process.compile_kernels import announce_compiling
from training.process.devices import with_gpus
from training.process.job import LocalRank, Preempted, all_or_raise, on_rank0
from training.process.progress import Progress
from training.results import EpochAccumulator, Position, Ranks, Step, Summary
from training.run import beginning, events
from training.run.autotune import profile_for
from training.run.checkpointer import Checkpointer
from training.run.data import Data, load_data
from training.run.evaluation import NOT_TESTED, add_up, evaluate
from training.run.learner import Learner
from training.run.loop_callbacks import callbacks_of
from training.run.parts import import_parts
from training.run.phases import PhaseRun
from training.run.saving import Saving
from training.run_folder import RunFolder, WeightsNotSaved, to_resume


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
        self.checkpointer: Checkpointer | None = None
        self._reason_to_stop: str | None = None
        self._began = time.perf_counter()
        self._now = topology.world.now
        self._boundary = self._last = self._now()
        self._first_step_seconds = 0.0  # of a phase, from its beginning
        self.folder: RunFolder | None = None
        self.callbacks = callbacks_of(self.config)
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
        beginning.tell(self, self._why_not_on_gpus)
        resumed = False
        if self.config.checkpoints is not None:
            identity = "" if folder is None else folder.identity
            saving = Saving(path, self.config.checkpoints, self.learner, identity, self.callbacks)
            self.checkpointer = Checkpointer(self, saving)
            if resume:
                resumed = self.checkpointer.resume()
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
            with nullcontext() if self.checkpointer is None else self.checkpointer.until_terminated():
                while not self.summary.is_over and self.position.phase < len(self.phases):
                    self._train_phase(self.phases[self.position.phase])
        finally:
            for phase in self.phases:
                phase.close()
        if self.checkpointer is not None:
            self.checkpointer.finish()

    def stop(self, reason: str) -> None:
        """End the run after this epoch, on all ranks, as one that has ended; ``reason`` is recorded."""
        self._reason_to_stop = reason

    @property
    def phase(self) -> PhaseRun:
        """The phase that is trained; at the end of the run, the last one."""
        return self.phases[min(self.position.phase, len(self.phases) - 1)]

    @property
    def gradient_size(self) -> int:
        """The number of entries of the gradient."""
        return self.learner.gradients.size

    def record(self, recorder: Recorder | None) -> None:
        """Give a span of each stage and bucket to ``recorder``, or to none; between two steps."""
        self.learner.record(recorder)

    # ------------------------------------------------------------------------------------- before

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
            self._first_step_seconds = self._last - self._boundary
        self.position = at.after_step(phase.global_batch)
        self._call(Callback.on_step_end, step)
        if self.checkpointer is not None:
            self.checkpointer.after_step(phase, step)

    def count_seconds(self) -> None:
        """Bring ``summary.seconds`` up to date."""
        self.summary.seconds = time.perf_counter() - self._began

    def restart_step_clock(self) -> None:
        """Let the seconds of the next step begin now: what was done since the last one is no part of it."""
        self._last = self._now()

    def _note_stall(self, phase: PhaseRun) -> None:
        """Record the time from the end of the previous phase to that of the first step, less a step's."""
        waited = self._first_step_seconds - float(np.median(self.accumulator.seconds))
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
        self.count_seconds()
        seconds = self.summary.seconds
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
        if self.checkpointer is not None:
            self.checkpointer.after_epoch(number, is_best=is_best, is_over=last or self.summary.is_over)

    def _agree_to_stop(self, epoch: int) -> None:
        """End the run if a callback of any rank asks for it; collective."""
        reasons = self.topology.world.allgather_objects(self._reason_to_stop)
        self.summary.stopped = next((reason for reason in reasons if reason is not None), None)
        if self.summary.stopped is not None:
            self.report(events.Stopped(epoch, self.summary.stopped))

    def _end(self) -> Summary:
        """Save the weights first, since reporting may fail; collective."""
        summary = self.summary
        if self.learner.local is not None:
            self.learner.local.abandon_round()
        self.count_seconds()
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
