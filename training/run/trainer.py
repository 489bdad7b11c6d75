"""A run: the loop over phases and epochs, with tests, records and checkpoints."""

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from commlib import Report, Topology
from commlib.transport.mpi import world
from commlib.tuning.profile import Profile
from datacache import Batch
from training.config.config import Config, load
from training.process.backend import prepare_tensorflow
from training.process.compile_kernels import announce_compiling
from training.process.devices import with_gpus
from training.process.job import LocalRank, on_rank0
from training.process.progress import Progress, TimeLeft
from training.run import events
from training.run.autotune import profile_for
from training.run.data import Data, load_data
from training.run.dawnbench import DawnBench, hardware, summed_up
from training.run.evaluation import NOT_TESTED, add_up, evaluate
from training.run.events import Event
from training.run.learner import Learner, StepHyperparameters
from training.run.metrics import CHECKPOINTS, TRACE, RunFolder, WeightsNotSaved, to_resume, unwritable
from training.run.parts import import_parts
from training.run.phases import PhaseRun
from training.run.saving import Saving
from training.run.stages import Slowest, Step, shown
from training.run.state import Position
from training.run.summary import EpochResult, Ranks, Summary
from training.run.totals import EpochAccumulator
from training.run.tracing import Tracing, merged

SKIPPED_STEPS_IN_A_ROW = 20


class TrainingDiverged(RuntimeError):
    """Too many consecutive steps were not finite."""


