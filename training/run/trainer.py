"""A run: the loop over phases and epochs, with tests, checkpoints, and callbacks for all else."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from commlib import Topology, bytes_sent
from commlib.trace import Recorder
from commlib.transport.mpi import world
from datacache import Batch
from training.callbacks.callback import Callback, Event, RunEvent
from training.config.config import Config
from training.process.compile_kernels import announce_compiling
from training.process.devices import prepare_tensorflow, with_gpus
from training.process.job import LocalRank, Preempted, all_or_raise, attempt, on_rank0
from training.process.progress import Progress, announce_folder
from training.results import EpochAccumulator, Position, Ranks, Step, Summary
from training.run import events
from training.run.build import NOT_TESTED, Build, build, choices, evaluate, introduction
from training.run.checkpointing import Checkpointer
from training.run.data import Data, load_data
from training.run.parts import import_parts, load_together
from training.run.phases import PhaseRun
from training.run.provenance import run_begun
from training.run_folder import RunFolder, WeightsNotSaved, to_resume


class Trainer:
    """One run of a configuration, or of a file that holds one, on all ranks of this job.

    ``topology`` and ``data`` are created if not given. ``build`` makes the ``parts`` of the run. ``fit``
    trains; ``begin`` and ``run`` are its two halves. Raises a ``ValueError`` of one line, on all ranks, if
    the run is impossible. Callbacks see it as a :class:`training.callbacks.RunView`, whose members are
    described there. It is a context manager, which frees what the run has made; ``fit`` does so, too.

    A second run in the same process can read the checkpoints of the first only after
    ``keras.utils.clear_session()``: they use Keras's names of weights, which number its layers.
    """

    def __init__(
        self,
        config: Config | str | Path,
        *,
        topology: Topology | None = None,
        data: Data | None = None,
        build: Build = build,
    ) -> None:
        self._stack = ExitStack()
        if isinstance(config, Config):
            config = import_parts(config)
        else:
            comm = self._stack.enter_context(world()) if topology is None else topology.world
            config = load_together(comm, config)
        if topology is None:
            comm = self._stack.enter_context(world(verify=config.verify))
            topology = self._stack.enter_context(Topology(comm, ranks_per_node=config.ranks_per_node))
        given, comm = topology, topology.world
        if comm.rank == 0:
            announce_compiling()
        data = data or all_or_raise(comm, lambda: load_data(config, given), names_rank=True)
        prepare_tensorflow(config, comm, LocalRank.of(comm))
        topology, self._why_not_on_gpus = with_gpus(given, config.transport)
        if topology is not given:
            self._stack.enter_context(topology)
        self.topology, self.rank, self.size = topology, topology.world.rank, topology.world.size
        self.parts = build(config, topology, data)
        # After an exception other ranks may not come here.
        self._stack.push(lambda kind, *_: self.parts.exchange.close() if kind is None else None)
        self.config, self.data, self.task = self.parts.config, data, data.task
        self.model = self.parts.model.keras
        self.phases, self.position, self.accumulator = self.parts.phases(), Position(), EpochAccumulator()
        self.summary = Summary(phases=[phase.result for phase in self.phases])
        watchdog, gradients = topology.world.watchdog(config.stall_timeout), self.parts.exchange.gradients
        gradients.guard = lambda: watchdog.waiting(f"step {self.position.steps + 1}")
        self.checkpointer: Checkpointer | None = None
        self.folder: RunFolder | None = None
        self.progress = Progress(silent=True)
        self._reason_to_stop: str | None = None
        self._began = time.perf_counter()
        self._boundary = self._last = topology.world.now()
        self._first_step_seconds = 0.0  # of a phase, from its begin
        self.callbacks = self.parts.callbacks()
        self._call(Callback.on_build)

    def fit(self) -> Summary:
        """Train, report progress, write the run's folder and return the summary; collective."""
        with self:
            self.begin()
            return self.run()

    def begin(self, *, writes: bool = True) -> None:
        """Prepare training: open the run's folder, and resume if the configuration asks for it; collective.

        ``writes``: whether there is a folder, which only rank 0 opens, and progress on the screen. Raises
        ``ValueError`` on all ranks if the run is impossible.
        """
        comm = self.topology.world

        def opened() -> tuple[Path, str, bool]:
            found = to_resume(self.config, self.config.resume)
            self.folder = self._stack.enter_context(RunFolder(self.config, found))
            return self.folder.path.absolute(), self.folder.identity, found is not None

        folder: Path | None = None
        if writes:
            folder, identity, resumes = on_rank0(comm, opened)
            self.progress = self._stack.enter_context(Progress(silent=self.folder is None))
        if self.folder is not None:
            announce_folder(self.folder.path)
        self.ranks = Ranks.of(self.topology)
        self._introduce()
        is_resumed = False
        if self.config.checkpoints is not None and folder is not None:
            self.checkpointer = Checkpointer(self, folder, self.config.checkpoints, identity)
            if resumes:
                is_resumed = self.checkpointer.resume()
            elif self.config.resume != "never":
                self.progress.say(f"resume: no unfinished run of {self.config.name} exists: this one is new")
        # Last: if a checkpoint is refused, the folder is unchanged.
        all_or_raise(comm, lambda: self._call(Callback.on_run_begin))
        if is_resumed:
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

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *error: Any) -> None:
        """Free the parts; after an exception, only what needs no other rank."""
        self._stack.__exit__(*error)

    def close(self) -> None:
        """Free the parts; all ranks call it together."""
        self._stack.close()

    # ------------------------------------------------------------------------ what callbacks see

    @property
    def phase(self) -> PhaseRun:
        return self.phases[min(self.position.phase, len(self.phases) - 1)]

    @property
    def gradient_size(self) -> int:
        return self.parts.exchange.gradients.size

    def stop(self, reason: str) -> None:
        self._reason_to_stop = reason

    def record(self, recorder: Recorder | None) -> None:
        self.parts.step.record(recorder)

    def common_weights(self) -> AbstractContextManager[None]:
        return self.parts.exchange.common_weights()

    def restart_step_clock(self) -> None:
        self._last = self.topology.world.now()

    def report(self, event: Event) -> None:
        """Print the lines of an event, and give it to the callbacks of rank 0."""
        for line in event.lines():
            self.progress.say(line)
        if self.rank == 0:
            self._call(Callback.on_event, event)

    def _call(self, hook: Callable[..., None], *arguments: Any) -> None:
        self.callbacks.call(hook, self, *arguments)

    # ------------------------------------------------------------------------------------- before

    def _introduce(self) -> None:
        """Report what the run is made of; only rank 0 has a folder, and records."""
        if self.folder is not None:
            on_gpus = self.topology.world.arrays is not np
            begun = run_begun(self.folder.identity, self.ranks, self.config, on_gpus=on_gpus)
            self.report(begun)
        self.progress.say(introduction(self.parts))
        for line in self.task.notes(self.data.samples):
            self.progress.say(line)
        for event in choices(self.parts, self.phases, self._why_not_on_gpus):
            self.report(event)

    def _prepare(self) -> None:
        """Compile the steps of all remaining phases, so that phase boundaries need no compilation."""
        start = time.perf_counter()
        for phase in self.phases[self.position.phase :]:
            phase.backward.prepare()
        self.report(RunEvent("prepare", {"compile_seconds": time.perf_counter() - start}))

    # ------------------------------------------------------------------------------------- phases

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

    def _train_phase(self, phase: PhaseRun) -> None:
        self._switch_to(phase)
        self._call(Callback.on_phase_begin, phase)
        # An epoch that is resumed with larger batches may have no step left: then it only has to end.
        while (
            self.position.phase_steps < phase.steps or self.position.step == phase.epoch_steps
        ) and not self.summary.is_over:
            if self.position.epoch > 0 or phase.epochs == 1:
                self._fill_ahead(phase.number + 1)
            self._train_epoch(phase)
        self._boundary = self.topology.world.now()
        phase.close()
        self._call(Callback.on_phase_end, phase)
        if not self.summary.is_over:
            self.position = self.position.after_phase()

    def _switch_to(self, phase: PhaseRun) -> None:
        if phase.number == 0 or self.position.phase_steps > 0:
            return
        before, exchange = self.phases[phase.number - 1].result.reducer, self.parts.exchange
        if (exchange.local is None) != (phase.phase.local_steps is None):
            self.report(events.settled(phase, exchange.residual_norm()))
            self.accumulator.sent += self.parts.step.settle(phase.hyperparameters(0)).sent
        residual = self.parts.step.begin(phase.phase)
        if residual is not None and before is not None and phase.result.reducer is not None:
            self.report(events.switched(before, phase.result.reducer, residual))

    def _fill_ahead(self, number: int) -> None:
        if number < len(self.phases) and self.data.cache_dirs.memory is not None:
            self.phases[number].fill_ahead()

    def _train_epoch(self, phase: PhaseRun) -> None:
        at, step = self.position, self.parts.step
        step.begin_epoch(phase.density(at.epoch), is_new=at.step == 0)
        self.restart_step_clock()
        step.stopwatch.restart()
        for batch in self._batches(phase):
            self.train_step(phase, batch)
            if self.position.phase_steps == phase.steps:
                break
        if phase.number > 0 and self.position.phase_steps == len(self.accumulator.seconds):
            self._note_stall(phase)
        if self.position.phase_steps == phase.steps:
            step.abandon_round()  # of a phase that was resumed within its last round, and has no step left
        self._finish_epoch(phase)

    def _batches(self, phase: PhaseRun) -> Iterator[Batch]:
        """Yield the remaining batches of an epoch; the time until each is there is measured."""
        at, measure = self.position, self.parts.step.stopwatch.measure
        with measure("data_wait"):
            batches = phase.data.training_batches(at.run_epoch, at.step)
        while True:
            with measure("data_wait"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def train_step(self, phase: PhaseRun, batch: Batch) -> None:
        """Train on one batch, or pass it over; collective."""
        at, start, taken = self.position, self._last, self.parts.step
        hyperparameters = phase.hyperparameters(at.phase_steps)
        if passed_over := taken.passes_over():
            loss, report = math.nan, taken.pass_over(hyperparameters)
        else:
            loss, report = taken.take(phase.backward, batch, hyperparameters)
        self.restart_step_clock()
        step = Step(
            loss,
            report,
            self._last - start,
            taken.stopwatch.seconds,
            0 if passed_over else self.task.size(batch),
            start,
            hyperparameters,
            self.parts.optimizer.loss_scale,
            passed_over,
        )
        taken.stopwatch.restart()
        self.accumulator.add(step)
        if at.phase_steps == 0:
            self._first_step_seconds = self._last - self._boundary
        self.position = at.after_step(phase.global_batch)
        self._call(Callback.on_step_end, step)
        if self.checkpointer is not None:
            self.count_seconds()
            self.checkpointer.after_step(phase, step)

    def count_seconds(self) -> None:
        """Bring ``summary.seconds`` up to date."""
        self.summary.seconds = time.perf_counter() - self._began

    def _note_stall(self, phase: PhaseRun) -> None:
        """Record the time from the end of the previous phase to that of the first step, less a step's."""
        waited = self._first_step_seconds - float(np.median(self.accumulator.seconds))
        seconds = max(0.0, waited)  # a first step can be faster than the others
        phase.result.stall_seconds = seconds
        self.report(RunEvent("stall", {"phase": phase.number, "stall_seconds": seconds}))

    # --------------------------------------------------------------------- the end of an epoch, of a run

    def _finish_epoch(self, phase: PhaseRun) -> None:
        at, config = self.position, self.config
        last, number = at.phase_steps == phase.steps, at.run_epoch + 1
        tested = NOT_TESTED
        if last or number % config.evaluate_every == 0:
            tested = evaluate(self.parts, phase.data.test_batches())
            self._call(Callback.on_test_end, tested)
        self.count_seconds()
        result = self.accumulator.result(
            self.topology.world,
            bytes_sent("dense", self.topology.nodes, self.rank, self.gradient_size).inter,
            epoch=at.run_epoch,
            phase=phase.result,
            tested=tested,
            run_seconds=self.summary.seconds,
        )
        self.report(events.epoch_ended(result, self.task, self.phases, self.position))
        if tested.examples:
            self.report(events.examples_shown(at.run_epoch, tested.examples))
        self.accumulator = EpochAccumulator()
        self.position = at.after_epoch()
        is_best = self.summary.judge(result, self.task.metrics, config.target)
        if self.summary.reached and config.target is not None:
            self.progress.say(events.target_line(result, self.task, config.target))
        self._call(Callback.on_epoch_end, result)
        self._agree_to_stop(at.run_epoch)
        if self.checkpointer is not None:
            self.count_seconds()
            self.checkpointer.after_epoch(number, is_best=is_best, is_over=last or self.summary.is_over)

    def _agree_to_stop(self, epoch: int) -> None:
        """End the run if a callback of any rank asks for it; collective."""
        reasons = self.topology.world.allgather_objects(self._reason_to_stop)
        self.summary.stopped = next((reason for reason in reasons if reason is not None), None)
        if self.summary.stopped is not None:
            self.report(events.stopped(epoch, self.summary.stopped))

    def _end(self) -> Summary:
        """Save the weights first, since reporting may fail; collective."""
        summary = self.summary
        self.parts.step.abandon_round()
        self.count_seconds()
        summary.residual_norm = self.parts.exchange.residual_norm()
        _, problem = on_rank0(self.topology.world, lambda: attempt(self._save_weights, WeightsNotSaved))
        if problem is not None:
            raise WeightsNotSaved(problem)
        self.report(events.cache_read(self.data.read_so_far()))
        self._call(Callback.on_run_end)
        return summary

    def _save_weights(self) -> None:
        if self.folder is not None:
            with self.parts.model.tested():
                self.folder.save_weights(self.model)
