"""A run: phase after phase, epoch after epoch, tested, recorded and kept."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from commlib import Communicator, Report, Topology, cost
from commlib.profile import Profile
from training.backend import prepare_tensorflow
from training.checkpoints import Checkpoint, Checkpoints
from training.choices import profile_for
from training.config import Config, load
from training.data import Data, load_data
from training.dawnbench import DawnBench, hardware, summed_up
from training.job import Place, world
from training.learner import Learner, Pace
from training.metrics import CHECKPOINTS, RunFolder, to_resume
from training.phases import PhaseRun
from training.progress import Progress
from training.replicas import average_statistics, check_equal_weights
from training.state import Position, as_tree, own_state, restore, shared_state
from training.summary import EpochResult, Summary, epoch_line
from training.tally import Tally

Result = TypeVar("Result")

VOID_STEPS_IN_A_ROW = 20


class TrainingDiverged(RuntimeError):
    """So many steps in a row were not finite that going on is a waste."""


class Trainer:
    """One run of a configuration, or of a file that holds one, on all ranks of this job.

    ``topology``, ``data`` and ``profile`` (see :func:`training.choices.profile_for`) are made where they are
    not given. ``config`` is the configuration with what was chosen from the profile written out, ``model``
    the Keras model. Raises a ``ValueError`` of one line where the run cannot be.

    A second one in the same process can read the checkpoints of the first only after
    ``keras.utils.clear_session()``: they name weights as Keras does, which counts its layers.
    """

    def __init__(
        self,
        config: Config | str | Path,
        *,
        topology: Topology | None = None,
        data: Data | None = None,
        profile: Profile | None = None,
    ) -> None:
        config = (config if isinstance(config, Config) else load(config)).resolved()
        topology = topology or Topology(world(), ranks_per_node=config.ranks_per_node)
        data = data or load_data(config, topology)
        if not _of_first(topology.world, lambda: profile is not None):  # where there is one, rank 0 has it
            profile = profile_for(config, topology)
        prepare_tensorflow(config, topology.world, Place.of(topology.world))
        self.topology, self.data = topology, data
        self.rank, self.size = topology.world.rank, topology.world.size
        self.learner = Learner(config, topology, data.dataset, profile)
        self.config = self.learner.config
        self.model = self.learner.model
        self.phases = [
            PhaseRun(number, phase, data, self.learner) for number, phase in enumerate(self.config.phases)
        ]
        self.position = Position()
        self.summary = Summary(phases=[phase.result for phase in self.phases])
        self._tally = Tally()
        self._checkpoints: Checkpoints | None = None
        self._dawnbench: DawnBench | None = None
        self._voided_in_a_row = 0
        self._began = self._boundary = self._last = self._first_step_end = time.perf_counter()

    def fit(self) -> Summary:
        """Train, tell of it, leave a folder behind, return what it came to; all ranks call it together."""
        comm, folder = self.topology.world, None

        def open_folder() -> tuple[Path, bool]:
            nonlocal folder
            resumed = to_resume(self.config)
            folder = RunFolder(self.config, resumed)
            return folder.path.absolute(), resumed is not None

        path, resume = _of_first(comm, open_folder)
        with folder or nullcontext(), Progress(silent=folder is None) as progress:
            self.begin(folder, progress, path, resume=resume)
            return self.run()

    def begin(
        self, folder: RunFolder | None, progress: Progress, path: Path, *, resume: bool = False
    ) -> None:
        """Get ready to train; rank 0 writes to ``folder``, whose path all know, and the others have none.

        ``resume``: go on with the newest checkpoint there; what rank 0 says counts. Raises ``ValueError``
        where it is of another model.
        """
        self.folder, self.progress = folder, progress
        resume = _of_first(self.topology.world, lambda: resume)
        progress.say(self._introduction())
        self._tell_choices()
        hosts = self.topology.world.allgather_objects(hardware())
        if folder is not None and self.config.target is not None:
            self._dawnbench = DawnBench(folder, self.config, summed_up(hosts))
        if self.config.checkpoints is not None:
            keep = self.config.checkpoints.keep
            self._checkpoints = Checkpoints(path / CHECKPOINTS, self.topology.world, keep=keep)
            if resume:
                self._resume(self._checkpoints.newest())
            elif self.config.resume != "never":
                progress.say(f"resume: no run of {self.config.name} is there to go on with: this one is new")
        if folder is not None:
            folder.keep(self.config)  # not before: where a checkpoint is refused, the folder is as it was
        self._prepare()

    def run(self) -> Summary:
        """Train all phases that are left."""
        self._began = time.perf_counter() - self.summary.seconds
        try:
            while not self.summary.reached and self.position.phase < len(self.phases):
                self._train_phase(self.phases[self.position.phase])
        finally:
            for phase in self.phases:
                phase.close()
        return self._end()

    # ------------------------------------------------------------------------------------- before

    def _introduction(self) -> str:
        config, nodes = self.config, [len(node) for node in self.topology.nodes]
        data = f"{len(self.data.training):,} training and {len(self.data.test):,} test samples"
        model = f"{config.model}: {self.learner.gradients.size:,} weights"
        begin = f"{config.dataset.name}: {data}; {model}"
        if self.size == 1:
            return f"{begin}; one rank, so nothing is exchanged and no reducer is used"
        emulated = "emulated " if config.ranks_per_node else ""
        word = "node" if len(nodes) == 1 else "nodes"
        return f"{begin}; {self.size} ranks on {len(nodes)} {emulated}{word} {nodes}"

    def _tell_choices(self) -> None:
        for number, choice in self.learner.choices.items():
            self.progress.say(f"phase {number + 1}: auto picks {choice.reason}")
            self._write(
                "choice",
                phase=number,
                reducer=choice.reducer,
                options=choice.options,
                predicted_seconds=choice.seconds,
                predicted_dense_seconds=choice.dense_seconds,
                reason=choice.reason,
            )
        for line in self.learner.how_norms_are_computed():
            self.progress.say(line)
            self._write("norms", reason=line)

    def _prepare(self) -> None:
        """Compile the steps of all phases to come: at the boundaries nobody waits for that."""
        start = time.perf_counter()
        for phase in self.phases[self.position.phase :]:
            phase.backward.prepare()
        seconds = time.perf_counter() - start
        self._write("prepare", compile_seconds=seconds)

    # ------------------------------------------------------------------------------------- phases

    def _train_phase(self, phase: PhaseRun) -> None:
        self._switch_to(phase)
        while self.position.phase_steps < phase.steps and not self.summary.reached:
            if self.position.epoch > 0 or phase.epochs == 1:
                self._fill_ahead(phase.number + 1)
            self._train_epoch(phase)
        self._boundary = time.perf_counter()
        phase.close()
        if not self.summary.reached:
            at = self.position
            self.position = Position(phase.number + 1, steps=at.steps, run_epoch=at.run_epoch)

    def _switch_to(self, phase: PhaseRun) -> None:
        if phase.number == 0 or self.position.phase_steps > 0:
            return
        before = self.config.phases[phase.number - 1]
        residual = self.learner.begin(phase.phase)
        if residual is None:
            return
        self.progress.say(
            f"switch from {before.reducer} to {phase.result.reducer}: "
            f"the residual (norm {residual:.3g} on rank 0) goes into the next step"
        )
        self._write("switch", before=before.reducer, after=phase.result.reducer, residual_norm=residual)

    def _fill_ahead(self, number: int) -> None:
        """Read what a phase keeps, in the background, so that its first epoch finds it."""
        if number < len(self.phases) and self.data.places.memory is not None:
            self.phases[number].fill_ahead()

    def _train_epoch(self, phase: PhaseRun) -> None:
        """Train on the batches of an epoch that are left, then test."""
        at = self.position
        self._set_density(phase, at.epoch)
        self._last = time.perf_counter()
        for batch in phase.data.training_batches(at.run_epoch, at.step):
            self.train_step(phase, batch)
            if self.position.phase_steps == phase.steps:
                break
        if phase.number > 0 and self.position.phase_steps == len(self._tally.seconds):
            self._note_stall(phase)
        self._finish_epoch(phase)

    def _set_density(self, phase: PhaseRun, epoch: int) -> None:
        if (density := phase.density(epoch)) is not None:
            self.learner.set_density(density)

    def train_step(self, phase: PhaseRun, batch: Any) -> None:
        """Learn from one batch; all ranks call it together."""
        at = self.position
        pace = phase.pace(at.phase_steps)
        loss, report = self.learner.step(phase.backward, batch, pace)
        now = time.perf_counter()
        self._tally.add(loss, report, now - self._last)
        self._last = now
        if at.phase_steps == 0:
            self._first_step_end = now
        self.position = replace(
            at,
            step=at.step + 1,
            phase_steps=at.phase_steps + 1,
            steps=at.steps + 1,
            samples=at.samples + phase.global_batch,
        )
        self._watch_for_void_steps(phase, report, pace)
        self._log_step(phase, loss, report, pace)
        if self._is_due(phase):
            self._save()
            self._last = time.perf_counter()

    def _is_due(self, phase: PhaseRun) -> bool:
        """Return whether a checkpoint is made after this step; an epoch's last waits for the test."""
        every, at = self.config.checkpoints and self.config.checkpoints.every_steps, self.position
        ends = at.step == phase.epoch_steps or at.phase_steps == phase.steps
        return bool(every) and at.steps % every == 0 and not ends

    def _watch_for_void_steps(self, phase: PhaseRun, report: Report, pace: Pace) -> None:
        self._voided_in_a_row = 0 if report.finite else self._voided_in_a_row + 1
        phase.result.void_steps += not report.finite
        if self._voided_in_a_row == VOID_STEPS_IN_A_ROW:
            raise TrainingDiverged(
                f"{VOID_STEPS_IN_A_ROW} steps in a row had a NaN or an infinity in their gradients; "
                f"the learning rate is {pace.learning_rate:g}: try a smaller one"
            )

    def _note_stall(self, phase: PhaseRun) -> None:
        """Note how long after the end of the phase before the first step ended, but for a step."""
        seconds = self._first_step_end - self._boundary - float(np.median(self._tally.seconds))
        phase.result.stall_seconds = seconds
        self._write("stall", phase=phase.number, stall_seconds=seconds)

    # ---------------------------------------------------------------------------------- evaluation

    def _finish_epoch(self, phase: PhaseRun) -> None:
        at, config = self.position, self.config
        last, number = at.phase_steps == phase.steps, at.run_epoch + 1
        tested = last or number % config.evaluate_every == 0
        result = self._add_up(phase, self._evaluate(phase) if tested else None)
        self._report(result)
        if self._dawnbench is not None:
            self._dawnbench.add(result)
        self._tally = Tally()
        self.position = replace(at, epoch=at.epoch + 1, run_epoch=number, step=0, samples=0)
        is_best = self._judge(result)
        every = config.checkpoints and config.checkpoints.every_epochs
        if last or is_best or (every and number % every == 0):
            self._save(best=is_best)

    def _evaluate(self, phase: PhaseRun) -> np.ndarray[Any, Any]:
        """Return right answers (first, among five) and samples of the test part, each counted once."""
        learner, counted = self.learner, np.zeros(3, np.int64)
        average_statistics(learner.model)
        check_equal_weights(learner.model, self.topology.world)
        with learner.tested():
            for batch in phase.data.test_batches():
                counted[:2] += learner.forward.right(batch.images, batch.labels, batch.counts)
                counted[2] += batch.counts.sum()
        return self.topology.world.agree(counted.tolist()).sum(axis=0)

    def _add_up(self, phase: PhaseRun, counted: Any) -> EpochResult:
        """Add up over all ranks what they did in an epoch; all of them call it together."""
        tally, size = self._tally, self.learner.gradients.size
        dense = cost.dense(self.topology.nodes, self.rank, size).inter
        sums = tally.over_ranks(self.topology.world, dense)
        phase.result.sent += sums.sent.inter
        phase.result.dense += sums.dense_inter_bytes
        seconds = float(np.sum(tally.seconds))
        self.summary.seconds = time.perf_counter() - self._began
        return EpochResult(
            epoch=self.position.run_epoch,
            reducer=phase.result.reducer,
            input_size=phase.phase.input_size,
            steps=tally.steps,
            loss=sums.loss,
            correct=None if counted is None else int(counted[0]),
            correct_of_five=None if counted is None else int(counted[1]),
            samples=0 if counted is None else int(counted[2]),
            train_seconds=seconds,
            run_seconds=self.summary.seconds,
            images_per_second=len(tally.seconds) * phase.global_batch / seconds if seconds else 0.0,
            sent_intra_bytes=sums.sent.intra,
            sent_inter_bytes=sums.sent.inter,
            dense_inter_bytes=sums.dense_inter_bytes,
        )

    def _judge(self, result: EpochResult) -> bool:
        """Note what was reached, and return whether it is the best so far; equal on all ranks."""
        if result.correct is None:
            return False
        summary, target = self.summary, self.config.target
        summary.correct, summary.samples = result.correct, result.samples
        summary.correct_of_five = result.correct_of_five or 0
        metric = "top1" if target is None else target.metric
        share = result.accuracy if metric == "top1" else result.accuracy_of_five
        assert share is not None
        if target is not None and share >= target.at_least:
            summary.reached = True
            self.progress.say(
                f"{metric} {share:.2%} reaches the target of {target.at_least:.2%} "
                f"after {summary.seconds:.1f} s"
            )
        is_best = summary.best is None or share > summary.best
        summary.best = share if is_best else summary.best
        return is_best

    # --------------------------------------------------------------------------------- checkpoints

    def _save(self, *, best: bool = False) -> None:
        """Write a checkpoint; all ranks call it together."""
        if self._checkpoints is None:
            return
        start = time.perf_counter()
        self.summary.seconds = start - self._began
        shared = shared_state(self.learner)
        shared |= {"position": as_tree(self.position), "summary": asdict(self.summary)}
        own = own_state(self.learner) | {"tally": self._tally.as_tree()}
        self._checkpoints.save(self.position.steps, shared, own, best=best)
        self._write("checkpoint", steps=self.position.steps, save_seconds=time.perf_counter() - start)

    def _resume(self, checkpoint: Checkpoint | None) -> None:
        """Go on where a checkpoint was made; all ranks call it together."""
        if checkpoint is None:
            self.progress.say("resume: there is no checkpoint yet: the run begins anew")
            return
        shared: Any = checkpoint.shared
        position = Position(**shared["position"])
        phase = self.phases[min(position.phase, len(self.phases) - 1)]
        self.learner.begin(phase.phase)
        # A density is a setting of the reducer: the state to come is of the epoch that it was made in.
        self._set_density(phase, position.epoch if position.step else max(0, position.epoch - 1))
        lines = restore(self.learner, checkpoint)
        self.summary.restore(shared["summary"])
        own: Any = checkpoint.own
        if own is not None:
            self._tally = Tally.of(own["tally"])
        self.position = phase.place(position)
        lines += _moved(position, self.position, phase)
        self._tell_resumption(checkpoint, lines)

    def _tell_resumption(self, checkpoint: Checkpoint, lines: list[str]) -> None:
        at, name = self.position, checkpoint.path.name
        self.progress.say(
            f"resumed from {name}: step {at.steps}, phase {at.phase + 1}, epoch {at.run_epoch + 1}"
        )
        for line in lines:
            self.progress.say(line)
        self._write("resume", checkpoint=name, changes=lines, **asdict(at))

    # ------------------------------------------------------------------------------------ telling

    def _log_step(self, phase: PhaseRun, loss: float, report: Report, pace: Pace) -> None:
        at = self.position
        self.progress.update(
            f"epoch {at.run_epoch + 1}  step {at.phase_steps}/{phase.steps} of"
            f" {phase.result.reducer} at {phase.phase.input_size} px  loss {loss:.3f} (rank 0)"
        )
        if at.steps % self.config.log_every == 0:
            self._write(
                "step",
                epoch=at.run_epoch,
                step=at.phase_steps,
                loss=loss if np.isfinite(loss) else None,
                learning_rate=pace.learning_rate,
                momentum=pace.momentum,
                loss_scale=None if self.learner.scale is None else float(self.learner.scale.scale.numpy()),
                finite=report.finite,
                selected=report.selected,
                applied=report.applied,
                traffic=asdict(report.traffic),
                stage_seconds=asdict(report.seconds),
            )

    def _report(self, result: EpochResult) -> None:
        at, width = self.position, max(len(phase.result.reducer) for phase in self.phases)
        now, *later = self.phases[at.phase :]
        to_come = -(-(now.steps - at.phase_steps) // now.epoch_steps) + sum(phase.epochs for phase in later)
        self.progress.say(epoch_line(result, epochs=result.epoch + 1 + to_come, width=width))
        self._write(
            "epoch", accuracy=result.accuracy, accuracy_of_five=result.accuracy_of_five, **asdict(result)
        )

    def _write(self, kind: str, **values: Any) -> None:
        if self.folder is not None:
            self.folder.write(kind, **values)

    def _end(self) -> Summary:
        summary = self.summary
        summary.seconds = time.perf_counter() - self._began
        summary.held_back = float(np.linalg.norm(self.learner.gradients.reducer.residual))
        reads = self.data.read_so_far()
        for line in reads.lines():
            self.progress.say(line)
        self._write("cache", **reads.counts, stand_ins=reads.stand_ins)
        if self.folder is not None:
            with self.learner.tested():
                self.folder.save_weights(self.model)
            self.folder.end(summary)
        return summary


def _moved(before: Position, after: Position, phase: PhaseRun) -> list[str]:
    """Return a line that tells where an epoch goes on, where its steps take another number of samples."""
    if before == after:
        return []
    return [
        f"a step takes {phase.global_batch} samples now: {before.samples} of the epoch are read, it goes on "
        f"with step {after.step + 1} of {phase.epoch_steps}"
    ]


def _of_first(comm: Communicator, function: Callable[[], Result]) -> Result:
    """Return what ``function()`` returns on rank 0, or raise its ``ValueError``, on all ranks."""
    result, problem = None, None
    try:
        result = function() if comm.rank == 0 else None
    except ValueError as error:
        problem = str(error)
    result, problem = comm.allgather_objects((result, problem))[0]
    if problem is not None:
        raise ValueError(problem)
    return result  # type: ignore[return-value]