class Trainer:
    """One run of a configuration, or of a file that holds one, on all ranks of this job.

    ``topology``, ``data`` and ``profile`` (see :func:`training.run.autotune.profile_for`) are created if
    not given. ``config`` is the configuration with the choices from the profile written out, ``model`` the
    Keras model. ``learner``: what a step is. Raises a ``ValueError`` of one line if the run is impossible.

    A second run in the same process can read the checkpoints of the first only after
    ``keras.utils.clear_session()``: they use Keras's names of weights, which number its layers.
    """

    def __init__(
        self,
        config: Config | str | Path,
        *,
        topology: Topology | None = None,
        data: Data | None = None,
        profile: Profile | None = None,
        learner: type[Learner] = Learner,
    ) -> None:
        config = import_parts(config if isinstance(config, Config) else load(config))
        topology = topology or Topology(world(verify=config.verify), ranks_per_node=config.ranks_per_node)
        if topology.world.rank == 0:
            announce_compiling()
        data = data or load_data(config, topology)
        prepare_tensorflow(config, topology.world, LocalRank.of(topology.world))
        self.topology, self._why_not_on_gpus = with_gpus(topology, config.transport)
        if not on_rank0(topology.world, lambda: profile is not None):  # where there is one, rank 0 has it
            profile = profile_for(config, self.topology)
        self.data = data
        self.rank, self.size = topology.world.rank, topology.world.size
        self.learner = learner(config, self.topology, data, profile)
        self.task = data.task
        self.config = self.learner.config
        self.model = self.learner.model
        phases = enumerate(self.config.phases)
        self.phases = [PhaseRun(number, phase, data, self.learner) for number, phase in phases]
        self.position = Position()
        self.summary = Summary(phases=[phase.result for phase in self.phases])
        self._accumulator = EpochAccumulator()
        self._left = TimeLeft()
        self._saving: Saving | None = None
        self._dawnbench: DawnBench | None = None
        self._tracing = None if config.trace is None else Tracing(config.trace, self.learner)
        self._slowest: Slowest | None = None  # rank of the latest epoch
        self._skipped_in_a_row = 0
        self._began = time.perf_counter()
        self._now = topology.world.now
        self._boundary = self._last = self._first_step_end = self._now()

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
            self._report(events.RunBegun.of(folder.identity, self.ranks, self.config, on_gpus=on_gpus))
        progress.say(events.introduction(self.data, self.learner))
        for line in self.task.notes(self.data.samples):
            progress.say(line)
        for event in events.choices(self.learner, self._why_not_on_gpus):
            self._report(event)
        if self.config.checkpoints is not None:
            run = "" if folder is None else folder.identity
            self._saving = Saving(path / CHECKPOINTS, self.config.checkpoints, self.learner, run)
            if resume:
                self._resume(self._saving)
            elif self.config.resume != "never":
                progress.say(f"resume: no run of {self.config.name} is there to go on with: this one is new")
        self._write_records()  # last: if a checkpoint is refused, the folder is unchanged
        self._prepare()

    def run(self) -> Summary:
        """Train all remaining phases."""
        self._began = time.perf_counter() - self.summary.seconds
        try:
            while not self.summary.reached and self.position.phase < len(self.phases):
                self._train_phase(self.phases[self.position.phase])
        finally:
            for phase in self.phases:
                phase.close()
        return self._end()

    # ------------------------------------------------------------------------------------- before

    def _write_records(self) -> None:
        """Write the files that the run's folder has from its beginning; collective."""
        computed_on = summed_up(self.topology.world.allgather_objects(hardware()))

        def write() -> None:
            if self.folder is None:  # as in a bench
                return
            self.folder.write_config(self.config)
            if self.config.target is not None:
                with unwritable(f"{self.folder.path}: expected room for its records"):
                    self._dawnbench = DawnBench(self.folder, self.config, self.task.metrics, computed_on)

        on_rank0(self.topology.world, write)

    def _resume(self, saving: Saving) -> None:
        """Resume from the newest checkpoint; collective."""
        resumption = saving.resume(self.phases, self.summary)
        if resumption is None:
            self.progress.say("resume: there is no checkpoint yet: the run begins again")
            return
        self.position = resumption.position
        self._accumulator = resumption.accumulator or self._accumulator
        self._report(resumption.event)

    def _prepare(self) -> None:
        """Compile the steps of all remaining phases, so that phase boundaries need no compilation."""
        start = time.perf_counter()
        for phase in self.phases[self.position.phase :]:
            phase.backward.prepare()
        self._report(events.Prepared(time.perf_counter() - start))

    # ------------------------------------------------------------------------------------- phases

    def _train_phase(self, phase: PhaseRun) -> None:
        self._switch_to(phase)
        self._left = TimeLeft()  # step times differ between phases
        while self.position.phase_steps < phase.steps and not self.summary.reached:
            if self.position.epoch > 0 or phase.epochs == 1:
                self._fill_ahead(phase.number + 1)
            self._train_epoch(phase)
        self._boundary = self._now()
        phase.close()
        if not self.summary.reached:
            self.position = self.position.after_phase()

    def _switch_to(self, phase: PhaseRun) -> None:
        if phase.number == 0 or self.position.phase_steps > 0:
            return
        before = self.phases[phase.number - 1].result.reducer
        residual = self.learner.begin(phase.phase)
        if residual is not None and before is not None and phase.result.reducer is not None:
            self._report(events.Switched(before, phase.result.reducer, residual))

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
        if phase.number > 0 and self.position.phase_steps == len(self._accumulator.seconds):
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
        step = Step(loss, report, seconds, self.learner.stopwatch.seconds, size)
        self.learner.stopwatch.restart()
        self._accumulator.add(step)
        self._left.add(step.seconds)
        if at.phase_steps == 0:
            self._first_step_end = self._last
        self.position = at.after_step(phase.global_batch)
        if self._tracing is not None and self._tracing.add_step(self.position.steps, start, self._last):
            self._end_tracing(self._tracing)
        self._watch_for_skipped_steps(phase, report, hyperparameters)
        self._report_step(phase, step, hyperparameters)
        if self._saving is not None and self._saving.is_due_after_step(phase, self.position):
            self._save()
            self._last = self._now()

    def _watch_for_skipped_steps(
        self, phase: PhaseRun, report: Report, hyperparameters: StepHyperparameters
    ) -> None:
        self._skipped_in_a_row = 0 if report.finite else self._skipped_in_a_row + 1
        phase.result.skipped_steps += not report.finite
        if self._skipped_in_a_row == SKIPPED_STEPS_IN_A_ROW:
            raise TrainingDiverged(
                f"{SKIPPED_STEPS_IN_A_ROW} steps in a row had a NaN or an infinity in their gradients; "
                f"the learning rate is {hyperparameters.learning_rate:g}: try a smaller one"
            )

    def _note_stall(self, phase: PhaseRun) -> None:
        """Record the time from the end of the previous phase to that of the first step, less a step's."""
        waited = self._first_step_end - self._boundary - float(np.median(self._accumulator.seconds))
        seconds = max(0.0, waited)  # a first step can be faster than the others
        phase.result.stall_seconds = seconds
        self._report(events.Stalled(phase.number, seconds))

    # --------------------------------------------------------------------------- what an epoch ends with

    def _end_tracing(self, tracing: Tracing) -> None:
        """Write what was traced; collective. The time that takes is none of a step's."""
        self._tracing, traces = None, tracing.end()
        if tracing.steps == 0:
            self.progress.say("trace: no step: only those after the first of this process are traced")
        elif (folder := self.folder) is not None:
            content = json.dumps(merged(traces))
            if folder.attempt(TRACE, lambda: folder.write_file(TRACE, content)):
                error = max(trace.offset.error for trace in traces)
                self._report(events.Traced(str(folder.path / TRACE), tracing.steps, error))
        self._last = self._now()

    def _finish_epoch(self, phase: PhaseRun) -> None:
        """Test, report and record the result of an epoch."""
        at, config = self.position, self.config
        last, number = at.phase_steps == phase.steps, at.run_epoch + 1
        is_tested = last or number % config.evaluate_every == 0
        tested = evaluate(self.learner, phase.data.test_batches()) if is_tested else NOT_TESTED
        seconds = self.summary.seconds = time.perf_counter() - self._began
        result = add_up(at.run_epoch, phase, self.learner, self._accumulator, tested, run_seconds=seconds)
        self._report_epoch(result)
        if tested.examples:
            self._report(events.Examples(at.run_epoch, tested.examples))
        self._accumulator, self._slowest = EpochAccumulator(), result.stages.slowest
        self.position = at.after_epoch()
        is_best = self.summary.judge(result, self.task.metrics, config.target)
        if self.summary.reached and config.target is not None:
            self.progress.say(events.target_line(result, self.task, config.target))
        if last or is_best or (self._saving is not None and self._saving.is_due_after_epoch(number)):
            self._save(best=is_best)

    def _save(self, *, best: bool = False) -> None:
        """Write a checkpoint; collective."""
        if self._saving is None:
            return
        self.summary.seconds = time.perf_counter() - self._began
        self._report(self._saving.save(self.position, self.summary, self._accumulator, best=best))

    def _end(self) -> Summary:
        """Save the weights first, since reporting may fail; collective."""
        summary = self.summary
        summary.seconds = time.perf_counter() - self._began
        summary.residual_norm = self.learner.residual_norm()
        if (problem := on_rank0(self.topology.world, self._save_weights)) is not None:
            raise WeightsNotSaved(problem)
        if self._tracing is not None:  # the run had fewer steps
            self._end_tracing(self._tracing)
        self._report(events.CacheRead(self.data.read_so_far()))
        if self.folder is not None:
            self.folder.end(summary, self.ranks)
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

    def _report(self, event: Event) -> None:
        for line in event.lines():
            self.progress.say(line)
        if self.folder is not None:
            self.folder.write(event.kind, **event.record())

    def _report_step(self, phase: PhaseRun, step: Step, hyperparameters: StepHyperparameters) -> None:
        left = self._left.of(phase.steps - self.position.phase_steps)
        times = shown(self._accumulator.stages.hidden_share, self._slowest)
        self.progress.update(events.live_line(self.phases, self.position, step.loss, left, times))
        if self.position.steps % self.config.log_every == 0:
            self._report(events.StepTaken.of(self.position, step, hyperparameters, self.learner))

    def _report_epoch(self, result: EpochResult) -> None:
        self._report(events.EpochEnded.of(result, self.task, self.phases, self.position))
        if self._dawnbench is not None:
            self._dawnbench.add(result)
